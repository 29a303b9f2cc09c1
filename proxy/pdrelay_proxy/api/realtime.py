"""The WebSocket route of ``/v1/realtime``: the client's side of a session, as ASGI has it."""

import logging
from collections.abc import Callable
from typing import Final

from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from pdrelay_proxy.api.exception_handlers import response_to
from pdrelay_proxy.core.model import Headers, RequestId
from pdrelay_proxy.core.protocol.realtime import ABNORMAL, REALTIME_PATH, Side, SocketClosed, model_in, sendable
from pdrelay_proxy.core.request_record import CLIENT_CLOSED_REQUEST, ClientIds, RequestRecord
from pdrelay_proxy.errors import ProxyError
from pdrelay_proxy.requests.realtime.sessions import RealtimeSessions

_BUG: Final = 500
_SWITCHED: Final = 101
logger = logging.getLogger(__name__)


class ClientSocket:
    """Implements Socket for a client."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def receive(self) -> str | bytes:
        """Return the next message; raises SocketClosed."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise SocketClosed(Side.CLIENT, message.get("code", ABNORMAL), message.get("reason") or "")
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, message: str | bytes) -> None:
        """Send a message, and wait while the client does not read; raises SocketClosed."""
        try:
            if isinstance(message, str):
                await self._websocket.send_text(message)
            else:
                await self._websocket.send_bytes(message)
        except (WebSocketDisconnect, RuntimeError) as exc:  # starlette's for one that is closed already
            raise SocketClosed(Side.CLIENT, ABNORMAL) from exc

    async def close(self, code: int, reason: str) -> None:
        """Say why, and close."""
        open_still = WebSocketState.CONNECTED
        if self._websocket.client_state is open_still and self._websocket.application_state is open_still:
            try:
                await self._websocket.close(sendable(code), reason)
            except (WebSocketDisconnect, RuntimeError):
                return  # it has closed meanwhile

    def abort(self) -> None:
        """Leave it to the server, which closes the connection when the route is left."""


class RealtimeRoute:
    """Serves the route."""

    def __init__(self, sessions: RealtimeSessions, new_id: Callable[[], RequestId], ids: ClientIds) -> None:
        self._sessions = sessions
        self._ids = ids
        self._new_id = new_id

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one offer of a session."""
        sessions = self._sessions
        headers = tuple([(name.lower(), value) for name, value in websocket.scope["headers"]])  # uvicorn's are as sent
        its_id = self._ids.of(dict(reversed(headers)))
        record = RequestRecord(self._new_id(), REALTIME_PATH, client_id=its_id)
        record.began_at = sessions.clock()
        status = _BUG
        try:
            status = await self._serve(websocket, headers, record)
        except ProxyError as error:
            answer = response_to(error, websocket.scope, sessions.settings().overload_status)
            record.error, status = str(error), answer.status_code
            sessions.refused()
            await _deny(websocket, answer, record)
        finally:
            sessions.over(record, status)

    async def _serve(self, websocket: WebSocket, headers: Headers, record: RequestRecord) -> int:
        sessions = self._sessions
        caller = sessions.check(headers)
        model = model_in(websocket.scope.get("query_string", b""))
        with sessions.place(caller):
            session = await sessions.open(model, headers, record)
            with sessions.at(session, record):
                try:
                    lines = [(name.encode(), value.encode()) for name, value in record.id_headers().items()]
                    await websocket.accept(headers=lines)
                except BaseException:
                    session.engine.abort()
                    raise
                await sessions.run(session, ClientSocket(websocket))
        return CLIENT_CLOSED_REQUEST if session.is_abandoned else _SWITCHED


async def _deny(websocket: WebSocket, answer: Response, record: RequestRecord) -> None:
    """Answer an offer with an error, as HTTP has it."""
    answer.headers.update(record.id_headers())
    answer.headers["x-content-type-options"] = "nosniff"
    try:
        if "websocket.http.response" in websocket.scope.get("extensions", {}):
            await websocket.send_denial_response(answer)
        else:  # a server that has no other answer than 403
            await websocket.close()
    except (WebSocketDisconnect, RuntimeError):
        logger.debug("a client has gone before its offer of a session was refused")


def realtime_routes(
    sessions: RealtimeSessions, new_id: Callable[[], RequestId], ids: ClientIds
) -> list[WebSocketRoute]:
    """Build the route."""
    return [WebSocketRoute(REALTIME_PATH, RealtimeRoute(sessions, new_id, ids).serve)]
