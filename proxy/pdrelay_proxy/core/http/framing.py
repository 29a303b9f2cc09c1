"""Where a request begins and ends: heads and chunked bodies, within limits.

Whatever two parsers could understand differently is refused, wherever RFC 9112 allows it: a gateway
before the router may understand it the other way.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from pdrelay_proxy.errors import BadFraming, HeadTooLarge, NotServed, UriTooLong

# bytes of a request line with its headers, or of the trailers of a chunked body
HEAD_MOST: Final = 64 * 1024
LINES_MOST: Final = 256  # header lines, or lines of trailers
_EXTENSIONS_MOST: Final = 64 * 1024  # bytes of all chunk extensions of a body
_SIZE_LINE_MOST: Final = 4096  # bytes of the line with a chunk's size
# A chunk takes the same time whatever its size: megabytes in chunks of two bytes would take
# seconds.
_SMALL_CHUNKS_MOST: Final = 64 * 1024  # bytes of a body whose chunks may be of any size
_MEAN_CHUNK_LEAST: Final = 64  # bytes of a chunk, on average, of a longer body
LENGTH_DIGITS_MOST: Final = 15
_REQUEST: Final = re.compile(rb"([-!#$%&'*+.^_`|~0-9A-Za-z]++) ([!-~]++) HTTP/1\.([01])\r\n")
_NAME: Final = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(rb"[\t -~\x80-\xff]*")
_BARE: Final = re.compile(rb"(?<!\r)\n")  # a line feed on its own
_SIZE_LINE: Final = re.compile(
    rb"([0-9a-fA-F]{1,%d})((?:[ \t]*;[\t -~\x80-\xff]*)?)\r\n" % LENGTH_DIGITS_MOST
)
_SHOWN_MOST: Final = 60  # bytes of a client's input that an error quotes
# A good line: its name, and its value without the white space before it.
_HEADER: Final = re.compile(
    rb"(?<=\r\n)([-!#$%&'*+.^_`|~0-9A-Za-z]++):[\t ]*+([\t -~\x80-\xff]*+)\r\n"
)
_SPACE: Final = 32  # white space is the only byte of a value up to it


class RefusalReason(StrEnum):
    """Why a connection was closed before its request was served, as the metric names it."""

    MALFORMED = "malformed"
    HEAD = "head_too_large"  # or trailers
    URI = "uri_too_long"
    METHOD = "method"  # CONNECT
    HEAD_TIMEOUT = "head_timeout"
    BODY_TIMEOUT = "body_timeout"
    CONNECTIONS = "max_connections"
    ADDRESS = "max_connections_per_address"


class Head:
    """A valid head, without what the router ignores. It is never changed."""

    __slots__ = (
        "expects",
        "headers",
        "is_old",
        "keep_alive",
        "length",
        "method",
        "raw",
        "shown",
        "target",
    )

    def __init__(  # noqa: PLR0917 (by name they cost several thousand instructions more)
        self,
        raw: bytes,
        length: int | None,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        shown: Mapping[bytes, bytes],
        is_old: bool,  # noqa: FBT001
        keep_alive: bool,  # noqa: FBT001
        expects: bool,  # noqa: FBT001
    ) -> None:
        self.raw = raw  # with the empty line at its end
        self.length = length  # bytes of the body; None: it is chunked
        self.method = method
        self.target = target  # as it came
        self.headers = headers  # names in lower case; without Upgrade
        self.shown = shown  # the same by name; of several with one name, the first
        self.is_old = is_old  # HTTP/1.0
        # the client does not ask for the connection to be closed (RFC 9112, 9.6)
        self.keep_alive = keep_alive
        self.expects = expects  # the client waits for 100 Continue (RFC 9110, 10.1.1)

    def with_length(self, raw: bytes, digits: bytes, place: int) -> "Head":
        """Return the same head with another Content-Length, at ``place`` among the headers."""
        headers = [*self.headers]
        headers[place] = b"content-length", digits
        shown = {**self.shown, b"content-length": digits}
        length = int(digits)
        keep_alive = self.keep_alive
        expects = self.expects
        return Head(
            raw, length, self.method, self.target, headers, shown, self.is_old, keep_alive, expects
        )


def find_end(received: bytes | bytearray, start: int, *, read: int = 0) -> int:
    """Return where the head that begins at ``start`` ends, behind its empty line; -1: more is to
    come.

    ``read``: how many bytes of it an earlier call has searched.

    Raises:
        UriTooLong: the request line alone is over the limit.
        HeadTooLarge: the head is.
        BadFraming: a line ends without a carriage return.
    """
    end = received.find(b"\r\n\r\n", max(start, start + read - 3), start + HEAD_MOST)
    if end >= 0:
        return end + 4
    if len(received) - start >= HEAD_MOST:
        if received.find(b"\r\n", start, start + HEAD_MOST) < 0:
            raise UriTooLong(
                f"the request line has more than {HEAD_MOST} bytes, the most this router takes"
            )
        raise HeadTooLarge(
            f"the head of the request has more than {HEAD_MOST} bytes, the most this router takes"
        )
    if _BARE.search(received, max(start, start + read - 1)):
        raise BadFraming("a line of the head ends with a line feed alone: end each with CR LF")
    return -1


def read_head(raw: bytes) -> Head:
    """Parse a whole head.

    ``Upgrade`` is ignored, as RFC 9110, 7.8 allows.

    Raises:
        HeadTooLarge: it has too many lines.
        NotServed: it asks for a tunnel.
        BadFraming: it is not a head, or parsers could disagree about where its body ends or which
            host it names.
    """
    ends = raw.count(b"\r\n")  # of the request line, each header line and the empty one
    if ends > LINES_MOST + 2:
        raise HeadTooLarge(
            f"the head has {ends - 2} header lines, and {LINES_MOST} are the most this router takes"
        )
    request = _REQUEST.match(raw)
    if request is None:
        line = raw.partition(b"\r\n")[0]
        raise BadFraming(f"the request line is {_shown(line)}: write METHOD TARGET HTTP/1.1")
    method, target, minor = request.groups()
    if method == b"CONNECT":
        raise NotServed("CONNECT is not served: this router is no tunnel")
    lines: list[tuple[bytes, bytes]] = _HEADER.findall(raw, request.end())
    if len(lines) != ends - 2:
        _refuse_lines(raw[request.end() : -4])
    headers: list[tuple[bytes, bytes]] = []
    shown: dict[bytes, bytes] = {}
    for name, value in lines:
        if value and value[-1] <= _SPACE:
            value = value.rstrip(b" \t")
        lower = name.lower()
        headers.append((lower, value))
        shown.setdefault(lower, value)
    if len(shown) < len(headers):
        _check_single(headers)
    is_old = minor == b"0"
    if b"host" not in shown and not is_old:
        raise BadFraming("the request has no Host headers: send one")
    length = _length(shown.get(b"content-length"), shown.get(b"transfer-encoding"), is_old=is_old)
    keep_alive = b"connection" not in shown or not _closes(headers)
    if b"upgrade" in shown:
        raw, headers = _without_upgrade(raw, headers)
    expects = b"expect" in shown and shown[b"expect"].lower() == b"100-continue"
    return Head(raw, length, method, target, headers, shown, is_old, keep_alive, expects)


def target_in(received: bytes | bytearray) -> bytes:
    """Return the target in the beginning of a refused head; empty: there is none."""
    words = received[:HEAD_MOST].lstrip(b"\r\n").partition(b"\n")[0].split(b" ", 2)
    return bytes(words[1]) if len(words) > 1 else b""


def _refuse_lines(lines: bytes) -> None:
    """Raise BadFraming for the first line that is not a header."""
    for line in lines.split(b"\r\n"):
        read_line(line)  # one of them raises


def _without_upgrade(
    raw: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return a head, and its headers, without Upgrade."""
    lines = raw[:-4].split(b"\r\n")
    raw = b"\r\n".join([line for line in lines if line[:8].lower() != b"upgrade:"]) + b"\r\n\r\n"
    return raw, [header for header in headers if header[0] != b"upgrade"]


def _closes(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether the client asks for the connection to be closed."""
    for name, value in headers:
        if name == b"connection" and b"close" in [
            option.strip(b" \t") for option in value.lower().split(b",")
        ]:
            return True
    return False


def _check_single(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refuse a second header of those that decide where a request ends and which host it names (RFC
    9112, 3.2 and 6.3).
    """
    for name in (b"host", b"content-length", b"transfer-encoding"):
        values = [value for header_name, value in headers if header_name == name]
        if len(values) < 2:
            continue
        if name == b"host":
            raise BadFraming(f"the request has {len(values)} Host headers: send one")
        if name == b"content-length":
            raise BadFraming(
                f"Content-Length is {_shown(b', '.join(values))}: send one whole number of bytes"
            )
        shown = _shown(b", ".join(values))
        raise BadFraming(f"Transfer-Encoding is {shown}: this router takes chunked alone")


def read_line(line: bytes) -> tuple[bytes, bytes]:
    """Return the name in lower case and the value of a header line.

    Raises:
        BadFraming: it is not a header line.
    """
    name, colon, value = line.partition(b":")
    if not colon or _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
        raise BadFraming(f"{_shown(line)} is not a header line: write NAME: VALUE")
    return name.lower(), value.strip(b" \t")


def _length(length: bytes | None, coding: bytes | None, *, is_old: bool) -> int | None:
    """Return the bytes of the body, None if it is chunked (RFC 9112, 6.1 and 6.3)."""
    if coding is not None:
        if is_old:
            raise BadFraming("Transfer-Encoding in HTTP/1.0: send Content-Length")
        if length is not None:
            raise BadFraming(
                "the request has both Transfer-Encoding and Content-Length: send one of them"
            )
        if coding.lower() != b"chunked":
            raise BadFraming(
                f"Transfer-Encoding is {_shown(coding)}: this router takes chunked alone"
            )
        return None
    if length is None:
        return 0
    if not length.isdigit() or len(length) > LENGTH_DIGITS_MOST:  # ASCII digits: these are bytes
        raise BadFraming(f"Content-Length is {_shown(length)}: send one whole number of bytes")
    return int(length)


def _shown(text: bytes) -> str:
    return repr(text[:_SHOWN_MOST].decode("latin-1")) + ("..." if len(text) > _SHOWN_MOST else "")


class ChunkedBody:
    """Decodes a chunked body (RFC 9112, 7.1); extensions and trailers are checked, counted and
    dropped.
    """

    __slots__ = (
        "_count",
        "_extensions",
        "_in_trailers",
        "_left",
        "_pending",
        "_size",
        "is_over",
        "rest",
    )

    def __init__(self) -> None:
        self.is_over = False
        self.rest = b""  # the bytes behind the body, once it is over
        self._left = 0  # bytes of the chunk still to come, with its CR LF
        self._pending = b""  # a line that is not complete
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
            raise BadFraming(f"{_shown(rest)} does not begin with the size of a chunk")
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
            end = data.find(b"\r\n\r\n", 0, HEAD_MOST)
            if end < 0 and len(data) >= HEAD_MOST:
                raise HeadTooLarge(
                    f"the trailers have more than {HEAD_MOST} bytes, the most this router takes"
                )
            if end < 0:
                if _BARE.search(data):
                    raise BadFraming(
                        "a line of the trailers ends with a line feed alone: end each with CR LF"
                    )
                self._pending = data
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
