"""The bytes of an answer: the one writer of what a client gets from the endpoints.

The head is written together with what follows it. A stream goes in chunks (RFC 9112, 7.1), each
piece in one write; for a client of HTTP/1.0, which knows none, the end of the connection is its
end.
"""

from collections.abc import Callable
from typing import Final, Protocol

from pdrelay_proxy.core.http.response_head import CONTROLS, STATUS_LINES
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.server_timing import server_timing

# a browser takes an answer for what its type says
NO_SNIFFING: Final = b"x-content-type-options: nosniff\r\n"
# nginx holds a stream back to its end without the one, and some caches do without the other.
STREAM_LINES: Final = NO_SNIFFING + b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
STREAM: Final = b"text/event-stream; charset=utf-8"
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
LONG_BODY: Final = 256 * 1024  # bytes of a whole answer that is written in pieces
_CLOSE: Final = b"connection: close\r\n"
_PLAIN_TYPES: Final[set[bytes]] = set()  # content types that may be sent
_PLAIN_TYPES_MOST: Final = 64


class ClientConnection(Protocol):
    """The connection that a request has come by."""

    def default_lines(self) -> bytes:
        """Return the header lines that the server puts into every head."""
        ...

    def write_long(self, head: bytes, body: bytes) -> None:
        """Write a head, and a long body as the client reads it; what waits is charged."""
        ...

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""
        ...


class ResponseWriter(Protocol):
    """Writes one answer."""

    keep_alive: bool

    @property
    def begun(self) -> bool:
        """Tell whether the head was written."""
        ...

    def begin(
        self, status: int, lines: bytes, body: bytes, *, streams: bool, last: bool = False
    ) -> None:
        """Write the head and the whole body, or the first piece of a stream; ``last``: its end
        follows at once.
        """
        ...

    @property
    def relay(self) -> Callable[[bytes], object] | None:
        """Writes a chunk as an engine has framed it, behind the first piece; None: ``write``."""
        ...

    def write(self, piece: bytes, /) -> None:
        """Write a piece of a stream."""
        ...

    def end(self, piece: bytes = b"", /) -> None:
        """Write the last piece of a stream, and its end; nothing behind a whole body."""
        ...

    def close(self) -> None:
        """Let go of the connection: no more is written."""
        ...


class HttpResponse:
    """Implements ResponseWriter for HTTP/1.1, and without ``chunks`` for clients of HTTP/1.0."""

    __deletable__ = ("_connection", "_write")  # mypyc wants to know
    __slots__ = ("_chunks", "_connection", "_held", "_streams", "_write", "begun", "keep_alive")

    def __init__(
        self,
        connection: ClientConnection,
        write: Callable[[bytes], object],
        keep_alive: bool,  # noqa: FBT001 (by name they cost 1,000 instructions more)
        chunks: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        """``write`` never waits; what is written for a client that has gone is dropped."""
        self._connection = connection
        self._write = write
        self._chunks = chunks
        self._held = b""  # to be written with what follows
        self._streams = False
        self.begun = False
        self.keep_alive = keep_alive

    def begin(
        self, status: int, lines: bytes, body: bytes, *, streams: bool, last: bool = False
    ) -> None:
        """Write the head and the whole body, or the first piece of a stream; ``last``: its end
        follows at once.
        """
        size = len(body)
        is_long = False
        first = body
        if not streams:
            framing = b"content-length: %d\r\n" % size
            if size > LONG_BODY:
                is_long = True
                first = b""
        elif self._chunks:
            framing = _CHUNKED
            first = b"%x\r\n%b\r\n" % (size, body) if body else b""
        else:
            framing = b""
        close = b"" if self.keep_alive else _CLOSE
        default = self._connection.default_lines()
        data = b"".join([STATUS_LINES[status], default, lines, close, framing, b"\r\n", first])
        self.begun = True
        self._streams = streams
        if is_long:
            self._connection.write_long(data, body)
        elif last:
            self._held = data
        else:
            self._write(data)

    @property
    def relay(self) -> Callable[[bytes], object] | None:
        """Write a chunk as it is; None where there are none."""
        return self._write if self._chunks else None

    def write(self, piece: bytes, /) -> None:
        """Write a piece of a stream."""
        data = b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunks else piece
        if self._held:
            data = self._held + data
            self._held = b""
        self._write(data)

    def end(self, piece: bytes = b"", /) -> None:
        """Write the end of a stream."""
        if self._streams:
            data = piece
            if self._chunks:
                data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n"
            self._write(self._held + data if self._held else data)
            self._held = b""

    def close(self) -> None:
        """Let go of the connection: the two hold each other."""
        connection = self._connection
        self._held = b""
        del self._connection, self._write
        connection.answered(keep_alive=self.keep_alive)


def head_lines(
    record: RequestRecord,
    content_type: bytes,
    *,
    shows_times: bool,
    tells_cache: bool = True,
    trouble: str = "",
    last_lines: bytes = NO_SNIFFING,
) -> bytes:
    """Return the header lines of an answer but for those that say where its body ends.

    ``tells_cache`` and ``trouble``: as in :func:`server_timing`.
    """
    lines = record.id_lines()
    timing = server_timing(record, trouble, tells_cache=tells_cache) if shows_times else ""
    if timing:
        lines = f"{lines}server-timing: {timing}\r\n"
    plain = content_type if content_type in _PLAIN_TYPES else _plain(content_type)
    return b"content-type: %b\r\n%b%b" % (plain, lines.encode("latin-1"), last_lines)


def _plain(content_type: bytes) -> bytes:
    """Look at an engine's content type before it goes into a head of ours."""
    if CONTROLS.search(content_type):
        raise RuntimeError(f"the content type {content_type!r} cannot be sent")
    if len(_PLAIN_TYPES) < _PLAIN_TYPES_MOST:
        _PLAIN_TYPES.add(content_type)
    return content_type
