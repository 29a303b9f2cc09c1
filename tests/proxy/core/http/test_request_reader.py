"""What one connection sends is the same requests, however its bytes are divided."""

from itertools import pairwise

import pytest

from pdrelay_proxy.core.http.framing import HEAD_MOST
from pdrelay_proxy.core.http.request_reader import RequestReader
from pdrelay_proxy.errors import BadFraming, ClientError, UriTooLong

POST = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\n"
LONG = POST + b"content-length: 11\r\n\r\nhello world"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n5;x=1\r\nhello\r\n6\r\n world\r\n0\r\nt: 1\r\n\r\n"
EMPTY = b"\r\nGET /health HTTP/1.1\r\nhost: r\r\n\r\n"
EVERY = LONG + CHUNKED + EMPTY + LONG
WANTED = [
    (b"/v1/completions", b"hello world"),
    (b"/v1/completions", b"hello world"),
    (b"/health", b""),
    (b"/v1/completions", b"hello world"),
]


def requests_in(pieces):
    """Return the target and the body of each request whose end is in these pieces of a connection."""
    reader = RequestReader()
    found = []
    body = b""
    target = b""
    for piece in pieces:
        data = piece
        while data:
            if reader.in_body:
                body += reader.read_body(data)
                data = reader.rest if not reader.in_body else b""
            elif (head := reader.read_head(data)) is None:
                data = b""
            else:
                data = reader.rest
                target = head.target
                body = b""
                if head.length != 0:
                    reader.expect_body(head.length)
                    continue
            if not reader.in_body and not reader.head_size:
                found.append((target, body))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, len(EVERY)])
def test_requests_are_the_same_in_pieces_of_any_size(size):
    assert requests_in([EVERY[at : at + size] for at in range(0, len(EVERY), size)]) == WANTED


def test_requests_are_the_same_wherever_they_are_cut_once():
    found = [requests_in([EVERY[:cut], EVERY[cut:]]) for cut in range(1, len(EVERY))]

    assert all(each == WANTED for each in found)


def test_a_head_is_charged_by_its_bytes_until_its_end_is_here():
    reader = RequestReader()
    sizes = []
    for start, end in pairwise([0, 4, 40, LONG.index(b"hello") - 2]):
        assert reader.read_head(LONG[start:end]) is None
        sizes.append(reader.head_size)

    assert sizes == [4, 40, LONG.index(b"hello") - 2]
    assert reader.read_head(LONG[sizes[-1] :]).length == 11
    assert reader.head_size == 0
    assert reader.rest == b"hello world"


def test_the_target_of_a_head_that_is_refused_can_be_told():
    begun = RequestReader()
    whole = b"POST /v1/completions?x HTTP/1.1\r\nbad line\r\n\r\n"
    assert begun.read_head(whole[:20]) is None
    with pytest.raises(BadFraming):
        begun.read_head(whole[20:])
    assert begun.target() == b"/v1/completions?x"

    at_once = RequestReader()
    with pytest.raises(BadFraming):
        at_once.read_head(whole)
    assert at_once.target(whole) == b"/v1/completions?x"


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"\r\n" * 9, BadFraming),
        (b"GET /" + b"a" * HEAD_MOST, UriTooLong),
        (b"GET / HTTP/1.1\nhost: r\r\n", BadFraming),
    ],
)
def test_what_cannot_become_a_head_is_refused_before_its_end(sent, error):
    with pytest.raises(error):
        RequestReader().read_head(sent)


def test_empty_lines_alone_are_no_head():
    """Who sends nothing else has asked for nothing, and gets no answer."""
    reader = RequestReader()

    assert reader.read_head(b"\r\n") is None
    assert (reader.has_begun_head, reader.head_size) == (False, 2)
    assert reader.read_head(b"GET") is None
    assert reader.has_begun_head


def test_a_body_that_is_refused_is_still_coming():
    """So that nobody answers what is behind it."""
    reader = RequestReader()
    assert reader.read_head(POST + b"transfer-encoding: chunked\r\n\r\n") is not None
    reader.expect_body(None)
    with pytest.raises(ClientError):
        reader.read_body(b"no size\r\n")

    assert reader.in_body
    assert reader.is_chunked
