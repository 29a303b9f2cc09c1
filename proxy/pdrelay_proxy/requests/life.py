"""Where one request is in its life, what all of its parts share, and its coroutine, which has no
task.

requests/request.py puts the parts together: the client's response, the dispatch to engines, an
array of prompts. What has news for the coroutine resumes it, in the same turn of the event loop.
"""

from collections.abc import Coroutine, Generator
from typing import Final

from pdrelay_proxy.core.raw_json import Fields
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.routing.retries import BrokenAnswer
from pdrelay_proxy.requests.lifecycle import TRANSITIONS, RequestEvent, RequestState
from pdrelay_proxy.requests.services import RequestSpan, Services

_RECEIVED: Final = RequestState.RECEIVED


class RequestLife:
    """The life of one request. Its coroutine may await nothing but this object."""

    __slots__ = (
        "_coroutine",
        "_has_news",
        "_interrupt",
        "_is_waiting",
        "broken",
        "cache_usage",
        "record",
        "services",
        "span",
        "state",
    )

    def __init__(self, services: Services, record: RequestRecord, span: RequestSpan | None) -> None:
        self._coroutine: Coroutine[object, None, None] | None = None
        self._is_waiting = self._has_news = False
        self._interrupt: Exception | None = None
        self.state = _RECEIVED
        # what the engine that has computed the prompt says of its cache
        self.cache_usage: Fields | None = None
        self.broken: tuple[BrokenAnswer, ...] = ()  # what engines did not bring to its end
        self.services = services
        self.record = record
        self.span = span
        clock = services.clock
        record.began_at = clock()

    def on(self, event: RequestEvent) -> None:
        """Take a step of the table (requests/lifecycle.py); a step that is not in it is a bug, and
        raises KeyError.
        """
        self.state = TRANSITIONS[self.state][event]

    def elapsed_s(self) -> float:
        """Return the seconds since the request's head came."""
        return self.services.clock() - self.record.began_at

    @property
    def is_running(self) -> bool:
        """Tell whether the coroutine has begun and not ended."""
        return self._coroutine is not None

    def begin(self, coroutine: Coroutine[object, None, None]) -> None:
        """Run the coroutine up to the first point at which it waits."""
        self._coroutine = coroutine
        self._step()

    def wake(self) -> None:
        """Something has happened: go on, or do not wait the next time."""
        if self._is_waiting:
            self._is_waiting = False
            self._step()
        else:
            self._has_news = True

    def interrupt(self, error: Exception) -> None:
        """Have waiting raise this from now on. The first error counts."""
        if self._interrupt is None:
            self._interrupt = error
            self.wake()

    def __await__(self) -> Generator[None, None, None]:
        """Wait until something has happened; it may be something else.

        Raises what interrupts the coroutine.
        """
        if self._has_news:
            self._has_news = False
        else:
            self._is_waiting = True
            yield
        if self._interrupt is not None:
            raise self._interrupt

    def end(self) -> None:
        """The coroutine is about to end: let go of it, and of what has interrupted it."""
        self._coroutine = self._interrupt = None

    def _step(self) -> None:
        coroutine = self._coroutine
        if coroutine is not None:
            try:  # noqa: SIM105 (suppress() costs a request 2 % of its time)
                coroutine.send(None)
            except StopIteration:
                pass
