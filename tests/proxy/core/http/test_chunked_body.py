"""Where chunked bodies end; what a real router does of it is in test_front_door.py."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.http.chunked_body import ChunkedBody
from pdrelay_proxy.errors import BadFraming, ClientError


def cut(data, places):
    places = sorted(place % (len(data) + 1) for place in places)
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a < b]


def read(pieces):
    """Read a chunked body in pieces; return it, and what follows it."""
    chunks = ChunkedBody()
    body = b""
    for number, piece in enumerate(pieces):
        body += chunks.feed(piece)
        if chunks.is_over:
            return body, chunks.rest + b"".join(pieces[number + 1 :])
    return body, None


WIRE = st.one_of(
    st.binary(max_size=40),
    st.lists(
        st.sampled_from([b"0\r\n", b"\r\n", b"3\r\nabc\r\n", b"3;a=b\r\n", b"abc", b"A: b\r\n", b"GET /", b"3 ", b"\n"])
    ).map(b"".join),
)  # fmt: skip


@given(WIRE, st.lists(st.integers(0, 200), max_size=8))
def test_a_chunked_body_means_the_same_however_it_is_cut(wire, places):
    """Also where it is refused."""
    try:
        whole = read([wire] if wire else [])
    except ClientError:
        whole = "refused"
    try:
        pieces = read(cut(wire, places))
    except ClientError:
        pieces = "refused"

    assert pieces == whole


def test_extensions_and_trailers_are_dropped():
    """And what follows is the next request's."""
    assert read([b"3;a=b\r\nabc\r\n0\r\nHost: y\r\n\r\nnext"]) == (b"abc", b"next")


def test_trailers_that_come_byte_by_byte_take_no_longer_the_more_of_them_there_are():
    """Looked at from their beginning with each byte, 64 KiB of them held up all requests for ten seconds."""
    chunks = ChunkedBody()
    chunks.feed(b"0\r\nA: ")
    began = time.process_time()

    for _ in range(60_000):
        chunks.feed(b"x")

    assert time.process_time() - began < 2


def chunks_of(size, count):
    return b"%x\r\n%b\r\n" % (size, b"x" * size) * count


@pytest.mark.parametrize("size", [1, 2, 63])
@pytest.mark.parametrize("piece", [100_000, 1_000, 7])
def test_a_long_body_in_small_chunks_is_refused(size, piece):
    """Each chunk costs as much as a large one: up to 64 KiB they may be of any size, above at least 64 bytes each."""
    enough = 64 * 1024 // size
    wire = chunks_of(size, enough)
    chunks = ChunkedBody()
    body = b""
    for at in range(0, len(wire), piece):
        body += chunks.feed(wire[at : at + piece])

    assert len(body) == enough * size
    with pytest.raises(BadFraming, match="64 bytes on average"):
        chunks.feed(chunks_of(size, 64))


def test_a_long_body_in_chunks_of_some_size_is_read():
    """A client library writes what it has: a few small chunks are none of its faults."""
    wire = chunks_of(1, 20) + chunks_of(5000, 20) + chunks_of(64, 4096) + chunks_of(1, 20)

    assert read([wire + b"0\r\n\r\n"]) == (b"x" * (20 + 100_000 + 64 * 4096 + 20), b"")
