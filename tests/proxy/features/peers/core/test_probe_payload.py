"""Many routers beside each other, in virtual time: an engine gets a bounded number of looks, and none is missed."""

import random

import pytest

from pdrelay_proxy.core.fleet.probe_schedule import ProbeSchedule
from pdrelay_proxy.features.peers.core.datagrams import DatagramFault, Envelope
from pdrelay_proxy.features.peers.core.load_payload import engine_name
from pdrelay_proxy.features.peers.core.probe_payload import PROBES, WATCHERS
from support.introduced import introduced
from support.probing_routers import INTERVAL_S, SECRET, TICK_S, TIMEOUT_S, WALL, Fleet, Router, after


def test_each_router_more_is_not_one_more_that_looks_at_every_engine():
    """100 routers looked at each of 1,000 engines: 26 looks a second for each engine. Here 8 routers do, and 24."""
    rates = []
    for routers in (8, 24):
        fleet = Fleet(routers, 20)
        fleet.run(30)
        since = fleet.now
        fleet.run(60)
        rates.append(max(fleet.rates(since)))
        assert fleet.longest_gap(since) <= INTERVAL_S

    # three routers in 3.5 to 4.3 s, and each of the others in 30 to 60 s
    assert rates[0] <= WATCHERS / 3.5 + 5 / 30 + 0.1
    assert rates[1] <= WATCHERS / 3.5 + 21 / 30 + 0.1


def test_a_lost_zone_is_found_by_every_router_in_time_and_the_others_are_still_looked_at():
    """Most routers hear of it: a look of their own decides, and the word is the other one."""
    fleet = Fleet(20, 60)
    fleet.run(12)
    fleet.gone = {member.instance.id for member in fleet.routers[0].members[:6]}
    lost = fleet.now
    fleet.run(20)

    assert len(fleet.found) == 20 * 6
    assert max(fleet.found.values()) - lost <= INTERVAL_S + 2 * TIMEOUT_S
    assert fleet.longest_gap(lost) <= INTERVAL_S


def test_one_that_comes_back_is_found_by_every_router_in_a_second():
    """It starts. The watchers ask each second, and tell the others; these do not ask by themselves meanwhile."""
    fleet = Fleet(20, 20)
    fleet.run(12)
    name = fleet.routers[0].members[7].instance.id
    fleet.gone = fleet.refuses = {name}
    fleet.run(20)
    before = len(fleet.at[name])
    fleet.run(30)
    looks = len(fleet.at[name]) - before
    fleet.gone = set()
    back = fleet.now
    fleet.run(5)

    assert looks <= 30 * (WATCHERS / 1.0 + 17 / 30) + 20
    assert len(fleet.back) == 20
    assert max(fleet.back.values()) - back <= 1.0 + 4 * TICK_S


def test_one_that_holds_looks_until_their_timeout_is_looked_at_by_all():
    """It may hang, and keep requests: each router gives up its own after a while without an answer."""
    fleet = Fleet(12, 24)
    fleet.run(12)
    name = fleet.routers[0].members[7].instance.id
    fleet.gone = {name}
    fleet.run(40)

    assert all(router.registry.member(name).life.silent_s(now=fleet.now) >= 20 for router in fleet.routers)
    assert sum(at >= fleet.now - 16 for at in fleet.at[name]) >= 12


def test_a_watcher_that_ends_is_replaced():
    """The two others watch meanwhile, so no engine is without."""
    fleet = Fleet(12, 60)
    fleet.run(12)
    since = fleet.now
    fleet.cut = {0, 1}
    fleet.run(20)

    assert fleet.longest_gap(since) <= INTERVAL_S
    for member in fleet.routers[2].members:
        assert sum(router.probes.watches(member.instance.id) for router in fleet.routers[2:]) == WATCHERS


@pytest.mark.parametrize("count", [2, 8])
def test_an_engine_that_few_routers_know_is_watched_by_some_of_these(count):
    """Another namespace, another store, another selector: the others are nearer on the ring, and never look at it."""
    engine = engine_name(Router(0, 13).members[12])
    nearest = sorted(range(16), key=lambda n: after(engine, Router(n, 0).name))
    fleet = Fleet(16, 12, more=nearest[-count:])
    last = fleet.routers[nearest[-1]].members[12].instance.id
    fleet.run(30)
    since = fleet.now
    fleet.run(30)
    looks = sum(at >= since for at in fleet.at[last])
    gap = fleet.longest_gap(since)
    rate = max(fleet.rates(since))
    fleet.gone = {last}
    lost = fleet.now
    fleet.run(16)

    assert gap <= INTERVAL_S
    assert looks <= 30 * (min(count, WATCHERS) / 3.5 + count / 30)
    assert rate <= WATCHERS / 3.5 + 13 / 30 + 0.1  # of the others, which all know
    assert sorted(number for number, _ in fleet.found) == sorted(nearest[-count:])
    assert max(fleet.found.values()) - lost <= INTERVAL_S + 2 * TIMEOUT_S


def test_a_router_that_does_not_look_takes_no_place():
    """health_check_interval 0, for this router or while it is updated: what it does not look at others must."""
    idle = Router(0, 40, probes=False)
    fleet = Fleet(5, 40)
    fleet.routers[0] = idle
    idle.schedule = ProbeSchedule(0.0, random.random)
    fleet.run(10)

    for member in idle.members:
        assert sum(router.probes.watches(member.instance.id) for router in fleet.routers[1:]) == WATCHERS


def test_watchers_alone_name_an_engine_each_second():
    """What 100 routers say of 1,000 engines fits in one datagram from each to each: 30 engines of 9 bytes."""
    fleet = Fleet(16, 64)
    fleet.run(10)
    fleet.sizes.clear()
    fleet.run(10)
    empty = len(Envelope(b"x" * 8, SECRET, [PROBES]).seal(PROBES, b"", WALL))

    assert len(fleet.sizes) == 16 * 10
    assert sum(fleet.sizes) == 10 * (16 * empty + 64 * WATCHERS * 9)


def test_up_to_three_routers_look_at_all():
    """Nothing is won by less, and a router sees what its own network does."""
    fleet = Fleet(3, 20)
    fleet.run(5)

    assert all(router.probes.watches(one.instance.id) for router in fleet.routers for one in router.members)


def test_few_engines_have_another_watcher_when_a_router_comes():
    """Consistent hashing: else all routers would look at all engines at once, whenever one starts."""
    fleet, newer = Fleet(15, 100), Fleet(16, 100)
    fleet.run(10)
    newer.run(10)
    names = [member.instance.id for member in fleet.routers[0].members]

    sides = [[[r.probes.watches(name) for r in one.routers[:15]] for name in names] for one in (fleet, newer)]
    assert sum(a != b for a, b in zip(*sides, strict=True)) <= 100 * 0.6  # 3 of 16 on the mean, by arcs of the ring


class Pair:
    """A router, and another one that tells it something."""

    def __init__(self):
        self.one, self.other = Router(1, 3), Router(2, 3)
        self.names = [member.instance.id for member in self.one.members]
        introduced(self.one.exchange, self.other.exchange)
        self.hear(self.other.says(), 0.0)
        self.other.exchange.receive(self.one.says()[0], now=0.0, wall=WALL)

    def hear(self, datagrams, now):
        return [self.one.exchange.receive(data, now=now, wall=WALL) for data in datagrams]

    def misses(self, *places):
        for place in places:
            self.other.members[place].life.missed("does not answer", now=0.0)


def test_what_is_missing_is_said_every_second_and_what_is_not_said_again_counts_no_more():
    """Datagrams are lost."""
    pair = Pair()
    pair.misses(1)
    pair.hear(pair.other.says(), 1.0)
    said = [pair.one.probes.missed_at(name) for name in pair.names]
    pair.one.exchange.expire(now=3.9)
    kept = pair.one.probes.missed_at(pair.names[1])
    pair.one.exchange.expire(now=4.1)

    assert said == [None, 1.0, None]
    assert kept == 1.0
    assert pair.one.probes.missed_at(pair.names[1]) is None


def test_the_first_one_that_finds_an_engine_well_again_is_believed():
    """Whoever hears it looks at once, and judges by that."""
    pair = Pair()
    pair.misses(0)
    pair.hear(pair.other.says(), 1.0)
    pair.other.probes.note(pair.names[0], is_missing=False)
    pair.hear(pair.other.news(), 1.5)

    assert pair.one.probes.missed_at(pair.names[0]) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda data: data[:-1], DatagramFault.MALFORMED),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), DatagramFault.TAG),
        (lambda data: b"xpL1" + data[4:], DatagramFault.MALFORMED),
    ],
    ids=["cut off", "forged", "of another kind"],
)
def test_what_is_no_word_of_a_router_is_dropped(change, fault):
    """The port is open to whoever reaches it."""
    pair = Pair()

    assert pair.hear([change(pair.other.says()[0])], 1.0) == [fault]


def test_what_says_neither_that_an_engine_answers_nor_that_it_does_not_is_dropped():
    """A router of another version: to guess would be to look at engines for nothing."""
    pair = Pair()
    pair.one.exchange.expire(now=0.0)
    engine = engine_name(pair.one.members[0])
    envelope = Envelope(pair.other.name, SECRET, [PROBES])
    envelope.seal(PROBES, b"", WALL)

    assert pair.hear([envelope.seal(PROBES, engine + b"\x03", WALL)], 1.0) == [DatagramFault.MALFORMED]
    assert pair.one.probes.missed_at(pair.names[0]) is None
