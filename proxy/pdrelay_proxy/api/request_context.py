"""The request id and the log line of every /v1 request for which no engine is chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdrelay_proxy.api.endpoint_routes import is_endpoint
from pdrelay_proxy.core.client_ids import ClientIds
from pdrelay_proxy.core.model import Headers, RequestId
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
from pdrelay_proxy.core.request_record import CLIENT_CLOSED_REQUEST, RequestRecord
from pdrelay_proxy.requests.services import Spans

_BUG: Final = 500
_KEY: Final = "pdrelay.record"


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request that came through :class:`RequestContextMiddleware`."""
    record: RequestRecord = scope[_KEY]
    return record


def note_fault(scope: Scope, error: Exception) -> None:
    """Put the failure of a request into its log line."""
    if _KEY in scope:
        record_of(scope).error = str(error)


def id_headers(scope: Scope) -> dict[str, str]:
    """Return the headers with a request's id, for an answer that :class:`RequestContextMiddleware`
    does not see.
    """
    return record_of(scope).id_headers() if _KEY in scope else {}


@dataclass(slots=True)
class _SendWithHeaders:
    """Adds the headers to an answer, and keeps its status."""

    send: Send
    record: RequestRecord
    status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [
                (name.encode(), value.encode()) for name, value in self.record.id_headers().items()
            ]
            # browsers must trust the content type
            headers.append((b"x-content-type-options", b"nosniff"))
            message["headers"] = [*message.get("headers", ()), *headers]
        await self.send(message)


class RequestContextMiddleware:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        new_id: Callable[[], RequestId],
        clock: Callable[[], float],
        ids: ClientIds | None = None,
        spans: Spans | None = None,
        request_over: Callable[[RequestRecord], None],
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._clock = clock
        self._ids = ids or ClientIds()
        self._spans = spans
        self._request_over = request_over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Record a client's request; let everything else pass."""
        path = scope.get("path", "")
        is_followed = path.startswith("/v1/") or path in ENDPOINTS
        if not is_followed or scope["type"] != "http" or is_endpoint(scope):
            await self._app(scope, receive, send)
            return
        headers: Headers = tuple(scope.get("headers", ()))
        record = RequestRecord(
            self._new_id(), path, client_id=self._ids.client_id_in(dict(reversed(headers)))
        )
        record.began_at = self._clock()
        scope[_KEY] = record
        outgoing = _SendWithHeaders(send, record)
        status: int | None = _BUG
        span = None if self._spans is None else self._spans.request(record, headers)
        try:
            await self._app(scope, receive, outgoing)
            status = None
        except ClientDisconnect:  # no client is left to answer
            status = CLIENT_CLOSED_REQUEST
        finally:
            record.over(status or outgoing.status or _BUG, self._clock() - record.began_at)
            if span is not None:
                span.end()
            self._request_over(record)
