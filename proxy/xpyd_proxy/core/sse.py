"""Server-sent events, as far as a relay must understand them."""

from typing import Final

import msgspec

from xpyd_proxy.core.raw_json import NotJson, decode

_DONE: Final = b"data: [DONE]"


class ErrorEvent(msgspec.Struct):
    """What vLLM sends in place of a token when it fails after its head has left."""

    class Info(msgspec.Struct):
        """The part that tells the status."""

        code: int | str | None = None

    error: Info | None = None


def first_data(received: bytes) -> bytes | None:
    """Return the first event's data; None while its line is not complete. Comments (keep-alives) are no events."""
    for line in received.splitlines(keepends=True):
        if line.startswith(b"data:") and line.endswith((b"\n", b"\r")):
            return line[5:].strip()
    return None


def error_status(data: bytes) -> int | None:
    """Return the HTTP status an error event asks for (500 if it names none); None for any other event."""
    try:
        event = decode(data, ErrorEvent)
    except NotJson:
        return None
    if event.error is None:
        return None
    code = event.error.code
    return code if isinstance(code, int) and 400 <= code < 600 else 500


class WholeLines:
    """Lets a stream pass in whole lines and notices whether it came to its proper end.

    vLLM writes whole events, so nearly always everything passes at once. But when an engine dies in the middle of a
    line, that line has not been sent on, and an error event can follow in good order.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._last = b"\n"  # the end of what has passed; long enough to recognise the end of a stream

    def feed(self, chunk: bytes) -> bytes:
        """Take what has arrived; return what may pass."""
        received = self._rest + chunk
        end = received.rfind(b"\n") + 1
        passing, self._rest = received[:end], received[end:]
        self._last = (self._last + passing)[-32:]
        return passing

    def finish(self) -> tuple[bytes, bool]:
        """The stream has ended: return what is left of it, and whether it was complete."""
        complete = (self._last + self._rest).rstrip().endswith(b"\n" + _DONE)
        return (self._rest if complete else b""), complete
