"""WebSockets to engines. The library ``websockets`` (the extra ``realtime``) stops at this file."""

import logging
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import DATA_OPCODES, Frame, Opcode
from websockets.protocol import Event

from pdrelay_proxy.core.admission.keys import Outbound
from pdrelay_proxy.core.model import Headers, Instance
from pdrelay_proxy.core.protocol.realtime import (
    ABNORMAL,
    FED_MOST,
    POLICY,
    REALTIME_PATH,
    TOO_MANY_EMPTY,
    EmptyFrames,
    Side,
    SocketClosed,
    sendable,
)
from pdrelay_proxy.errors import EngineBusy, EngineError, EngineFault, EngineTimeout, NotAllowed, NotServed
from pdrelay_proxy.io.fair_timeout import FairTimeout
from pdrelay_proxy.io.wire.connect_errors import not_opened
from pdrelay_proxy.io.wire.connection_guard import Guard
from pdrelay_proxy.io.wire.engine_tls import EngineTls
from pdrelay_proxy.settings import Settings

_PING_S: Final = 20.0  # seconds between two pings, and for the answer to each: an engine that is gone is noticed
_CLOSE_S: Final = 2.0  # seconds for an engine to confirm the end
_WAITING_MOST: Final = 2  # messages of an engine that wait for a slow client; then nothing is read from it
_WRITE_MOST: Final = 64 * 1024  # bytes that wait for a slow engine; then nothing is read from the client
_BUSY: Final = frozenset({429, 503})
_QUIET: Final = logging.getLogger("pdrelay.websocket")  # its lines name addresses, once a session
_QUIET.setLevel(logging.CRITICAL)


class _Connect(connect):
    """Follows no redirect: it would lead past the guard."""

    def process_redirect(self, exc: Exception) -> Exception:
        """Return the answer as the failure that it is."""
        return exc


class _EngineConnection(ClientConnection):
    """Reads what has come in pieces, and ends a session in which an engine sends too many frames that carry nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (the library's signature)
        super().__init__(*args, **kwargs)
        self._empty = EmptyFrames()
        self._is_flooded = False

    def data_received(self, data: bytes) -> None:
        """Read what has come; nothing any more of a flood."""
        for begin in range(0, len(data), FED_MOST):
            if not self._is_flooded:
                super().data_received(data[begin : begin + FED_MOST])

    def process_event(self, event: Event) -> None:
        """Count what carries nothing, and take the rest."""
        if isinstance(event, Frame) and not (event.opcode in DATA_OPCODES and event.data):
            if self._is_flooded:
                return
            if event.opcode is not Opcode.CLOSE and self._empty.is_flood(now=self.loop.time()):
                self._is_flooded = True
                self.protocol.fail(POLICY, TOO_MANY_EMPTY)
                self.send_data()
                self.transport.close()
                return
        super().process_event(event)


class EngineSocket:
    """One session at an engine. One task may receive and another one send."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def receive(self) -> str | bytes:
        """Return the next message; raises SocketClosed."""
        try:
            return await self._connection.recv()
        except ConnectionClosed as exc:
            raise _closed(exc) from exc

    async def send(self, message: str | bytes) -> None:
        """Send a message, and wait while much is to be sent; raises SocketClosed."""
        try:
            await self._connection.send(message)
        except ConnectionClosed as exc:
            raise _closed(exc) from exc

    async def close(self, code: int, reason: str) -> None:
        """Say why, and close: within 2 s."""
        await self._connection.close(sendable(code), reason)

    def abort(self) -> None:
        """Close without a word."""
        self._connection.transport.abort()


class EngineSockets:
    """Opens sessions at engines."""

    def __init__(self, settings: Settings, outbound: Outbound, tls: EngineTls, guard: Guard | None) -> None:
        self._settings = settings
        self._outbound = outbound
        self._tls = tls
        self._guard = guard

    async def open(self, instance: Instance, headers: Headers) -> EngineSocket:
        """Open a session, with the key of the engine's pool in place of the client's.

        Raises:
            EngineTimeout: the engine did not accept it in time.
            EngineError: the engine cannot be reached, or failed.
            NotServed: the engine has no such path.
        """
        shown = self._outbound.headers(instance.pool, headers)
        address, limit_s = instance.address, self._settings.connect_timeout_s
        try:
            async with FairTimeout(limit_s):
                places = () if self._guard is None else await self._guard.places(address)
                return EngineSocket(await self._connect(instance, places[0] if places else address.host, shown))
        except NotAllowed as elsewhere:
            raise EngineError(f"{instance.id} is not where engines may be added", reached=False) from elsewhere
        except TimeoutError as late:
            raise EngineTimeout(f"{instance.id} did not accept a session within {limit_s:g} s", reached=False) from late
        except InvalidStatus as refused:
            raise _refusal(instance, refused.response.status_code) from refused
        except InvalidHandshake as exc:
            why = (
                self._tls.failure(instance, exc, was_open=True) or "answered the offer of a session with something else"
            )
            raise EngineFault(f"{instance.id} {why}") from exc
        except (OSError, EOFError, UnicodeError) as exc:  # ssl.SSLError is an OSError
            raise not_opened(instance, exc, self._tls) from exc

    async def _connect(self, instance: Instance, host: str, shown: Headers) -> ClientConnection:
        address, tls, name, scheme = instance.address, None, None, "ws"
        if address.scheme == "https":
            tls, name, scheme = self._tls.context, self._tls.name_of(address), "wss"
        return await _Connect(
            f"{scheme}://{address.authority}{REALTIME_PATH}",
            additional_headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in shown],
            user_agent_header=None,
            compression=None,
            proxy=None,  # as all other requests to engines: the environment's proxies are for the world outside
            open_timeout=None,
            ping_interval=_PING_S,
            ping_timeout=_PING_S,
            close_timeout=_CLOSE_S,
            max_size=self._settings.realtime_max_message_bytes,
            create_connection=_EngineConnection,
            max_queue=_WAITING_MOST,
            write_limit=_WRITE_MOST,
            logger=_QUIET,
            host=host,
            port=address.port,
            ssl=tls,
            server_hostname=name,
        )


def _refusal(instance: Instance, status: int) -> EngineError | NotServed:
    """Say what an engine's answer means that is no session."""
    if status in _BUSY:
        return EngineBusy(f"{instance.id} has no room for a session: it answered with status {status}")
    if status in (403, 404, 405, 426):  # starlette's answers for a path that it does not have
        return NotServed(f"{instance.id} does not serve {REALTIME_PATH}: its model transcribes no audio in real time")
    return EngineFault(f"{instance.id} answered the offer of a session with status {status}")


def _closed(exc: ConnectionClosed) -> SocketClosed:
    frame = exc.rcvd
    return SocketClosed(Side.ENGINE, ABNORMAL) if frame is None else SocketClosed(Side.ENGINE, frame.code, frame.reason)
