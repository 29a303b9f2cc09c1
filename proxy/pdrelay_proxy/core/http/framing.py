"""Where a head ends, and what it says of the request behind it, within limits.

Whatever two parsers could understand differently is refused, wherever RFC 9112 allows it: a gateway
before the router may understand it the other way.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from pdrelay_proxy.errors import BadFraming, HeadTooLarge, NotServed, UriTooLong

# bytes of a request line with its headers, or of the trailers of a chunked body
HEAD_MOST: Final = 64 * 1024
LINES_MOST: Final = 256  # header lines, or lines of trailers
LENGTH_DIGITS_MOST: Final = 15
_TOKEN: Final = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]"  # a character of a name (RFC 9110, 5.6.2)
VALUE_TEXT: Final = rb"[\t -~\x80-\xff]"  # a character of a value (RFC 9110, 5.5)
_REQUEST: Final = re.compile(rb"(%b++) ([!-~]++) HTTP/1\.([01])\r\n" % _TOKEN)
_NAME: Final = re.compile(rb"%b+" % _TOKEN)
_VALUE: Final = re.compile(rb"%b*" % VALUE_TEXT)
BARE_LINE_FEED: Final = re.compile(rb"(?<!\r)\n")  # a line feed on its own
_SHOWN_MOST: Final = 60  # bytes of a client's input that an error quotes
# A good line: its name, and its value without the white space before it.
_HEADER: Final = re.compile(rb"(?<=\r\n)(%b++):[\t ]*+(%b*+)\r\n" % (_TOKEN, VALUE_TEXT))
_SPACE: Final = 32  # white space is the only byte of a value up to it


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
    if BARE_LINE_FEED.search(received, max(start, start + read - 1)):
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
        raise BadFraming(f"the request line is {shown_text(line)}: write METHOD TARGET HTTP/1.1")
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
                f"Content-Length is {shown_text(b', '.join(values))}: send one whole number of bytes"
            )
        shown = shown_text(b", ".join(values))
        raise BadFraming(f"Transfer-Encoding is {shown}: this router takes chunked alone")


def read_line(line: bytes) -> tuple[bytes, bytes]:
    """Return the name in lower case and the value of a header line.

    Raises:
        BadFraming: it is not a header line.
    """
    name, colon, value = line.partition(b":")
    if not colon or _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
        raise BadFraming(f"{shown_text(line)} is not a header line: write NAME: VALUE")
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
                f"Transfer-Encoding is {shown_text(coding)}: this router takes chunked alone"
            )
        return None
    if length is None:
        return 0
    if not length.isdigit() or len(length) > LENGTH_DIGITS_MOST:  # ASCII digits: these are bytes
        raise BadFraming(f"Content-Length is {shown_text(length)}: send one whole number of bytes")
    return int(length)


def shown_text(text: bytes) -> str:
    """Quote the beginning of a client's input."""
    return repr(text[:_SHOWN_MOST].decode("latin-1")) + ("..." if len(text) > _SHOWN_MOST else "")
