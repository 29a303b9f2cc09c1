"""Many routers beside each other, in virtual time: an engine gets a bounded number of looks, and none is missed."""

import itertools
import random
from collections import deque

import pytest

from support.several_routers import Everybody
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.look_exchange import WATCHERS, LookExchange
from xpyd_proxy.core.fleet.probe_schedule import ProbeSchedule
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import Role
from xpyd_proxy.core.peer_datagrams import DatagramFault
from xpyd_proxy.settings import Settings

TICK_S, TIMEOUT_S, INTERVAL_S, ANSWER_S, WALL, SECRET = 0.25, 5.0, 5.0, 0.05, 1000.0, b"of this fleet"


class Router:
    """One router's probing, as io/probes/prober.py does it."""

    def __init__(self, number, engines, *, exchanges):
        dice = random.Random(number)
        self.registry = Registry(Settings(health_check_failures=2))
        for n in range(engines):
            self.registry.add(Role.DECODE, Address("http", f"h{n}", 80), now=0.0)
        self.members = self.registry.members()
        self.looks = LookExchange(self.registry, dice.randbytes(8), SECRET, Everybody())
        self.schedule = ProbeSchedule(INTERVAL_S, dice.random, self.looks if exchanges else None)
        self.open = {}  # by when a look ends
        self.phase = dice.random() * TICK_S
        self.told = 0.0


class Fleet:
    def __init__(self, routers, engines, *, exchanges=True):
        self.routers = [Router(n, engines, exchanges=exchanges) for n in range(routers)]
        self.exchanges, self.now = exchanges, 0.0
        self.gone, self.refuses = set(), set()  # the latter are gone, and their looks fail at once
        self.cut = set()  # routers that the others do not hear
        self.counted = [(one.instance.id, deque()) for one in self.routers[0].members]
        self.at = dict(self.counted)  # when each engine was looked at, by whichever router
        self.found = {}  # when a router ejected an engine
        self.back = {}  # when one found it well again

    def run(self, seconds):
        until = self.now + seconds
        while self.now < until:
            for number, router in enumerate(self.routers):
                if number not in self.cut:
                    self._turn(number, router, self.now + router.phase)
            self.now += TICK_S

    def _turn(self, number, router, now):
        for end in sorted(at for at in router.open if at <= now):
            for member, begun, failed in router.open.pop(end):
                self._end(number, router, member, begun, end, failed=failed)
        if self.exchanges and now >= router.told + 1.0:
            router.told = now
            router.looks.expire(now=now)
            self._send(router, router.looks.datagrams(wall=WALL), now)
        for member in router.schedule.next(router.members, now=now):
            name = member.instance.id
            self.at[name].append(now)
            failed = name in self.gone
            takes = TIMEOUT_S if failed and name not in self.refuses else ANSWER_S
            router.open.setdefault(now + takes, []).append((member, now, failed))

    def _end(self, number, router, member, begun, at, *, failed):
        life, name = member.life, member.instance.id
        missed = life.misses
        was_there = life.state is not HealthState.EJECTED
        if failed:
            life.missed("does not answer", now=at)
            if not missed and router.looks.was_missed(name, begun=begun):
                life.missed("nor to another", now=at)
        else:
            life.seen(now=at)
        if (missed == 0) != (life.misses == 0):
            router.looks.note(name, is_missing=missed == 0)
        self._send(router, router.looks.news(wall=WALL), at)
        router.schedule.ended(name, failed=failed, now=at)
        if was_there and life.state is HealthState.EJECTED:
            self.found.setdefault((number, name), at)
        elif not was_there and life.state is HealthState.HEALTHY:
            self.back.setdefault((number, name), at)

    def _send(self, sender, datagrams, now):
        for data in datagrams if self.exchanges else ():
            for number, router in enumerate(self.routers):
                if router is not sender and number not in self.cut:
                    assert router.looks.receive(data, now=now, wall=WALL) is None

    def rate(self, since):
        """Return how many looks the most looked at of the living engines got in a second."""
        return max(sum(at >= since for at in times) for name, times in self.at.items() if name not in self.gone) / (
            self.now - since
        )

    def longest_gap(self, since):
        """Return the longest time without a look at a living engine."""
        gaps = []
        for name, times in self.at.items():
            if name not in self.gone:
                row = [since, *sorted(at for at in times if at >= since), self.now]
                gaps += [b - a for a, b in itertools.pairwise(row)]
        return max(gaps)


def test_each_router_more_is_not_one_more_that_looks_at_every_engine():
    """100 routers looked at each of 1,000 engines: 26 looks a second for each engine. Here 8 routers do, and 24."""
    rates = []
    for routers in (8, 24):
        fleet = Fleet(routers, 20)
        fleet.run(30)
        since = fleet.now
        fleet.run(60)
        rates.append(fleet.rate(since))
        assert fleet.longest_gap(since) <= INTERVAL_S

    # three routers in 3.5 to 4.3 s, and each of the others in 30 to 60 s
    assert rates[0] <= WATCHERS / 3.5 + 5 / 30 + 0.1
    assert rates[1] <= WATCHERS / 3.5 + 21 / 30 + 0.1


def test_without_word_of_each_other_all_look_at_all():
    """The control."""
    fleet = Fleet(24, 12, exchanges=False)
    fleet.run(10)
    since = fleet.now
    fleet.run(20)

    assert fleet.rate(since) >= 24 / 5


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
    fleet.gone, back = set(), fleet.now
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
    since, fleet.cut = fleet.now, {0, 1}
    fleet.run(20)

    assert fleet.longest_gap(since) <= INTERVAL_S
    for member in fleet.routers[2].members:
        assert sum(router.looks.watches(member.instance.id) for router in fleet.routers[2:]) == WATCHERS


def test_up_to_three_routers_look_at_all():
    """Nothing is won by less, and a router sees what its own network does."""
    fleet = Fleet(3, 20)
    fleet.run(5)

    assert all(router.looks.watches(one.instance.id) for router in fleet.routers for one in router.members)


def test_few_engines_have_another_watcher_when_a_router_comes():
    """Consistent hashing: else all routers would look at all engines at once, whenever one starts."""
    fleet, newer = Fleet(15, 100), Fleet(16, 100)
    fleet.run(1.5)
    newer.run(1.5)
    names = [member.instance.id for member in fleet.routers[0].members]

    sides = [[[r.looks.watches(name) for r in one.routers[:15]] for name in names] for one in (fleet, newer)]
    assert sum(a != b for a, b in zip(*sides, strict=True)) <= 100 * 0.6  # 3 of 16 on the mean, by arcs of the ring


class Pair:
    """A router, and another one that tells it something."""

    def __init__(self):
        self.one, self.other = Router(1, 3, exchanges=True), Router(2, 3, exchanges=True)
        self.names = [member.instance.id for member in self.one.members]
        self.hear(self.other.looks.datagrams(wall=WALL), 0.0)
        self.one.looks.news(wall=WALL)
        self.other.looks.receive(self.one.looks.datagrams(wall=WALL)[0], now=0.0, wall=WALL)

    def hear(self, datagrams, now):
        return [self.one.looks.receive(data, now=now, wall=WALL) for data in datagrams]

    def misses(self, *places):
        for place in places:
            self.other.members[place].life.missed("does not answer", now=0.0)


def test_what_is_missing_is_said_every_second_and_what_is_not_said_again_counts_no_more():
    """Datagrams are lost."""
    pair = Pair()
    pair.misses(1)
    pair.hear(pair.other.looks.datagrams(wall=WALL), 1.0)
    said = [pair.one.looks.missed_at(name) for name in pair.names]
    pair.one.looks.expire(now=3.9)
    kept = pair.one.looks.missed_at(pair.names[1])
    pair.one.looks.expire(now=4.1)

    assert said == [None, 1.0, None]
    assert kept == 1.0
    assert pair.one.looks.missed_at(pair.names[1]) is None


def test_the_first_one_that_finds_an_engine_well_again_is_believed():
    """Whoever hears it looks at once, and judges by that."""
    pair = Pair()
    pair.misses(0)
    pair.hear(pair.other.looks.datagrams(wall=WALL), 1.0)
    pair.other.looks.note(pair.names[0], is_missing=False)
    pair.hear(pair.other.looks.news(wall=WALL), 1.5)

    assert pair.one.looks.missed_at(pair.names[0]) is None


def test_a_datagram_that_is_sent_again_says_nothing():
    """Whoever reads the network could keep an engine missing, or a router that has gone on the ring."""
    pair = Pair()
    pair.misses(0)
    datagrams = pair.other.looks.datagrams(wall=WALL)
    first = pair.hear(datagrams, 1.0)
    again = pair.hear(datagrams, 2.0)
    pair.one.looks.expire(now=10.0)

    assert (first, again) == ([None], [DatagramFault.LATE])
    assert pair.hear(datagrams, 11.0) == [DatagramFault.LATE]


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

    assert pair.hear([change(pair.other.looks.datagrams(wall=WALL)[0])], 1.0) == [fault]


def test_a_router_that_has_not_named_this_one_is_not_believed():
    """It may have ended before this one began."""

    class Nobody:
        def admits(self, _router, /, *, now):
            return False

    router = Router(1, 1, exchanges=True)
    stranger = LookExchange(router.registry, b"x" * 8, SECRET, Nobody())
    word = router.looks.datagrams(wall=WALL)[0]

    assert stranger.receive(word, now=0.0, wall=WALL) is DatagramFault.UNKNOWN
