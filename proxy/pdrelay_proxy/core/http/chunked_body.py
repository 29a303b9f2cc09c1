"""Where a chunked body ends (RFC 9112, 7.1), within limits."""

import re
from typing import Final

from pdrelay_proxy.core.http.framing import (
    BARE_LINE_FEED,
    HEAD_MOST,
    LENGTH_DIGITS_MOST,
    LINES_MOST,
    VALUE_TEXT,
    read_line,
    shown_text,
)
from pdrelay_proxy.errors import BadFraming, HeadTooLarge

_EXTENSIONS_MOST: Final = 64 * 1024  # bytes of all chunk extensions of a body
_SIZE_LINE_MOST: Final = 4096  # bytes of the line with a chunk's size
# A chunk takes the same time whatever its size: megabytes in chunks of two bytes would take
# seconds.
_SMALL_CHUNKS_MOST: Final = 64 * 1024  # bytes of a body whose chunks may be of any size
_MEAN_CHUNK_LEAST: Final = 64  # bytes of a chunk, on average, of a longer body
_SIZE_LINE: Final = re.compile(
    rb"([0-9a-fA-F]{1,%d})((?:[ \t]*;%b*)?)\r\n" % (LENGTH_DIGITS_MOST, VALUE_TEXT)
)


class ChunkedBody:
    """Decodes a chunked body; extensions and trailers are checked, counted and dropped."""

    __slots__ = (
        "_count",
        "_extensions",
        "_in_trailers",
        "_left",
        "_pending",
        "_searched",
        "_size",
        "is_over",
        "rest",
    )

    def __init__(self) -> None:
        self.is_over = False
        self.rest = b""  # the bytes behind the body, once it is over
        self._left = 0  # bytes of the chunk still to come, with its CR LF
        self._pending = b""  # a line that is not complete
        self._searched = 0  # bytes of incomplete trailers that were looked at
        self._extensions = 0  # bytes
        self._count = 0  # chunks
        self._size = 0  # bytes of the chunks whose sizes have come
        self._in_trailers = False

    @property
    def line_size(self) -> int:
        """The bytes of an incomplete line, or of incomplete trailers."""
        return len(self._pending)

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body that is in ``data``.

        Raises:
            BadFraming: it is not chunked, or its chunks are too small.
            HeadTooLarge: there are too many trailers.
        """
        if self._pending:
            data = self._pending + data
            self._pending = b""
        body = bytearray()
        pos = self._finish_chunk(data, body)
        size = len(data)
        match_line = _SIZE_LINE.match
        while pos < size and not self._in_trailers:
            line = match_line(data, pos)
            if line is None:
                self._expect_line(data, pos)
                return bytes(body)
            if line.end(2) > line.end(1):
                self._count_extension(line)
            pos = line.end()
            length = int(line[1], 16)
            end = pos + length
            self._count += 1
            self._size += length
            if (
                self._size > _SMALL_CHUNKS_MOST
                and length
                and self._size < self._count * _MEAN_CHUNK_LEAST
            ):
                raise BadFraming(
                    f"the chunks of the body have less than {_MEAN_CHUNK_LEAST} bytes on average, "
                    f"which is the least "
                    f"above {_SMALL_CHUNKS_MOST} bytes: send larger chunks, or Content-Length"
                )
            if length and data[end : end + 2] == b"\r\n":  # all of it is here
                body += data[pos:end]
                pos = end + 2
            elif length:
                self._left = length + 2
                pos += self._finish_chunk(data[pos:], body)
            else:
                self._in_trailers = True
        if self._in_trailers:
            self._read_trailers(data[pos:])
        return bytes(body)

    def _finish_chunk(self, data: bytes, body: bytearray) -> int:
        """Add the rest of a chunk to the body; return how many bytes were used."""
        left = self._left
        if not left:
            return 0
        piece = data[:left]
        content_size = max(0, left - 2)
        self._left = left - len(piece)
        body += piece[:content_size]
        if not b"\r\n"[max(0, 2 - left) :].startswith(piece[content_size:]):
            raise BadFraming("a chunk of the body is longer than its size says")
        return len(piece)

    def _expect_line(self, data: bytes, pos: int) -> None:
        """Keep the beginning of a size line for later."""
        rest = data[pos:]
        if b"\n" in rest or len(rest) >= _SIZE_LINE_MOST or not _may_be_a_size(rest):
            raise BadFraming(f"{shown_text(rest)} does not begin with the size of a chunk")
        self._pending = rest

    def _count_extension(self, line: re.Match[bytes]) -> None:
        self._extensions += line.end(2) - line.end(1)
        if self._extensions > _EXTENSIONS_MOST or line.end() - line.start() > _SIZE_LINE_MOST:
            raise BadFraming(
                f"the chunk extensions have more than {_EXTENSIONS_MOST} bytes, or one line of "
                f"them more than "
                f"{_SIZE_LINE_MOST}: that is the most this router takes"
            )

    def _read_trailers(self, data: bytes) -> None:
        """Look for the empty line behind the trailers."""
        if data.startswith(b"\r\n"):
            end = 0
        else:
            end = data.find(b"\r\n\r\n", max(0, self._searched - 3), HEAD_MOST)
            if end < 0 and len(data) >= HEAD_MOST:
                raise HeadTooLarge(
                    f"the trailers have more than {HEAD_MOST} bytes, the most this router takes"
                )
            if end < 0:
                if BARE_LINE_FEED.search(data, max(0, self._searched - 1)):
                    raise BadFraming(
                        "a line of the trailers ends with a line feed alone: end each with CR LF"
                    )
                self._pending = data
                self._searched = len(data)
                return
            lines = data[:end].split(b"\r\n")
            if len(lines) > LINES_MOST:
                raise HeadTooLarge(
                    f"there are {len(lines)} trailers, and {LINES_MOST} are the most this router "
                    f"takes"
                )
            for line in lines:
                read_line(line)
            end += 2
        self.is_over = True
        self.rest = data[end + 2 :]


def _may_be_a_size(rest: bytes) -> bool:
    """Return whether an incomplete line may still become a size line."""
    return _SIZE_LINE.fullmatch(rest.rstrip(b" \t\r") + b"\r\n") is not None
