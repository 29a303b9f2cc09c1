"""What is read to its end has one."""

import pytest

from pdrelay_proxy.core.http.bounded_body import read_bounded


class TooLong(Exception):
    """It is."""


async def pieces(*given, read=None):
    for piece in given:
        if read is not None:
            read.append(piece)
        yield piece


async def test_pieces_become_one():
    """In their order, up to the limit itself."""
    assert await read_bounded(pieces(), 0, TooLong()) == b""
    assert await read_bounded(pieces(b"ab", b"", b"c"), 3, TooLong()) == b"abc"


async def test_nothing_is_read_beyond_the_limit():
    """A body without an end must not fill the memory."""
    read = []
    with pytest.raises(TooLong):
        await read_bounded(pieces(b"ab", b"cd", b"ef", read=read), 3, TooLong())

    assert read == [b"ab", b"cd"]
