"""Routers take in nothing from others that have not named them: it may be a copy of what was sent before they began."""

import struct
from hashlib import blake2b

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role
from pdrelay_proxy.features.peers.core.datagrams import MOST_BYTES, MOST_PEERS, DatagramFault
from pdrelay_proxy.features.peers.core.load_payload import LOADS, LoadPayload
from pdrelay_proxy.features.peers.core.peer_exchange import PeerExchange
from pdrelay_proxy.features.peers.core.probe_payload import PROBES, ProbePayload
from pdrelay_proxy.features.peers.core.quota_payload import QUOTAS, QuotaPayload
from pdrelay_proxy.settings import Settings

SECRET, WALL = b"of this fleet", 1000.0
ONE_REQUEST = struct.pack(">qqii", 1, 0, 1, 0)


def hash_of(text):
    return blake2b(text.encode(), digest_size=8).digest()


class OneRouter:
    """All that a router exchanges with others: one engine, one key."""

    def __init__(self, number):
        name = number.to_bytes(8, "big")
        self.registry, self.admission = Registry(), Admission(Settings(max_key_rate=100.0), has_other_routers=True)
        self.engine = self.registry.add(Role.PREFILL, Address("http", "p0", 80)).id
        self.loads = LoadPayload(self.registry)
        self.quotas = QuotaPayload(self.admission, lambda: ["a"])
        self.probes = ProbePayload(self.registry, name)
        payloads = {LOADS: self.loads, QUOTAS: self.quotas, PROBES: self.probes}
        self.exchange = PeerExchange(name, SECRET, payloads)

    @property
    def load(self):
        return self.registry.member(self.engine).load

    def serve(self, request):
        """Let a request of the key in, and send it to the engine."""
        self.admission.arrive("a", 0, 0, now=0.0)
        self.load.enter(RequestId(request))
        self.loads.note(self.engine)

    def introduces(self):
        return self.exchange.introduction(wall=WALL)

    def says(self, *, now):
        return [
            *self.exchange.sealed(LOADS, self.loads.bodies(now=now), wall=WALL),
            *self.exchange.sealed(QUOTAS, self.quotas.bodies(), wall=WALL),
        ]

    def meets(self, data, *, now=0.0):
        return self.exchange.receive(data, now=now, wall=WALL)

    def hears(self, datagrams, *, now=0.0):
        return [self.exchange.receive(data, now=now, wall=WALL) for data in datagrams]


def acquainted(one, other):
    """Have two routers name each other."""
    other.meets(one.introduces())
    one.meets(other.introduces())
    other.meets(one.introduces())


def test_what_was_sent_before_a_router_began_is_not_taken_in():
    """A router has gone, another begins within 30 s, and somebody repeats all that the first has sent."""
    gone = OneRouter(1)
    there = OneRouter(2)
    late = OneRouter(3)
    acquainted(gone, there)
    gone.serve("r")
    told = gone.says(now=0.0)
    assert there.hears(told) == [None, None]
    assert there.load.at_other_routers == 1

    late.meets(gone.introduces())
    assert late.hears(told) == [DatagramFault.UNKNOWN] * 2
    assert (late.load.at_other_routers, late.exchange.peers, late.admission._accounts) == (0, 0, {})


def test_a_router_that_is_there_is_heard_after_it_has_named_the_other_one():
    """Each hears the other, then each names the other."""
    one, late = OneRouter(1), OneRouter(2)
    one.serve("r")
    assert late.hears(one.says(now=0.0)) == [DatagramFault.UNKNOWN] * 2

    acquainted(one, late)
    assert late.hears(one.says(now=1.0), now=1.0) == [None, None]
    assert (late.load.at_other_routers, late.exchange.peers) == (1, 1)
    assert list(late.admission._accounts) == ["a"]


def test_a_router_that_was_silent_names_the_other_one_again():
    """What it had sent before may have been kept by somebody."""
    one, other = OneRouter(1), OneRouter(2)
    acquainted(one, other)
    other.exchange.expire(now=3.1)
    one.serve("r")

    assert other.hears(one.says(now=4.0), now=4.0) == [DatagramFault.UNKNOWN] * 2
    other.meets(one.introduces(), now=4.1)
    assert other.hears(one.says(now=5.0), now=5.0) == [None, None]


def test_a_router_that_is_heard_for_the_first_time_is_news():
    """It is told at once, for it takes nothing in before."""
    one = OneRouter(1)
    other = OneRouter(2)
    third = OneRouter(3)
    assert not one.exchange.has_news

    one.meets(other.introduces())
    assert one.exchange.has_news
    one.introduces()
    one.meets(other.introduces())
    assert not one.exchange.has_news

    third.serve("r")
    one.hears(third.says(now=0.0))
    assert one.exchange.has_news


def test_all_routers_of_a_fleet_are_named_in_one_datagram():
    """Below any MTU; more are dropped until some have been silent."""
    one = OneRouter(0)
    for number in range(1, MOST_PEERS + 1):
        assert one.meets(OneRouter(number).introduces()) is None
    assert one.meets(OneRouter(MOST_PEERS + 1).introduces()) is DatagramFault.TOO_MANY
    assert len(one.introduces()) <= MOST_BYTES

    last = OneRouter(MOST_PEERS)
    last.meets(one.introduces())
    assert last.exchange.peers == 1


def test_a_router_does_not_meet_itself():
    """It may be in its own list of peers."""
    one = OneRouter(1)

    assert one.meets(one.introduces()) is None
    assert not one.exchange.has_news


@pytest.mark.parametrize(
    ("code", "body", "make"),
    [
        (b"xpI1", b"a" * 8, lambda router: router.introduces()),
        (b"xpL1", hash_of("prefill p0:80 None") + struct.pack(">H", 1), lambda router: router.says(now=0.0)[0]),
        (b"xpQ1", hash_of("a") + ONE_REQUEST + hash_of("") + ONE_REQUEST, lambda router: router.says(now=0.0)[1]),
        (b"xpP2", b"", lambda router: router.exchange.sealed(PROBES, router.probes.bodies(), wall=WALL)[0]),
    ],
    ids=["introductions", "loads", "quotas", "probes"],
)
def test_datagrams_are_what_routers_of_other_versions_read(code, body, make):
    """While a fleet is updated, both versions serve: head, entries, and the tag."""
    router = OneRouter(1)
    router.meets(PeerExchange(b"a" * 8, SECRET, {}).introduction(wall=WALL))
    router.serve("r")
    text = struct.pack(">4s8sQd", code, (1).to_bytes(8, "big"), 1, WALL) + body
    tag = blake2b(text, key=blake2b(SECRET).digest(), digest_size=16).digest()

    assert make(router) == text + tag
