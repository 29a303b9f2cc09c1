"""Server-sent events, as far as a relay must understand them.

Bytes are looked for with ``find``: ``in`` tries first whether what it gets is a number, and raises and drops an error.
"""

from typing import Final

from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.core.said import ErrorEvent

_DONE: Final = b"data: [DONE]"
_ERROR: Final = b'data: {"error":'
_DATA: Final = b"data:"
_EVENT: Final = b"event:"
_END_MOST: Final = 32  # bytes of what has passed that tell a stream's end
# What /v1/responses says before the engine has done anything: it tells nothing about whether it will.
_PREAMBLE: Final = frozenset({b"response.created", b"response.queued", b"response.in_progress"})
# Other APIs than the first two name their events, and end with one of these in place of a [DONE].
_LAST: Final = frozenset({b"message_stop", b"error", b"response.completed", b"response.failed", b"response.incomplete"})


def first_data(received: bytes) -> bytes | None:
    """Return the data of the first event that says something about the request; None while its line is not complete.

    Comments (keep-alives) are no events, and an announcement says nothing yet.
    """
    if received.startswith(_DATA) and (end := received.find(b"\n")) > 0 and received.find(b"\r", 0, end) < 0:
        return received[len(_DATA) : end].strip()
    name = b""
    for line in received.splitlines(keepends=True):
        if not line.endswith((b"\n", b"\r")):
            return None
        if line.startswith(_EVENT):
            name = line[len(_EVENT) :].strip()
        elif line.startswith(b"data:"):
            if name not in _PREAMBLE:
                return line[5:].strip()
            name = b""
    return None


def error_status(data: bytes) -> int | None:
    """Return the HTTP status an error event asks for (500 if it names none); None for any other event."""
    if data.find(b'"error"') < 0 and data.find(b"\\u") < 0:  # a name may be written in escapes
        return None
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

    __slots__ = ("_last", "_name", "_rest", "erred")

    def __init__(self) -> None:
        self.erred = False  # the engine has said itself that it failed
        self._rest = b""
        self._last = b"\n"  # what has passed, from a place on that is early enough to recognise the end of a stream
        self._name = b""  # of the last event that has one

    def feed(self, chunk: bytes) -> bytes:
        """Take what has arrived; return what may pass."""
        received = self._rest + chunk if self._rest else chunk
        end = received.rfind(b"\n") + 1
        passing, self._rest = received[:end], received[end:]
        self._note(passing)
        return passing

    def finish(self) -> tuple[bytes, bool]:
        """The stream has ended: return what is left of it, and whether it was complete."""
        is_done = (self._last[-_END_MOST:] + self._rest).rstrip().endswith(b"\n" + _DONE)
        complete = is_done or (self._name in _LAST and not self._rest)
        return (self._rest if complete else b""), complete

    def _note(self, passing: bytes) -> None:
        if passing.find(_EVENT) >= 0 and ((at := passing.rfind(b"\n" + _EVENT) + 1) or passing.startswith(_EVENT)):
            self._name = passing[at + len(_EVENT) :].partition(b"\n")[0].strip()
        self.erred = self.erred or self._name == b"error" or passing.find(_ERROR) >= 0
        self._last = passing if len(passing) >= _END_MOST else (self._last + passing)[-_END_MOST:]
