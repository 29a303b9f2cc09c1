"""What every /v1 request gets, whatever becomes of it: an id, its route in the headers, one line in the log."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xpyd_proxy.core.journey import Journey, Visit
from xpyd_proxy.core.model import RequestId

_HUNG_UP: Final = 499  # nginx's status for a client that closed the connection before it was answered
_BUG: Final = 500
_KEY: Final = "xpyd.journey"
logger = logging.getLogger(__name__)


def journey_of(scope: Scope) -> Journey:
    """Return the record of a request that came through :class:`Tracking`."""
    journey: Journey = scope[_KEY]
    return journey


def note_fault(scope: Scope, error: Exception) -> None:
    """Put what went wrong with a request into its line of the log."""
    if _KEY in scope:
        journey_of(scope).fault = str(error)


def id_headers(scope: Scope) -> dict[str, str]:
    """Return the header that names a request, for an answer that :class:`Tracking` does not see."""
    return {"x-request-id": journey_of(scope).request_id} if _KEY in scope else {}


@dataclass(slots=True)
class _Outgoing:
    """Adds the headers to an answer and remembers its status."""

    send: Send
    journey: Journey
    status: int | None = field(default=None)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers()]
        await self.send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", self.journey.request_id.encode())]
        if timing := self.journey.server_timing():
            headers.append((b"server-timing", timing.encode()))
        return headers


class Tracking:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, new_id: Callable[[], RequestId], clock: Callable[[], float]) -> None:
        self._app = app
        self._new_id = new_id
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Follow a request under /v1; let everything else pass."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        start = self._clock()
        journey = scope[_KEY] = Journey(self._new_id())
        outgoing = _Outgoing(send, journey)
        status = _BUG
        try:
            await self._app(scope, receive, outgoing)
            status = outgoing.status or _BUG
        except ClientDisconnect:  # there is nobody left to answer
            status = _HUNG_UP
        finally:
            _log(scope["path"], journey, status, (self._clock() - start) * 1000)


def _log(path: str, journey: Journey, status: int, ms: float) -> None:
    notes = {
        "solo": journey.solo,
        "route": journey.push,
        "retries": ", ".join(map(str, journey.retries)),
        "late": journey.late,
        "fault": journey.fault,
    }
    extra = "".join(f" {name}={str(note)!r}" for name, note in notes.items() if note)
    ids = (journey.request_id, path.encode("unicode_escape").decode(), _name(journey.prefill), _name(journey.decode))
    logger.info("id=%s path=%s prefill=%s decode=%s status=%d ms=%.1f%s", *ids, status, ms, extra)


def _name(visit: Visit | None) -> str:
    return "-" if visit is None else visit.instance
