"""The bytes of an answer."""

import pytest

from pdrelay_proxy.requests.response import LONG_BODY, HttpResponse


class Connection:
    """Keeps what is written, write by write."""

    def __init__(self):
        self.written = []
        self.keep_alive = None

    def write(self, data):
        self.written.append(data)

    def default_lines(self):
        return b"date: today\r\n"

    def write_long(self, head, body):
        self.written += [head, body]

    def answered(self, *, keep_alive):
        self.keep_alive = keep_alive


@pytest.mark.parametrize(
    ("chunks", "framing", "first", "second", "end"),
    [
        (True, b"transfer-encoding: chunked\r\n", b"3\r\none\r\n", b"3\r\ntwo\r\n", b"3\r\nend\r\n0\r\n\r\n"),
        (False, b"", b"one", b"two", b"end"),
    ],
    ids=["HTTP/1.1", "HTTP/1.0"],
)
def test_each_piece_of_a_stream_is_one_write(chunks, framing, first, second, end):
    """The head goes with the first."""
    connection = Connection()
    response = HttpResponse(connection, connection.write, keep_alive=chunks, chunks=chunks)
    response.begin(200, b"a: b\r\n", b"one", streams=True)
    response.write(b"two")
    response.end(b"end")
    response.close()

    close = b"" if chunks else b"connection: close\r\n"
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\na: b\r\n" + close + framing + b"\r\n"
    assert connection.written == [head + first, second, end]
    assert connection.keep_alive is chunks


@pytest.mark.parametrize("chunks", [True, False])
def test_what_is_known_to_end_at_once_is_one_write(chunks):
    """A short stream is one packet."""
    connection = Connection()
    response = HttpResponse(connection, connection.write, keep_alive=True, chunks=chunks)
    response.begin(200, b"", b"one", streams=True, last=True)
    response.end()

    (written,) = connection.written
    assert written.endswith(b"\r\n\r\n3\r\none\r\n0\r\n\r\n" if chunks else b"\r\n\r\none")


def test_what_was_wrongly_known_to_end_is_held_no_longer_than_to_the_next_piece():
    """All of a stream would wait in memory."""
    connection = Connection()
    response = HttpResponse(connection, connection.write, keep_alive=True)
    response.begin(200, b"", b"one", streams=True, last=True)
    response.write(b"two")

    (written,) = connection.written
    assert written.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n")


def test_a_head_that_cannot_be_written_is_not_begun():
    """Else nothing could be answered in its place."""
    connection = Connection()
    response = HttpResponse(connection, connection.write, keep_alive=True)

    with pytest.raises(KeyError):
        response.begin(777, b"", b"", streams=False)

    assert not response.begun


@pytest.mark.parametrize("chunks", [True, False])
def test_a_whole_answer_says_how_long_it_is(chunks):
    """And nothing comes behind it."""
    connection = Connection()
    response = HttpResponse(connection, connection.write, keep_alive=True, chunks=chunks)
    response.begin(404, b"a: b\r\n", b"none", streams=False)
    response.end()

    assert connection.written == [b"HTTP/1.1 404 Not Found\r\ndate: today\r\na: b\r\ncontent-length: 4\r\n\r\nnone"]


def test_a_long_answer_is_no_single_write():
    """Its connection writes it in pieces, and has no copy of it with a head."""
    connection = Connection()
    body = b"x" * (LONG_BODY + 1)
    response = HttpResponse(connection, connection.write, keep_alive=True)
    response.begin(200, b"", body, streams=False)

    head, written = connection.written
    assert head.endswith(b"content-length: %d\r\n\r\n" % len(body))
    assert written is body
