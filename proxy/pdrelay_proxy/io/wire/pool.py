"""Connections to engines that wait for the next request."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias, cast

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance
from pdrelay_proxy.core.protocol.fault_table import is_lack, unreached
from pdrelay_proxy.errors import EngineError, EngineTimeout, NotAllowed
from pdrelay_proxy.io.descriptors import engine_connections
from pdrelay_proxy.io.fair_timeout import FairTimeout
from pdrelay_proxy.io.wire.connect_errors import not_opened
from pdrelay_proxy.io.wire.connect_limiter import ConnectLimiter
from pdrelay_proxy.io.wire.connection import Connection, Peer
from pdrelay_proxy.io.wire.connection_guard import Guard
from pdrelay_proxy.io.wire.engine_tls import EngineTls

IDLE_MOST: Final = 2048  # connections that wait, to all engines together
# connections that are closed where one cannot be opened: others cannot be, either
_FREED_AT_ONCE: Final = 8
_FREEING_S: Final = 0.001  # seconds in which the event loop closes them
_LACKING_S: Final = 0.05  # seconds until another try where none could be closed
_ROUNDS: Final = 8  # looks at them in the time that one may wait
# Opens a connection to a host and a port for a protocol; raises OSError.
Dial: TypeAlias = Callable[[Callable[[], asyncio.Protocol], str, int], Awaitable[object]]
_CLOSING_S: Final = 5.0  # seconds for the event loop to close what is open; it takes a round or two


class Pool:
    """Opens connections and keeps those that are not in use, at most ``keepalive_s`` seconds
    each.
    """

    def __init__(
        self,
        *,
        keepalive_s: float,
        connect_timeout_s: float,
        tls: EngineTls | None = None,
        guard: Guard | None = None,
        dial: Dial | None = None,
    ) -> None:
        """``dial``: opens connections in place of the event loop, for tests."""
        self._dial = dial
        self._keepalive_s = keepalive_s
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._guard = guard
        self._peers: dict[Address, Peer] = {}
        # by the engine that was there last; hashing an address takes longer
        self._by_id: dict[str, Peer] = {}
        self._open: set[Connection] = set()
        self._idle = 0  # in all peers
        self._round: asyncio.TimerHandle | None = None
        self._turns = ConnectLimiter()  # to open one
        self._closing: asyncio.Event | None = None  # set when nothing is open any more

    @property
    def idle(self) -> int:
        """How many connections wait."""
        return self._idle

    @property
    def addresses(self) -> int:
        """How many addresses something is kept of."""
        return len(self._peers)

    def peer(self, instance: Instance) -> Peer:
        """Return what is kept of an instance's address.

        Its id may have been at another one: all engines that join are candidates first.
        """
        peer = self._by_id.get(instance.id)
        if peer is None or peer.address is not instance.address:
            peer = self._by_id[instance.id] = self._peer(instance.address)
        return peer

    def waiting_at(self, peer: Peer) -> Connection | None:
        """Return the connection that was used last and is still good, if there is one."""
        while peer.idle:
            connection = peer.idle.pop()
            self._idle -= 1
            if (
                connection.clock() - connection.heard_at < self._keepalive_s
                and connection.is_silent()
            ):
                return connection
            # it waited too long, or the engine has closed it and the event loop does not know yet
            connection.abort()
        return None

    async def open(self, instance: Instance) -> Connection:
        """Open a connection, in turn.

        Raises:
            EngineTimeout: no connection in time.
            EngineError: the engine cannot be reached.
        """
        if self._closing is not None:
            raise EngineError(
                f"{instance.id} was not asked: the connections to engines are closed", reached=False
            )
        lacks: list[OSError] = []
        try:
            async with FairTimeout(self._connect_timeout_s):
                turn = await self._turns.take()
                try:
                    return await self._connect_when_possible(instance.address, lacks)
                finally:
                    turn.pass_on()
        except NotAllowed as elsewhere:
            raise EngineError(
                f"{instance.id} is not where engines may be added", reached=False
            ) from elsewhere
        except TimeoutError as late:
            if lacks:
                raise unreached(instance.id, lacks[-1].errno) from lacks[-1]
            raise EngineTimeout(
                f"{instance.id} did not accept a connection in time", reached=False
            ) from late
        except (OSError, UnicodeError) as exc:
            # ssl.SSLError is an OSError; a name may not be one that DNS can have
            raise not_opened(instance, exc, self._tls) from exc

    def put_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it at once: unless its answer is
        complete, say.
        """
        if (
            self._closing is not None
            or self._idle >= IDLE_MOST
            or self._keepalive_s <= 0
            or not connection.rest()
        ):
            connection.abort()
            return
        if connection.peer.is_forgotten:
            connection.peer = self._peer(connection.peer.address)
        connection.peer.idle.append(connection)
        self._idle += 1

    def give_up(self, instance: Instance, *, silent_s: float) -> int:
        """End the requests to an address that heard nothing for so many seconds; return how many
        there were.

        Not those that we hold up ourselves, for a client that is slow: they hear nothing from an
        engine that is well.
        """
        since = asyncio.get_running_loop().time() - silent_s
        error = f"{instance.id} hangs: it has answered nothing, and no probe, for {silent_s:g} s"
        listening = [
            one for one in self._open if one.peer.address == instance.address and not one.held_up
        ]
        return sum(
            [one.give_up(EngineTimeout(error)) for one in listening if one.heard_at <= since]
        )

    async def close(self) -> None:
        """Close every connection, also those in use: their requests fail."""
        self._closing = asyncio.Event()
        if self._round is not None:
            self._round.cancel()
        for connection in tuple(self._open):
            connection.abort()
        self._peers.clear()
        self._by_id.clear()
        if self._open:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _CLOSING_S)

    # What its connections tell

    def opened(self, connection: Connection, /) -> None:
        """Keep track of it."""
        self._open.add(connection)
        if self._closing is not None:
            connection.abort()

    def ended(self, connection: Connection, /) -> None:
        """Take it out of those that wait."""
        if connection.idle:
            with suppress(ValueError):  # it has just been taken out
                connection.peer.idle.remove(connection)
                self._idle -= 1

    def closed(self, connection: Connection, /) -> None:
        """Forget it."""
        self._open.discard(connection)
        if self._closing is not None and not self._open:
            self._closing.set()

    async def _connect_when_possible(self, address: Address, lacks: list[OSError]) -> Connection:
        """Open a connection, and try again while the router lacks what it takes; ``lacks`` gets
        what it lacked.

        Connections that are idle make room: at first for as many as the router has announced that
        it can have.
        """
        most = engine_connections()
        if most is not None and len(self._open) >= most:
            self._close_idle(1)
        while True:
            try:
                return await self._connect(address)
            except OSError as exc:
                if not is_lack(exc.errno) or isinstance(exc, socket.gaierror):
                    raise
                lacks.append(exc)
            is_freed = self._close_idle(_FREED_AT_ONCE)
            await asyncio.sleep(_FREEING_S if is_freed else _LACKING_S)

    def _close_idle(self, count: int) -> bool:
        """Close so many connections that wait, first those that have waited the longest; tell
        whether there was one.
        """
        idle = [connection for peer in self._peers.values() for connection in peer.idle[:count]]
        idle.sort(key=lambda connection: connection.heard_at)
        for connection in idle[:count]:
            connection.abort()  # which takes it out of its list
        return bool(idle)

    async def _connect(self, address: Address) -> Connection:
        places = () if self._guard is None else await self._guard.places(address)
        for place in places[:-1]:
            with suppress(OSError):
                return await self._connect_to(address, place)
        return await self._connect_to(address, places[-1] if places else address.host)

    async def _connect_to(self, address: Address, host: str) -> Connection:
        """Open a connection to a host, which is what the address's own leads to."""
        made: list[Connection] = []

        def protocol() -> asyncio.Protocol:
            made.append(Connection(self._peer(address), self))
            return cast("asyncio.Protocol", made[-1])

        tls = self._engine_tls() if address.scheme == "https" else None
        context, name = (None, None) if tls is None else (tls.context, tls.name_of(address))
        try:
            if self._dial is None:
                loop = asyncio.get_running_loop()
                await loop.create_connection(
                    protocol, host, address.port, ssl=context, server_hostname=name
                )
            else:
                await self._dial(protocol, host, address.port)
        except BaseException:
            # uvloop closes a socket that was opened for nobody, and tells its protocol nothing
            for connection in made:
                connection.dismiss()
            raise
        return made[-1]

    def _engine_tls(self) -> EngineTls:
        if self._tls is None:
            self._tls = EngineTls.usual()
        return self._tls

    def _peer(self, address: Address) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address)
            if self._round is None:
                self._again()
        return peer

    def _again(self) -> None:
        pause = max(self._keepalive_s, 0.08) / _ROUNDS
        self._round = asyncio.get_running_loop().call_later(pause, self._look_round)

    def _look_round(self) -> None:
        """Close what would be too old at the next look, and forget addresses without
        connections.
        """
        self._round = None
        oldest = asyncio.get_running_loop().time() - self._keepalive_s * (_ROUNDS - 1) / _ROUNDS
        for address, peer in tuple(self._peers.items()):
            while peer.idle and peer.idle[0].heard_at <= oldest:
                peer.idle[0].abort()  # which takes it out of the list
            if not peer.idle:
                del self._peers[address]
                peer.is_forgotten = True
                self._by_id.clear()  # a few are looked up again
        if self._peers:
            self._again()
