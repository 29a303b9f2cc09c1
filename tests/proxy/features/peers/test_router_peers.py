"""Which other routers there should be, and what share of the fleet's limits a router takes while it hears few."""

import asyncio
import socket

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.peers.core.peer_exchange import PeerExchange
from pdrelay_proxy.features.peers.peer_counts import PeerCounts
from pdrelay_proxy.features.peers.router_peers import Meeting, RouterPeers
from pdrelay_proxy.settings import Settings
from support.simulated_loop import in_simulated_time

pytestmark = pytest.mark.edges


SECRET, WALL = b"of this fleet", 1000.0


class Names:
    """Name service, in place of the system's."""

    def __init__(self):
        self.places = {}

    def getaddrinfo(self, host, port, *_):
        if host not in self.places:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (place, port)) for place in self.places[host]]


@pytest.fixture
def dns(monkeypatch):
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


class OneRouter:
    """A router with peers; its time stands still unless it has a clock."""

    def __init__(self, *names, clock=lambda: 0.0):
        self.registry = Registry()
        self.admission = Admission(Settings(max_rate=100.0), has_other_routers=True)
        self.counts = PeerCounts()
        self.peers = RouterPeers(
            self.registry,
            self.admission,
            tuple,
            self.counts,
            Meeting([Address("http", name, 8001) for name in names], SECRET, ("127.0.0.1", 0)),
            probes=True,
            clock=clock,
            wall=lambda: WALL,
        )

    def hears(self, *names):
        """Hear others that hear it."""
        for name in names:
            other = PeerExchange(name * 4, SECRET, {})
            other.receive(self.introduction(), now=0.0, wall=WALL)
            self.peers.datagram_received(other.introduction(wall=WALL), ("10.0.0.1", 8001))

    def hears_itself(self):
        self.peers.datagram_received(self.introduction(), ("10.0.0.1", 8001))

    def introduction(self):
        return self.peers._exchange.introduction(wall=WALL)

    async def look_up(self):
        """Do what the router does every few seconds, at once."""
        await self.peers._resolve(socket.AF_INET)
        await self.peers._repeat()

    @property
    def known(self):
        return self.counts.expected_routers


def test_a_busy_router_sends_no_more_datagrams_than_its_pace_allows(dns):
    """The loads of 300 engines take three datagrams to each router; each of them costs both sides."""
    dns.places["all"] = [f"127.1.0.{number}" for number in range(1, 41)]

    async def sent_in_four_seconds():
        router = OneRouter("all", clock=asyncio.get_running_loop().time)
        engines = [router.registry.add(Role.PREFILL, Address("http", "h", port)).id for port in range(1, 301)]
        async with router.peers.running():
            await asyncio.sleep(1.5)
            before = router.counts.datagrams["sent"]
            for _ in range(400):
                for engine in engines:
                    router.peers.changed(engine)
                await asyncio.sleep(0.01)
            return router.counts.datagrams["sent"] - before

    assert 10_000 < in_simulated_time(sent_in_four_seconds())[1] < 14_000


async def test_a_name_that_leads_nowhere_is_a_router_that_is_not_heard(dns, caplog):
    """While the name service is down, N routers must not let in N times what the limits say."""
    router = OneRouter("a", "b", "c")
    async with router.peers.running():
        assert router.admission.share == 1 / 4
        assert "0 of 3 other routers are heard: limits of the fleet are 25 % here" in caplog.text

    await router.look_up()
    assert (router.known, router.admission.share) == (3, 1 / 4)


async def test_a_name_counts_as_what_it_leads_to_once_it_does(dns):
    """One name may have all routers, this one among them."""
    router = OneRouter("all", "more")
    dns.places["all"] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    await router.look_up()
    assert (router.known, router.admission.share) == (4, 1 / 5)

    dns.places["more"] = ["10.0.0.3"]
    router.hears_itself()
    router.hears(b"a.", b"b.")
    await router.look_up()
    assert (router.known, router.admission.share) == (2, 1.0)

    dns.places.clear()  # what was found before stays
    await router.look_up()
    assert (router.known, router.admission.share) == (2, 1.0)


async def test_a_router_that_is_no_longer_among_its_peers_expects_one_more(dns):
    """A list of names that all lead elsewhere: none of them is this router, as one was before."""
    router = OneRouter("all")
    dns.places["all"] = ["10.0.0.1", "10.0.0.2"]
    await router.look_up()
    router.hears_itself()
    await router.look_up()
    assert router.known == 1

    dns.places["all"] = ["10.0.0.3", "10.0.0.2"]
    await router.look_up()
    assert (router.known, router.admission.share) == (2, 1 / 3)

    router.hears_itself()
    dns.places["all"] = ["10.0.0.2", "10.0.0.3"]  # the same in another order
    await router.look_up()
    assert router.known == 1


async def test_a_socket_for_both_families_finds_routers_that_have_one():
    """A router listens at :: in a dual-stack cluster, where the Service of its peers may have IPv4 alone."""
    one = OneRouter("127.0.0.1")
    await one.peers._resolve(socket.AF_INET6)

    assert [place[0] for places in one.peers._places.values() for place in places] == ["::ffff:127.0.0.1"]
