"""What the routers of a fleet tell each other of their requests."""

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineRole, RequestId, Role
from pdrelay_proxy.features.peers.core.datagrams import MOST_BYTES, DatagramFault, bodies_of
from pdrelay_proxy.features.peers.core.load_payload import LOADS, LoadPayload, SendPace
from pdrelay_proxy.features.peers.core.peer_exchange import PeerExchange
from support.introduced import introduced
from support.line_count import lines

SECRET = b"of this fleet"


class OneRouter:
    """A registry, and its side of the exchange; engines are added in an order of its own."""

    def __init__(self, number, engines=3, *, secret=SECRET):
        self.registry = Registry()
        self.names = {}
        order = [*range(engines)]
        random.Random(number).shuffle(order)
        for place in order:
            self.add(place)
        self.loads = LoadPayload(self.registry)
        self.rename(bytes([number]) * 8, secret)

    def rename(self, name, secret=SECRET):
        self.exchange = PeerExchange(name, secret, {LOADS: self.loads})

    def add(self, place):
        self.names[place] = self.registry.add(Role.PREFILL, Address("http", f"p{place}", 80)).id

    def load(self, place):
        return self.registry.member(self.names[place]).load

    def send(self, place, request="r"):
        self.load(place).enter(RequestId(request))
        self.loads.note(self.names[place])

    def end(self, place, request="r"):
        self.load(place).leave(RequestId(request))
        self.loads.note(self.names[place])

    def says(self, *, now=0.0, wall=1000.0):
        return self.exchange.sealed(LOADS, self.loads.bodies(now=now), wall=wall)

    def hears(self, datagrams, *, now=0.0, wall=1000.0):
        return [self.exchange.receive(data, now=now, wall=wall) for data in datagrams]


def met(*routers, now=0.0):
    """Have routers name each other."""
    introduced(*[router.exchange for router in routers], now=now)
    return routers


def test_a_router_knows_what_the_others_have_at_an_engine():
    """By the engine's address: each router has ids of its own. The score of an engine is that of all routers."""
    one, other = met(OneRouter(1), OneRouter(2))
    one.send(0, "a")
    one.send(0, "b")
    one.send(2, "c")

    assert other.hears(one.says()) == [None]
    assert [other.load(place).at_other_routers for place in range(3)] == [2, 0, 1]
    assert [other.load(place).score(now=0.0) for place in range(3)] == [2.0, 0.0, 1.0]
    assert [other.load(place).in_flight for place in range(3)] == [0, 0, 0]  # what ends a drain are its own

    one.end(0, "a")
    other.hears(one.says(now=0.1))
    assert [other.load(place).at_other_routers for place in range(3)] == [1, 0, 1]


def test_an_engine_that_has_turned_is_the_same_to_all_routers():
    """One router may be ahead of another: the name is by what the engine was added as."""
    one, other = met(OneRouter(1), OneRouter(2))
    other.registry.departures.change_role(other.names[0], EngineRole.DECODE, now=0.0, at_once=True)
    one.send(0)

    assert other.hears(one.says()) == [None]
    assert other.load(0).at_other_routers == 1


def test_only_what_has_changed_is_told_and_everything_once_a_second():
    """A router that missed datagrams, or has just started, knows all a second later."""
    one, late = met(OneRouter(1), OneRouter(2))
    one.send(0)
    one.says()
    one.send(1)
    one.says(now=0.4)
    one.send(2)
    late.hears(one.says(now=0.5))
    assert [late.load(place).at_other_routers for place in range(3)] == [0, 1, 1]

    late.hears(one.says(now=1.0))
    assert [late.load(place).at_other_routers for place in range(3)] == [1, 1, 1]
    assert one.says(now=1.5) == []
    assert len(one.says(now=2.0)) == 1


@pytest.mark.parametrize("ends", [False, True], ids=["begins", "ends"])
def test_a_change_that_was_lost_is_told_with_the_next_one(ends):
    """Until the repetition of everything a busy engine looked free for most of its prompt, or a free one busy."""
    one, other = met(OneRouter(1), OneRouter(2))
    one.send(0)
    other.hears(one.says())
    if ends:
        one.end(0)
    else:
        one.send(0, "another")
    one.says(now=0.1)  # is lost
    one.send(2)
    other.hears(one.says(now=0.2))

    assert [other.load(place).at_other_routers for place in range(3)] == [0 if ends else 2, 0, 1]


def test_a_change_is_told_again_only_where_the_datagram_has_room():
    """Under load there would be twice as many datagrams."""
    one = OneRouter(1, 200)
    one.says()
    for place in range(110):
        one.send(place)
    first = one.says(now=0.1)
    for place in range(110, 200):
        one.send(place)

    assert (len(first), len(one.says(now=0.2))) == (1, 1)


def test_a_router_that_is_silent_counts_no_more():
    """Its requests have ended with it; what it repeated lately stays."""
    one, two, other = met(OneRouter(1), OneRouter(2), OneRouter(3))
    for router in (one, two):
        router.send(0)
        other.hears(router.says())
    other.hears(two.says(now=2.5), now=2.5)

    assert other.exchange.expire(now=3.1) == 1
    assert (other.load(0).at_other_routers, other.exchange.peers) == (1, 1)


def test_a_count_whose_end_was_lost_is_forgotten():
    """The zero that was lost is not repeated, and neither is the count."""
    one, other = met(OneRouter(1), OneRouter(2))
    one.send(0)
    one.send(1)
    other.hears(one.says())
    one.end(0)
    one.says(now=0.5)  # lost
    for second in (1.0, 2.0, 3.0, 4.0):
        other.hears(one.says(now=second), now=second)
        other.exchange.expire(now=second)

    assert [other.load(place).at_other_routers for place in range(2)] == [0, 1]


def test_a_second_in_which_nothing_expires_takes_no_look_at_each_count():
    """With 100 routers and 1,000 engines the loop stood still for a tenth of a second, every second."""
    *others, here = met(*[OneRouter(number, 150) for number in range(10)])
    for router in others:
        for place in range(150):
            router.send(place)
        here.hears(router.says())

    assert lines(lambda: here.exchange.expire(now=1.0)) < 500
    assert {here.load(place).at_other_routers for place in range(150)} == {len(others)}


def test_an_engine_that_is_added_later_has_what_others_told_of_it():
    """Routers hear of a new engine at different times."""
    one, other = met(OneRouter(1, engines=2), OneRouter(2, engines=1))
    one.send(1)
    other.hears(one.says())
    other.add(1)
    other.hears(one.says(now=0.1))
    other.exchange.expire(now=0.2)

    assert other.load(1).at_other_routers == 1


steps = st.lists(
    st.tuples(
        st.integers(0, 2),  # router
        st.integers(0, 2),  # engine
        st.booleans(),  # begins, or ends
        st.lists(st.integers(0, 5), max_size=3),  # how many datagrams late it comes to the others; [] is lost
    ),
    max_size=40,
)


def change(router, engine, count, *, begins):
    """Begin or end a request at an engine, and return how many there are."""
    if begins:
        router.send(engine, f"r{count}")
        return count + 1
    if count:
        router.end(engine, f"r{count - 1}")
    return max(0, count - 1)


@given(steps)
def test_whatever_is_lost_repeated_or_late_the_next_repetition_is_the_truth(found):
    """Three routers; datagrams are lost, doubled and overtake each other."""
    routers = met(*[OneRouter(number) for number in range(3)])
    under_way = {(r, e): 0 for r in range(3) for e in range(3)}
    on_its_way = []
    now = 0.0
    for number, (one, engine, begins, delays) in enumerate(found):
        now += 0.01
        under_way[one, engine] = change(routers[one], engine, under_way[one, engine], begins=begins)
        on_its_way += [(number + delay, data) for data in routers[one].says(now=now) for delay in delays]
        on_its_way.sort(key=lambda due: due[0])
        while on_its_way and on_its_way[0][0] <= number:
            _, data = on_its_way.pop(0)
            assert {fault for other in routers for fault in other.hears([data], now=now)} <= {None, DatagramFault.LATE}
    for second in range(1, 6):
        told = [data for sender in routers for data in sender.says(now=now + second)]
        for other in routers:
            other.hears(told, now=now + second)
            other.exchange.expire(now=now + second)

    for (one, engine), load in {key: routers[key[0]].load(key[1]) for key in under_way}.items():
        assert load.at_other_routers == sum(under_way[other, engine] for other in range(3) if other != one)


def altered(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@given(st.integers(0, 10_000))
def test_an_altered_datagram_is_dropped(place):
    """Each bit of it is under the tag."""
    one, other = met(OneRouter(1), OneRouter(2))
    one.send(0)
    (data,) = one.says()

    assert other.hears([altered(data, place % len(data))])[0] in (DatagramFault.TAG, DatagramFault.MALFORMED)
    assert other.load(0).at_other_routers == 0


def test_a_stranger_and_an_old_datagram_are_dropped():
    """One without the secret, one that was kept for a minute, and one's own."""
    one = OneRouter(1)
    stranger = OneRouter(3, secret=b"guessed")
    other = OneRouter(2)
    for router in (one, stranger, other):
        router.send(0)

    assert other.hears(stranger.says()) == [DatagramFault.TAG]
    assert other.hears(one.says(wall=940.0)) == [DatagramFault.CLOCK]
    assert other.hears(one.says(now=1.0, wall=float("nan"))) == [DatagramFault.CLOCK]
    assert other.hears(other.says()) == [None]
    assert (other.load(0).at_other_routers, other.exchange.peers) == (0, 0)


def test_what_a_router_has_sent_before_it_fell_silent_is_not_taken_in_again():
    """For as long as its time is good, somebody could repeat it; the router itself goes on where it ended."""
    one, other = met(OneRouter(1), OneRouter(2))
    one.send(0)
    old = [*one.says(), *one.says(now=1.0)]
    other.hears(old)
    assert other.exchange.expire(now=3.1) == 1

    assert other.hears(old, now=3.2, wall=1003.2) == [DatagramFault.LATE] * 2
    assert (other.load(0).at_other_routers, other.exchange.peers) == (0, 0)

    one.end(0)
    met(one, other, now=4.0)
    assert other.hears(one.says(now=4.0), now=4.0) == [None]
    assert other.hears(old, now=4.1, wall=1004.1) == [DatagramFault.LATE] * 2
    assert (other.load(0).at_other_routers, other.exchange.peers) == (0, 1)


@given(st.sampled_from([b"", b"xpI1", b"xpL1"]), st.binary(max_size=1500))
def test_no_bytes_are_too_odd(kind, data):
    """They come from a network."""
    other = OneRouter(2)

    assert other.exchange.receive(kind + data, now=0.0, wall=0.0) is not None


def test_one_router_cannot_name_engines_without_end():
    """What is named once more still counts."""
    one, other = met(OneRouter(1), OneRouter(2))
    entries = [struct.pack(">8sH", struct.pack(">Q", number), 1) for number in range(16_385)]
    told = one.exchange.sealed(LOADS, bodies_of(entries), wall=1000.0)
    again = one.exchange.sealed(LOADS, bodies_of(entries[:1]), wall=1000.0)

    assert other.hears(told) == [None] * (len(told) - 1) + [DatagramFault.TOO_MANY]
    assert other.hears(again) == [None]


def test_many_engines_take_several_datagrams_below_any_mtu():
    """Fragments get lost more often."""
    one, other = met(OneRouter(1, engines=300), OneRouter(2, engines=300))
    for place in range(300):
        one.send(place)
    told = one.says()

    assert len(told) == 3
    assert max(map(len, told)) <= MOST_BYTES
    assert set(other.hears(told)) == {None}
    assert sum(other.load(place).at_other_routers for place in range(300)) == 300


@pytest.mark.parametrize(("targets", "per_s"), [(1, 3000), (15, 200), (63, 47)])
def test_the_pace_is_at_once_for_a_while_and_bounded_in_the_long_run(targets, per_s):
    """A busy router must not spend its core on telling."""
    pace = SendPace()
    now = 0.0
    sends = 0
    assert pace.due(now=5.0) == 5.0
    while now < 10.0:
        now = max(now + 1e-5, pace.due(now=now))
        pace.note_sent(targets, now=now)
        sends += 1

    assert sends == pytest.approx(10 * per_s, rel=0.05)
