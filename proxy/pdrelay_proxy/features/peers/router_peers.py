"""Exchanges loads, probes and quotas with the other routers of the fleet, over UDP."""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.peers.core.datagrams import MOST_PEERS, NAME_BYTES, DatagramKind
from pdrelay_proxy.features.peers.core.load_payload import LOADS, LoadPayload, SendPace
from pdrelay_proxy.features.peers.core.peer_exchange import PeerExchange
from pdrelay_proxy.features.peers.core.probe_payload import PROBES, ProbePayload
from pdrelay_proxy.features.peers.core.quota_payload import QUOTAS, QuotaPayload
from pdrelay_proxy.features.peers.peer_counts import PeerCounts
from pdrelay_proxy.io.background import meanwhile, repeatedly

logger = logging.getLogger(__name__)
_REPEAT_S: Final = 1.0
_RESOLVE_S: Final = 5.0
_INTRODUCE_S: Final = 0.05  # after a new router was heard; several may start at once


@dataclass(frozen=True, slots=True)
class Meeting:
    """The addresses and the secret by which routers exchange datagrams."""

    routers: Sequence[Address]  # a name may have several addresses, this router's own among them
    secret: bytes  # that all of them have
    listen: tuple[str, int] | socket.socket  # host and port, or a socket that is bound


class RouterPeers(asyncio.DatagramProtocol):
    """One router's side of the exchange, on its event loop."""

    def __init__(
        self,
        registry: Registry,
        admission: Admission,
        key_names: Callable[[], Iterable[str]],
        counts: PeerCounts,
        meeting: Meeting,
        *,
        probes: bool,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,  # noqa: TID251 (hosts have no other clock in common)
    ) -> None:
        """``key_names``: of the keys that clients may have. ``probes``: this router probes engines.

        ``clock``: seconds that only rise; ``wall``: since 1970.
        """
        me = secrets.token_bytes(NAME_BYTES)
        self._loads = LoadPayload(registry)
        self._quotas = QuotaPayload(admission, key_names)
        self.probes = ProbePayload(registry, me, probes=probes)
        self.probes.call_on_news(self._send_probes_soon)
        self._exchange = PeerExchange(
            me, meeting.secret, {LOADS: self._loads, PROBES: self.probes, QUOTAS: self._quotas}
        )
        self._admission = admission
        self._names = meeting.routers
        self._listen = meeting.listen
        self._counts = counts
        counts.begin()
        self._clock = clock
        self._wall = wall
        self._transport: asyncio.DatagramTransport | None = None
        # of each name, as it was found last
        self._places: dict[Address, Sequence[tuple[Any, ...]]] = {}
        self._targets: Sequence[tuple[Any, ...]] = ()  # socket addresses
        self._unresolved: frozenset[str] = frozenset()  # names that were logged
        self._pace = SendPace()
        self._timer: asyncio.Handle | None = None
        self._introducing: asyncio.Handle | None = None
        self._probe_timer: asyncio.Handle | None = None  # of failed probes

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Exchange while the block lasts. Raises ConfigError: the port cannot be opened."""
        loop = asyncio.get_running_loop()
        listen = self._listen
        try:
            if isinstance(listen, socket.socket):
                transport, _ = await loop.create_datagram_endpoint(lambda: self, sock=listen)
            else:
                transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=listen)
        except OSError as exc:
            host, port = listen if isinstance(listen, tuple) else listen.getsockname()
            reason = exc.strerror or "it is taken, or not permitted"  # uvloop says none
            raise ConfigError(
                f"the UDP port {port} of {host} (peer_port) cannot be opened: {reason}"
            ) from exc
        self._transport = transport
        try:
            self._set_share()  # a small one: no router is heard yet
            async with (
                meanwhile(self._resolve_for_ever(transport.get_extra_info("socket").family)),
                meanwhile(
                    repeatedly(
                        _REPEAT_S, self._repeat, logger, "the other routers could not be told"
                    )
                ),
            ):
                yield
        finally:
            self._transport = None
            for timer in (self._timer, self._introducing, self._probe_timer):
                if timer is not None:
                    timer.cancel()
            transport.close()

    def changed(self, instance: InstanceId) -> None:
        """Send the new number of requests at an engine, as soon as the pace allows."""
        self._loads.note(instance)
        if self._timer is None and self._transport is not None:
            loop = asyncio.get_running_loop()
            now = self._clock()
            due = self._pace.due(now=now)
            self._timer = (
                loop.call_soon(self._send) if now >= due else loop.call_later(due - now, self._send)
            )

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:  # noqa: ARG002 (the tag says who it is)
        """Handle a datagram of another router."""
        fault = self._exchange.receive(data, now=self._clock(), wall=self._wall())
        if self._exchange.has_news and self._introducing is None and self._transport is not None:
            self._introducing = asyncio.get_running_loop().call_later(_INTRODUCE_S, self._introduce)
        self._count("received" if fault is None else fault.value)

    def error_received(self, exc: Exception) -> None:  # noqa: ARG002 (of a router that has gone: ICMP)
        """Count a datagram that did not reach a router."""
        self._count("send_failed")

    def _introduce(self) -> None:
        """Send an introduction: before it the others ignore this router."""
        self._introducing = None
        self._send_all([self._exchange.introduction(wall=self._wall())])

    def _send_probes_soon(self) -> None:
        """Send news of an engine's probes in the next iteration of the loop."""
        if self._probe_timer is None and self._transport is not None:
            self._probe_timer = asyncio.get_running_loop().call_soon(self._send_probes)

    def _send_probes(self) -> None:
        self._probe_timer = None
        self._send_all(self._sealed(PROBES, self.probes.news()))

    async def _repeat(self) -> None:
        if silent := self._exchange.expire(now=self._clock()):
            logger.info(
                "%d of the fleet's routers are silent: their requests do not count any more", silent
            )
        heard_routers = self._exchange.peers
        if heard_routers > (self._counts.heard_routers or 0):
            logger.info("another router of the fleet is heard: %d now", heard_routers)
        self._counts.heard_routers = heard_routers
        self._counts.expected_routers = self._expected_routers
        self._set_share()
        if self._introducing is None:
            self._introduce()
        self._send()
        self._send_all(self._sealed(PROBES, self.probes.bodies()))
        if self._admission.shares_limits:
            self._send_all(self._sealed(QUOTAS, self._quotas.bodies()))

    @property
    def _expected_routers(self) -> int:
        """Return how many other routers there should be; an unresolved name counts as one."""
        places = len(self._targets) + len({*self._names} - self._places.keys())
        return max(0, min(places, MOST_PEERS) - self._exchange.hears_itself)

    def _set_share(self) -> None:
        """Limit this router to its share of the fleet's limits while some others are silent."""
        heard_routers = self._exchange.peers
        expected_routers = self._expected_routers
        admission = self._admission
        share = (
            (1 + min(heard_routers, expected_routers)) / (1 + expected_routers)
            if admission.shares_limits
            else 1.0
        )
        if share != admission.share:
            log = logger.warning if share < 1 else logger.info
            log(
                "%d of %d other routers are heard: limits of the fleet are %.0f %% here",
                heard_routers,
                expected_routers,
                100 * share,
            )
            admission.share = share

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        datagrams = self._sealed(LOADS, self._loads.bodies(now=now))
        self._pace.note_sent(len(datagrams) * len(self._targets), now=now)
        self._send_all(datagrams)

    def _sealed(self, kind: DatagramKind, bodies: Sequence[bytes]) -> Sequence[bytes]:
        return self._exchange.sealed(kind, bodies, wall=self._wall())

    def _send_all(self, datagrams: Sequence[bytes]) -> None:
        transport = self._transport
        if transport is None:
            return
        for data in datagrams:
            for target in self._targets:
                transport.sendto(data, target)
                self._count("sent")

    async def _resolve_for_ever(self, family: socket.AddressFamily) -> None:
        while True:
            try:
                await self._resolve(family)
            except Exception:  # a bug must not end the exchange for ever
                logger.exception("the addresses of the other routers could not be looked up")
            await asyncio.sleep(_RESOLVE_S)

    async def _resolve(self, family: socket.AddressFamily) -> None:
        """Resolve the names of the others; a name that fails keeps its earlier addresses."""
        loop = asyncio.get_running_loop()
        unresolved = set[str]()
        # A socket for :: takes IPv4, too (RFC 3493, section 3.7), and the Service of the other
        # routers may have only IPv4.
        flags = socket.AI_V4MAPPED if family == socket.AF_INET6 else 0
        for name in self._names:
            try:
                places = await loop.getaddrinfo(
                    name.host, name.port, family=family, type=socket.SOCK_DGRAM, flags=flags
                )
            except OSError as exc:
                unresolved.add(name.host)
                if name.host not in self._unresolved:
                    logger.warning(
                        "%s, where other routers should be, has no address: %s",
                        name.host,
                        exc.strerror,
                    )
            else:
                self._places[name] = [place[4] for place in places]
        self._unresolved = frozenset(unresolved)
        addresses = dict.fromkeys(place for places in self._places.values() for place in places)
        targets = list(addresses)[:MOST_PEERS]
        is_new = set(targets) != set(self._targets)
        self._targets = targets
        if is_new:
            # set again within a second if this router is still among them
            self._exchange.hears_itself = False
            if self._introducing is None:
                self._introduce()

    def _count(self, result: str) -> None:
        self._counts.datagrams[result] += 1
