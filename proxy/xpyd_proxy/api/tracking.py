"""What every /v1 request gets, whatever becomes of it: an id, its route in the headers, one line in the log."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xpyd_proxy.api.routes import is_endpoint
from xpyd_proxy.core.journey import HUNG_UP, Journey, Outcome, client_id
from xpyd_proxy.core.model import Headers, RequestId
from xpyd_proxy.core.protocol.endpoints import ENDPOINTS
from xpyd_proxy.requests.access_log import log_request
from xpyd_proxy.requests.service import Spans

_BUG: Final = 500
_KEY: Final = "xpyd.journey"
NO_SNIFFING: Final = (b"x-content-type-options", b"nosniff")  # a browser takes an answer for what its type says


def journey_of(scope: Scope) -> Journey:
    """Return the record of a request that came through :class:`Tracking`."""
    journey: Journey = scope[_KEY]
    return journey


def note_fault(scope: Scope, error: Exception) -> None:
    """Put what went wrong with a request into its line of the log."""
    if _KEY in scope:
        journey_of(scope).fault = str(error)


def id_headers(scope: Scope) -> dict[str, str]:
    """Return the headers that name a request, for an answer that :class:`Tracking` does not see."""
    return journey_of(scope).id_headers() if _KEY in scope else {}


@dataclass(slots=True)
class _Outgoing:
    """Adds the headers to an answer, and remembers its status."""

    send: Send
    journey: Journey
    clock: Callable[[], float]
    status: int | None = field(default=None)
    times: bool = True

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers()]
        await self.send(message)

    def outcome(self, path: str, status: int | None, start: float) -> Outcome:
        """Say what became of the request; ``status``: what to say of one that got no answer."""
        return Outcome(path, status or self.status or _BUG, self.clock() - start)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(name.encode(), value.encode()) for name, value in self.journey.id_headers().items()]
        headers.append(NO_SNIFFING)
        if self.times and (timing := self.journey.server_timing()):
            headers.append((b"server-timing", timing.encode()))
        return headers


class Tracking:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        new_id: Callable[[], RequestId],
        clock: Callable[[], float],
        spans: Spans | None = None,
        finished: Callable[[Journey, Outcome], None] = lambda _journey, _outcome: None,
        times: bool = True,
    ) -> None:
        """``times``: whether answers have Server-Timing."""
        self._app = app
        self._times = times
        self._new_id = new_id
        self._clock = clock
        self._spans = spans
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Follow a request of a client; let everything else pass."""
        path = scope.get("path", "")
        is_followed = path.startswith("/v1/") or path in ENDPOINTS
        if not is_followed or scope["type"] != "http" or is_endpoint(scope):
            await self._app(scope, receive, send)
            return
        start, journey = self._clock(), Journey(self._new_id(), client_id=_client_id(scope))
        scope[_KEY] = journey
        outgoing = _Outgoing(send, journey, self._clock, times=self._times)
        status: int | None = _BUG
        span = None
        if self._spans is not None:
            span = self._spans.request(journey, path, tuple(scope.get("headers", ())))
        try:
            await self._app(scope, receive, outgoing)
            status = None
        except ClientDisconnect:  # there is nobody left to answer
            status = HUNG_UP
        finally:
            outcome = outgoing.outcome(path, status, start)
            if span is not None:
                span.end(outcome)
            self._finished(journey, outcome)
            log_request(journey, outcome)


def _client_id(scope: Scope) -> str | None:
    headers: Headers = tuple(scope.get("headers", ()))
    return client_id(next((value for name, value in headers if name == b"x-request-id"), b""))
