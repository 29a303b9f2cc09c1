"""Keeps idle connections to engines for the next requests."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias, cast

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance
from pdrelay_proxy.core.protocol.fault_table import is_lack, not_accepted, unreached
from pdrelay_proxy.errors import EngineError, EngineTimeout, NotAllowed
from pdrelay_proxy.io.descriptors import engine_connections
from pdrelay_proxy.io.fair_timeout import FairTimeout
from pdrelay_proxy.io.wire.connect_limiter import ConnectLimiter
from pdrelay_proxy.io.wire.connection import Connection, Peer
from pdrelay_proxy.io.wire.connection_guard import Guard
from pdrelay_proxy.io.wire.engine_tls import EngineTls

IDLE_MOST: Final = 2048  # connections that wait, to all engines together
# idle connections that are closed when one cannot be opened: more would fail as well
_FREED_AT_ONCE: Final = 8
_FREEING_S: Final = 0.001  # seconds until the event loop has closed them
_LACKING_S: Final = 0.05  # seconds until another try if none could be closed
# seconds for an address before the next one of its name is tried, at least: RFC 8305, section 5
_LEAST_ATTEMPT_S: Final = 0.25
_CLEANUPS: Final = 8  # of idle connections, in the time that one may stay idle
# Opens a connection to a host and a port for a protocol; raises OSError.
Dial: TypeAlias = Callable[[Callable[[], asyncio.Protocol], str, int], Awaitable[object]]
_CLOSING_S: Final = (
    5.0  # seconds for the event loop to close open connections; it takes an iteration or two
)


class Pool:
    """Opens connections, and keeps idle ones for at most ``keepalive_s`` seconds each."""

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
        # by the engine that used it last: hashing an id is faster than hashing an address
        self._by_id: dict[str, Peer] = {}
        self._open: set[Connection] = set()
        self.idle = 0  # idle connections in all peers
        self._cleanup_timer: asyncio.TimerHandle | None = None
        self._connect_limiter = ConnectLimiter()
        self._closing: asyncio.Event | None = None  # set when nothing is open any more

    def peer(self, instance: Instance) -> Peer:
        """Return the Peer of an instance's address.

        An id may have moved from another address: every engine that joins is a candidate first.
        """
        peer = self._by_id.get(instance.id)
        if peer is None or peer.address is not instance.address:
            peer = self._by_id[instance.id] = self._peer(instance.address)
        return peer

    def waiting_at(self, peer: Peer) -> Connection | None:
        """Return the idle connection that was used last and is still good, if there is one."""
        while peer.idle:
            connection = peer.idle.pop()
            self.idle -= 1
            if (
                connection.clock() - connection.heard_at < self._keepalive_s
                and connection.is_silent()
            ):
                return connection
            # idle for too long, or closed by the engine before the event loop has seen that
            connection.abort()
        return None

    async def open(self, instance: Instance) -> Connection:
        """Open a connection, after waiting for a slot.

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
                slot = await self._connect_limiter.acquire()
                try:
                    return await self._connect_when_possible(instance.address, lacks)
                finally:
                    slot.pass_on()
        except NotAllowed as error:
            raise EngineError(
                f"{instance.id} is not where engines may be added", reached=False
            ) from error
        except TimeoutError as timeout:
            if lacks:
                raise unreached(instance.id, lacks[-1].errno) from lacks[-1]
            raise not_accepted(instance.id) from timeout
        except (OSError, UnicodeError) as exc:
            # ssl.SSLError is an OSError; UnicodeError: DNS cannot have such a name
            raise _not_opened(instance, exc, self._tls) from exc

    def put_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it if its answer is incomplete."""
        if (
            self._closing is not None
            or self.idle >= IDLE_MOST
            or self._keepalive_s <= 0
            or not connection.rest()
        ):
            connection.abort()
            return
        if connection.peer.is_forgotten:
            connection.peer = self._peer(connection.peer.address)
        connection.peer.idle.append(connection)
        self.idle += 1

    def give_up(self, instance: Instance, *, silent_s: float) -> int:
        """End the requests to an address without a byte for ``silent_s`` seconds; return how many
        there were.

        Requests that we hold up ourselves, for a slow client, are kept: they hear nothing from a
        healthy engine.
        """
        since = asyncio.get_running_loop().time() - silent_s
        error = f"{instance.id} hangs: it has answered nothing, and no probe, for {silent_s:g} s"
        listening = [
            connection
            for connection in self._open
            if connection.peer.address == instance.address and not connection.held_up
        ]
        return sum(
            [
                connection.give_up(EngineTimeout(error))
                for connection in listening
                if connection.heard_at <= since
            ]
        )

    async def close(self) -> None:
        """Close every connection, also those in use: their requests fail."""
        self._closing = asyncio.Event()
        if self._cleanup_timer is not None:
            self._cleanup_timer.cancel()
        for connection in tuple(self._open):
            connection.abort()
        self._peers.clear()
        self._by_id.clear()
        if self._open:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _CLOSING_S)

    # Called by its connections

    def opened(self, connection: Connection, /) -> None:
        """Keep track of a connection."""
        self._open.add(connection)
        if self._closing is not None:
            connection.abort()

    def ended(self, connection: Connection, /) -> None:
        """Remove a connection from the idle ones."""
        if connection.idle:
            with suppress(ValueError):  # waiting_at has just given it out
                connection.peer.idle.remove(connection)
                self.idle -= 1

    def stale(self, connection: Connection, /) -> None:
        """Close the idle connections of its engine: they have been idle for longer."""
        for idle in tuple(connection.peer.idle):
            idle.abort()  # which removes it from the list

    def closed(self, connection: Connection, /) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        if self._closing is not None and not self._open:
            self._closing.set()

    async def _connect_when_possible(self, address: Address, lacks: list[OSError]) -> Connection:
        """Open a connection, and try again while the router itself lacks a resource for it
        (descriptors, ports).

        ``lacks`` collects those errors. Idle connections make room: beyond the number that the
        router announced as its limit, one is closed for each new one.
        """
        limit = engine_connections()
        if limit is not None and len(self._open) >= limit:
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
        """Close up to ``count`` connections, the longest idle first; return whether any was."""
        idle = [connection for peer in self._peers.values() for connection in peer.idle[:count]]
        idle.sort(key=lambda connection: connection.heard_at)
        for connection in idle[:count]:
            connection.abort()  # which removes it from its list
        return bool(idle)

    async def _connect(self, address: Address) -> Connection:
        """Open a connection to the first address of its name that answers in its share of time."""
        ips = () if self._guard is None else await self._guard.ips_of(address)
        for ip in ips[:-1]:
            share_s = max(_LEAST_ATTEMPT_S, self._connect_timeout_s / len(ips))
            with suppress(OSError):
                async with FairTimeout(share_s):
                    return await self._connect_to(address, ip)
        return await self._connect_to(address, ips[-1] if ips else address.host)

    async def _connect_to(self, address: Address, host: str) -> Connection:
        """Open a connection to one of the hosts that the address leads to."""
        connections: list[Connection] = []

        def protocol() -> asyncio.Protocol:
            connections.append(Connection(self._peer(address), self))
            return cast("asyncio.Protocol", connections[-1])

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
            # uvloop closes such a socket without a call of connection_lost
            for connection in connections:
                connection.dismiss()
            raise
        return connections[-1]

    def _engine_tls(self) -> EngineTls:
        if self._tls is None:
            self._tls = EngineTls.from_system()
        return self._tls

    def _peer(self, address: Address) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address)
            if self._cleanup_timer is None:
                self._schedule_cleanup()
        return peer

    def _schedule_cleanup(self) -> None:
        pause = max(self._keepalive_s, 0.08) / _CLEANUPS
        self._cleanup_timer = asyncio.get_running_loop().call_later(pause, self._clean_up)

    def _clean_up(self) -> None:
        """Close connections that would be too old at the next cleanup, and forget addresses without
        connections.
        """
        self._cleanup_timer = None
        oldest = asyncio.get_running_loop().time() - self._keepalive_s * (_CLEANUPS - 1) / _CLEANUPS
        for address, peer in tuple(self._peers.items()):
            while peer.idle and peer.idle[0].heard_at <= oldest:
                peer.idle[0].abort()  # which removes it from the list
            if not peer.idle:
                del self._peers[address]
                peer.is_forgotten = True
                self._by_id.clear()  # the ids are entered again on use
        if self._peers:
            self._schedule_cleanup()


def _not_opened(instance: Instance, error: Exception, tls: EngineTls | None) -> EngineError:
    """Return the EngineError for an error of a connection attempt: of DNS, of TLS, of the engine's
    machine, or a lack of the router's own (descriptors, ports).
    """
    why = None if tls is None else tls.failure(instance, error)
    number = error.errno if isinstance(error, OSError) else None
    return unreached(instance.id, number, is_name=isinstance(error, socket.gaierror), why=why)
