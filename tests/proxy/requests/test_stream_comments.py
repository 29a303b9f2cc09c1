"""Comments in quiet streams: when they come, and where they never stand."""

import pytest

from pdrelay_proxy.requests.stream_comments import CommentedResponse

COMMENT = b": keep-alive\n\n"


class Writer:
    """Keeps what is written."""

    def __init__(self):
        self.written = []
        self.begun = False
        self.keep_alive = True
        self.relay = print

    def begin(self, status, lines, body, *, streams, last=False):
        self.begun = True
        self.written.append((status, lines, body, streams, last))

    def write(self, piece):
        self.written.append(piece)

    def end(self, piece=b""):
        self.written.append(("end", piece))

    def close(self):
        self.written.append("closed")


@pytest.fixture
def writer():
    return Writer()


@pytest.fixture
def response(writer):
    return CommentedResponse(writer, 10.0, lambda: b"lines\r\n", now=100.0)


def test_a_stream_that_has_no_event_gets_comments_and_with_the_first_its_head(writer, response):
    """Each after the same time; the first event then comes without a head."""
    for now in (101.0, 109.9, 110.0, 119.0, 120.0):
        response.comment_if_quiet(now)
    response.begin(200, b"other\r\n", b"data: 1\n\n", streams=True)

    assert writer.written == [(200, b"lines\r\n", COMMENT, True, False), COMMENT, b"data: 1\n\n"]


def test_a_stream_that_goes_on_gets_none(writer, response):
    """And what is relayed goes through the same hands."""
    response.begin(200, b"a: b\r\n", b"data: 1\n\n", streams=True, last=True)
    for now in range(105, 200, 5):
        response.write(b"data: 2\n\n")
        response.comment_if_quiet(now)

    assert response.relay is None
    assert COMMENT not in writer.written
    assert writer.written[0] == (200, b"a: b\r\n", b"data: 1\n\n", True, True)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_no_comment_stands_within_an_event(writer, response, end):
    """Its line may be whole while the empty one is missing."""
    response.begin(200, b"", b"data: 1", streams=True)
    response.comment_if_quiet(105.0)
    response.comment_if_quiet(200.0)
    response.write(end[: len(end) // 2])
    response.comment_if_quiet(300.0)
    response.comment_if_quiet(400.0)
    assert COMMENT not in writer.written

    response.write(end[len(end) // 2 :])
    response.comment_if_quiet(401.0)
    response.comment_if_quiet(411.0)
    assert writer.written[-1] == COMMENT


@pytest.mark.parametrize("over", ["end", "whole", "close"])
def test_nothing_comes_behind_the_end(writer, response, over):
    """Nor into a whole answer: an error has its status as long as there was no comment."""
    if over == "end":
        response.begin(200, b"", b"data: 1\n\n", streams=True)
        response.end()
    elif over == "whole":
        response.begin(503, b"", b"{}", streams=False)
    else:
        response.close()
    before = list(writer.written)
    for now in (150.0, 200.0, 250.0):
        response.comment_if_quiet(now)

    assert writer.written == before


def test_the_connection_is_kept_as_the_response_says(writer, response):
    """It is the router that knows whether it leaves."""
    response.keep_alive = False
    response.comment_if_quiet(110.0)

    assert writer.keep_alive is False
