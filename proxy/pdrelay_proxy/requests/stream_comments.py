"""Comments in a stream that says nothing for a while: proxies close a connection on which nothing
comes.

A comment (a line that begins with a colon) is no event, and clients' libraries skip it. It never
stands within an event. The first one takes the head with it, so from then on an error is an event
of the stream and has no status.
"""

from collections.abc import Callable
from typing import Final

from pdrelay_proxy.requests.response import ResponseWriter

_OK: Final = 200
_COMMENT: Final = b": keep-alive\n\n"
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")  # of an event
_END_MOST: Final = 4  # bytes of one of these


class CommentedResponse:
    """A client's response that may have comments. Implements ResponseWriter."""

    __slots__ = (
        "_end",
        "_interval_s",
        "_is_over",
        "_lines",
        "_quiet_since",
        "_writer",
        "_wrote",
        "keep_alive",
    )

    def __init__(
        self, writer: ResponseWriter, interval_s: float, lines: Callable[[], bytes], *, now: float
    ) -> None:
        """``lines`` returns those of the head, if a comment is first."""
        self._writer = writer
        self._interval_s = interval_s
        self._lines = lines
        self._quiet_since = now
        self._wrote = False  # since it was asked last
        self._end = _ENDS[0]  # the last bytes written: they may be the end of an event
        self._is_over = False
        self.keep_alive = writer.keep_alive

    def comment_if_quiet(self, now: float) -> None:
        """Write a comment if nothing was written for long enough."""
        if self._wrote or self._is_over:
            self._wrote = False
            self._quiet_since = now
        elif now - self._quiet_since >= self._interval_s and self._end.endswith(_ENDS):
            self._quiet_since = now
            if self._writer.begun:
                self._writer.write(_COMMENT)
            else:
                lines = self._lines()
                self._writer.keep_alive = self.keep_alive
                self._writer.begin(_OK, lines, _COMMENT, streams=True)

    @property
    def begun(self) -> bool:
        """Tell whether the head was written."""
        return self._writer.begun

    @property
    def relay(self) -> Callable[[bytes], object] | None:
        """Nothing is passed on unseen: an event may have begun."""
        return None

    def begin(
        self, status: int, lines: bytes, body: bytes, *, streams: bool, last: bool = False
    ) -> None:
        """Write the head and what comes with it, or without the head if a comment had it."""
        self._note(body)
        self._writer.keep_alive = self.keep_alive
        if not self._writer.begun:
            self._is_over = not streams
            self._writer.begin(status, lines, body, streams=streams, last=last)
        elif body:
            self._writer.write(body)

    def write(self, piece: bytes, /) -> None:
        """Write a piece of a stream."""
        self._note(piece)
        self._writer.write(piece)

    def end(self, piece: bytes = b"", /) -> None:
        """Write the end of a stream."""
        self._is_over = True
        self._writer.end(piece)

    def close(self) -> None:
        """Let go of the connection."""
        self._is_over = True
        self._writer.keep_alive = self.keep_alive
        self._writer.close()

    def _note(self, piece: bytes) -> None:
        if piece:
            self._wrote = True
            end = piece if len(piece) >= _END_MOST else self._end + piece
            self._end = end[-_END_MOST:]
