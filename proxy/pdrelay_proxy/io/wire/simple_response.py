"""Reads answers as engines nearly always give them: in one piece with an ordinary head, or as a
stream of chunks that come one by one.

One pattern reads such a head in a tenth of the time that llhttp and its callbacks take, and chunks
in a third. Whatever does not match to the last byte is left to llhttp, so an answer means the same
either way; a test reads the same answers both ways.
"""

import re
from typing import Final

CONTENT_TYPE: Final = b"application/json"
_MOST: Final = 4096  # bytes of such a head
# lines that do not matter here
_SILENT: Final = rb"(?:(?:date|server|x-request-id): [!-~ ]*+\r\n)*"
_LENGTH: Final = rb"content-length: ([0-9]{1,9}+)\r\n"
_TYPE: Final = rb"content-type: application/json\r\n"
_EVENTS: Final = rb"content-type: (text/event-stream(?:; charset=utf-8)?)\r\n"
_CHUNKED: Final = rb"transfer-encoding: chunked\r\n"
# of chunks, as engines write them: 5 and not 05 or +5
_SIZES: Final = {b"%x" % size: size for size in range(1, 4096)}
# How a chunk of so many bytes, with its size and the ends of two lines, must begin; empty: there is
# none.
_BEGINNINGS: Final = [b""] * 4103
for _size in range(1, 4096):
    _BEGINNINGS[len(b"%x\r\n\r\n" % _size) + _size] = b"%x\r\n" % _size
_HEAD: Final = re.compile(
    rb"HTTP/1\.1 200 OK\r\n%b(?:%b%b%b|%b%b%b)%b\r\n"
    % (_SILENT, _LENGTH, _SILENT, _TYPE, _TYPE, _SILENT, _LENGTH, _SILENT)
)
_STREAM_HEAD: Final = re.compile(
    rb"HTTP/1\.1 200 OK\r\n%b(?:%b%b%b|%b%b%b)%b\r\n"
    % (_SILENT, _CHUNKED, _SILENT, _EVENTS, _EVENTS, _SILENT, _CHUNKED, _SILENT)
)


class SimpleResponses:
    """Recognizes usual answers of one engine: 200, kept alive, and whole JSON or a stream in
    chunks.

    An engine repeats its head except for the length, and once a second the date: a head that
    differs from the one before only in the digits of its length is compared, not matched by the
    pattern.
    """

    __slots__ = ("_before", "_behind", "_end", "_start", "_stop", "_stream_head", "stream_type")

    def __init__(self) -> None:
        self._stream_head = b""  # of the latest stream
        self.stream_type = b""  # its content type
        # the bytes of the head before, on both sides of the digits
        self._before = self._behind = b""
        # where its digits began and ended, and where it ended itself
        self._start = self._stop = self._end = 0

    def match(self, received: bytes) -> bytes | None:
        """Return the body of a usual answer; None: it is another kind, or not all of it."""
        start = self._start
        stop = self._stop
        end = self._end
        digits = received[start:stop]
        if (
            digits.isdigit()
            and received[stop:end] == self._behind
            and received[:start] == self._before
        ):
            return received[end:] if len(received) - end == int(digits) else None
        if self._stream_head and received[: len(self._stream_head)] == self._stream_head:
            return None
        head = _HEAD.match(received, 0, _MOST)
        if head is None:
            return None
        group = 1 if head[1] is not None else 2
        start, stop, end = self._start, self._stop, self._end = (
            head.start(group),
            head.end(group),
            head.end(),
        )
        self._before = received[:start]
        self._behind = received[stop:end]
        return received[end:] if len(received) - end == int(head[group]) else None

    def match_stream(self, received: bytes) -> bytes:
        """Return the usual head of a stream of type ``stream_type``; empty: it is another kind."""
        before = self._stream_head
        if before and received[: len(before)] == before:
            return before
        head = _STREAM_HEAD.match(received, 0, _MOST)
        if head is None:
            return b""
        self._stream_head = head[0]
        self.stream_type = head[1] or head[2]
        return self._stream_head


def parse_single_chunk(received: bytes) -> bytes | None:
    """Return the content of one whole chunk of up to 4,095 bytes that came alone; None: the bytes
    are anything else.

    Call it only where the next byte that llhttp expects is the first of a chunk.
    """
    length = len(received)
    beginning = _BEGINNINGS[length] if length < len(_BEGINNINGS) else b""
    if not beginning or received[: len(beginning)] != beginning or received[-2:] != b"\r\n":
        return None
    return received[len(beginning) : -2]


def parse_chunks(received: bytes, offset: int, pieces: list[bytes]) -> int:
    """Append the contents of whole chunks of up to 4,095 bytes from ``offset`` on; return where
    they end.

    Call it only where ``offset`` is the first byte of a chunk. A chunk with a line end inside is
    left to llhttp.
    """
    # sizes and chunks alternate; cutting them out one by one takes longer
    lines = received[offset:].split(b"\r\n")
    for size, piece in zip(lines[:-2:2], lines[1:-1:2], strict=True):
        if not piece or _SIZES.get(size) != len(piece):
            break
        pieces.append(piece)
        offset += len(size) + len(piece) + 4
    return offset
