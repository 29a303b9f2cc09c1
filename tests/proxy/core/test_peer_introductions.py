"""Routers take in nothing from others that have not named them: it may be a copy of what was sent before they began."""

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.quota_exchange import QuotaExchange
from pdrelay_proxy.core.fleet.load_exchange import LoadExchange
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role
from pdrelay_proxy.core.peer_datagrams import MOST_BYTES, MOST_PEERS, DatagramFault
from pdrelay_proxy.core.peer_introductions import PeerIntroductions
from pdrelay_proxy.settings import Settings

SECRET, WALL = b"of this fleet", 1000.0


class OneRouter:
    """All that a router exchanges with others: one engine, one key."""

    def __init__(self, number):
        name = number.to_bytes(8, "big")
        self.registry, self.admission = Registry(), Admission(Settings(peers=("router:8001",), max_key_rate=100.0))
        self.engine = self.registry.add(Role.PREFILL, Address("http", "p0", 80)).id
        self.introductions = PeerIntroductions(name, SECRET)
        self.loads = LoadExchange(self.registry, name, SECRET, self.introductions)
        self.quotas = QuotaExchange(self.admission, name, SECRET, lambda: ["a"], self.introductions)

    @property
    def load(self):
        return self.registry.member(self.engine).load

    def serve(self, request):
        """Let a request of the key in, and send it to the engine."""
        self.admission.arrive("a", 0, 0, now=0.0)
        self.load.enter(RequestId(request))
        self.loads.note(self.engine)

    def introduces(self):
        return self.introductions.datagram(wall=WALL)

    def says(self, *, now):
        return [*self.loads.datagrams(now=now, wall=WALL), *self.quotas.datagrams(wall=WALL)]

    def meets(self, data, *, now=0.0):
        return self.introductions.receive(data, now=now, wall=WALL)

    def hears(self, datagrams, *, now=0.0):
        loads, quotas = datagrams
        return [
            self.loads.receive(loads, now=now, wall=WALL),
            self.quotas.receive(quotas, now=now, wall=WALL),
        ]


def acquainted(one, other):
    """Have two routers name each other."""
    other.meets(one.introduces())
    one.meets(other.introduces())
    other.meets(one.introduces())


def test_what_was_sent_before_a_router_began_is_not_taken_in():
    """A router has gone, another begins within 30 s, and somebody repeats all that the first has sent."""
    gone, there, late = OneRouter(1), OneRouter(2), OneRouter(3)
    acquainted(gone, there)
    gone.serve("r")
    told = gone.says(now=0.0)
    assert there.hears(told) == [None, None]
    assert there.load.at_peers == 1

    late.meets(gone.introduces())
    assert late.hears(told) == [DatagramFault.UNKNOWN] * 2
    assert (late.load.at_peers, late.loads.peers, late.admission._accounts) == (0, 0, {})


def test_a_router_that_is_there_is_heard_after_it_has_named_the_other_one():
    """Each hears the other, then each names the other."""
    one, late = OneRouter(1), OneRouter(2)
    one.serve("r")
    assert late.hears(one.says(now=0.0)) == [DatagramFault.UNKNOWN] * 2

    acquainted(one, late)
    assert late.hears(one.says(now=1.0), now=1.0) == [None, None]
    assert (late.load.at_peers, late.loads.peers) == (1, 1)
    assert list(late.admission._accounts) == ["a"]


def test_a_router_that_was_silent_names_the_other_one_again():
    """What it had sent before may have been kept by somebody."""
    one, other = OneRouter(1), OneRouter(2)
    acquainted(one, other)
    other.introductions.expire(now=3.1)
    one.serve("r")

    assert other.hears(one.says(now=4.0), now=4.0) == [DatagramFault.UNKNOWN] * 2
    other.meets(one.introduces(), now=4.1)
    assert other.hears(one.says(now=5.0), now=5.0) == [None, None]


def test_a_router_that_is_heard_for_the_first_time_is_news():
    """It is told at once, for it takes nothing in before."""
    one, other, third = OneRouter(1), OneRouter(2), OneRouter(3)
    assert not one.introductions.has_news

    one.meets(other.introduces())
    assert one.introductions.has_news
    one.introduces()
    one.meets(other.introduces())
    assert not one.introductions.has_news

    third.serve("r")
    one.hears(third.says(now=0.0))
    assert one.introductions.has_news


def test_all_routers_of_a_fleet_are_named_in_one_datagram():
    """Below any MTU; more are dropped until some have been silent."""
    one = OneRouter(0)
    for number in range(1, MOST_PEERS + 1):
        assert one.meets(OneRouter(number).introduces()) is None
    assert one.meets(OneRouter(MOST_PEERS + 1).introduces()) is DatagramFault.TOO_MANY
    assert len(one.introduces()) <= MOST_BYTES

    last = OneRouter(MOST_PEERS)
    last.meets(one.introduces())
    assert last.introductions.admits((0).to_bytes(8, "big"), now=0.0)


@pytest.mark.parametrize("data", [b"", b"xpI1", b"xpI1" + bytes(60), b"xpI1" + bytes(1300)])
def test_bytes_that_are_no_introduction_are_dropped(data):
    """They come from a network."""
    assert OneRouter(1).meets(data) in (DatagramFault.MALFORMED, DatagramFault.TAG)


def test_a_router_does_not_meet_itself():
    """It may be in its own list of peers."""
    one = OneRouter(1)

    assert one.meets(one.introduces()) is None
    assert not one.introductions.has_news
