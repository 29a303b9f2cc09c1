"""Who is probed when, in virtual time: no engine waits for those that are gone."""

import heapq
import itertools
import random

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.probe_schedule import ProbeSchedule
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Origin
from pdrelay_proxy.core.model import RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.settings import Settings
from support.next_probes import next_to_probe

TICK_S = 0.25
TIMEOUT_S = 5.0
INTERVAL_S = 5.0


class Fleet:
    """Engines that answer after a while, or hold a probe until its timeout; the clock moves by ticks."""

    def __init__(self, count, answer_s=0.05, chance=None):
        self.registry = Registry(Settings(health_check_failures=2))
        for n in range(count):
            self.registry.add(Role.DECODE, Address("http", f"h{n}", 80), now=0.0)
        self.members = self.registry.members()
        self.schedule = ProbeSchedule(INTERVAL_S, chance or random.Random(1).random)
        self.answer_s = answer_s
        self.gone, self.refuses = set(), set()
        self.now, self.most_on = 0.0, 0
        self.open = []
        self.looks = {member.instance.id: [] for member in self.members}
        self.whole = {member.instance.id: [] for member in self.members}
        self.found = {}  # when an engine that is gone was ejected

    def run(self, seconds):
        until = self.now + seconds
        while self.now < until:
            while self.open and self.open[0][0] <= self.now:
                at, name = heapq.heappop(self.open)
                self._end(name, at)
                self._begin(self.schedule.begin(now=at), at)
            self._begin(next_to_probe(self.schedule, self.members, self.now), self.now)
            self.now += TICK_S

    def _begin(self, members, now):
        for member in members:
            name = member.instance.id
            self.looks[name].append(now)
            if self.schedule.is_whole(member, now=now):
                self.whole[name].append(now)
                member.asked_at = now
            takes = 0.001 if name in self.refuses else TIMEOUT_S if name in self.gone else self.answer_s
            heapq.heappush(self.open, (now + takes, name))
        self.most_on = max(self.most_on, len(self.open))

    def _end(self, name, at):
        life = self.registry.member(name).life
        failed = name in self.gone
        if failed:
            life.missed("does not answer", now=at)
        else:
            life.seen(now=at)
        self.schedule.ended(name, failed=failed, now=at)
        if life.state is HealthState.EJECTED:
            self.found.setdefault(name, at)

    def longest_gap(self, name, since):
        times = [since, *(at for at in self.looks[name] if at >= since), self.now]
        return max(b - a for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("chance", [random.Random(1).random, lambda: 1.0], ids=["any jitter", "most jitter"])
@pytest.mark.parametrize("answer_s", [0.05, pytest.param(0.3, marks=pytest.mark.slow)])
def test_a_lost_zone_is_found_and_the_others_are_still_probed(answer_s, chance):
    """200 of 2,000 engines answer nothing any more: with 16 places for all, no living engine was probed for 22 s.

    An interval and two timeouts are the longest until an engine is found; the interval holds for the living ones.
    """
    fleet = Fleet(2000, answer_s, chance)
    fleet.run(12)
    fleet.gone = {member.instance.id for member in fleet.members[:200]}
    lost = fleet.now
    fleet.run(25)

    assert len(fleet.found) == 200
    assert max(fleet.found.values()) - lost <= INTERVAL_S + 2 * TIMEOUT_S
    living = [name for name in fleet.looks if name not in fleet.gone]
    assert max(fleet.longest_gap(name, lost) for name in living) <= INTERVAL_S
    assert fleet.most_on <= 2000 / 6 + 2000 / 8 + 1


@pytest.mark.parametrize("phase", range(20))
def test_it_makes_no_difference_when_engines_are_lost(phase):
    """Just after a probe is the worst: an interval less a moment until the next one begins."""
    fleet = Fleet(60, chance=lambda: 1.0)
    fleet.run(12 + phase * TICK_S)
    fleet.gone = {member.instance.id for member in fleet.members[:6]}
    lost = fleet.now
    fleet.run(25)

    assert len(fleet.found) == 6
    assert max(fleet.found.values()) - lost <= INTERVAL_S + 2 * TIMEOUT_S
    assert max(fleet.longest_gap(name, lost) for name in fleet.looks if name not in fleet.gone) <= INTERVAL_S


def test_engines_that_stay_away_are_asked_less_often():
    """1 s, and up to 15 s; one that comes back is found within that time."""
    fleet = Fleet(20)
    fleet.run(6)
    gone = fleet.members[0].instance.id
    fleet.gone = {gone}
    fleet.run(120)
    late = [b - a for a, b in itertools.pairwise(fleet.looks[gone][-4:])]
    fleet.gone = set()
    back = fleet.now
    fleet.run(20)

    assert late == pytest.approx([15.0] * 3, abs=TICK_S)
    assert fleet.registry.member(gone).life.state is HealthState.HEALTHY
    assert min(at for at in fleet.looks[gone] if at >= back) - back <= 15 + TICK_S


def test_an_engine_that_refuses_is_asked_every_second():
    """It starts, and refuses connections at once: that costs nothing, and it is wanted as soon as it is up."""
    fleet = Fleet(20)
    name = fleet.members[0].instance.id
    fleet.gone = fleet.refuses = {name}
    fleet.run(30)

    assert len(fleet.looks[name]) == pytest.approx(30, abs=3)


def test_many_engines_that_are_away_are_asked_at_a_bounded_rate():
    """A pool of 300 that loads a model refuses for minutes."""
    fleet = Fleet(400)
    fleet.gone = fleet.refuses = {member.instance.id for member in fleet.members[:300]}
    fleet.run(30)
    before = sum(len(fleet.looks[name]) for name in fleet.gone)
    fleet.run(30)

    assert (sum(len(fleet.looks[name]) for name in fleet.gone) - before) / 30 <= 25


def test_a_fleet_is_not_probed_in_one_moment():
    """At the start all engines are due."""
    fleet = Fleet(2000)
    fleet.run(TICK_S)
    first = fleet.most_on
    fleet.run(INTERVAL_S)

    assert first <= 600
    assert all(fleet.looks.values())


def test_each_probe_of_a_small_fleet_is_whole():
    """A LoRA adapter that was loaded, or another process at the address, is known with the next probe."""
    fleet = Fleet(100)
    fleet.run(30)

    assert fleet.whole == fleet.looks


@pytest.mark.slow  # 2,000 engines are looked at for five minutes
def test_whole_probes_of_a_large_fleet_have_a_bounded_rate():
    """Each engine is asked what it is within a minute, and not all of them in the same seconds."""
    fleet = Fleet(2000)
    fleet.run(300)

    times = sorted(at for found in fleet.whole.values() for at in found)
    late = [at for at in times if at >= 150]
    assert len(late) / 150 == pytest.approx(50, rel=0.15)
    assert max(sum(begun <= at < begun + 5 for at in late) for begun in range(150, 296, 5)) < 2 * 5 * 50
    gaps = [b - a for found in fleet.whole.values() for a, b in itertools.pairwise(found)]
    assert max(gaps) <= 1.5 * 2000 / 50 + INTERVAL_S


def test_an_engine_that_missed_a_probe_is_asked_what_it_is():
    """It may be another process by now, with another model."""
    fleet = Fleet(2000)
    fleet.run(12)
    name = fleet.members[7].instance.id
    fleet.refuses = fleet.gone = {name}
    fleet.run(6)
    fleet.gone = set()
    back = fleet.now
    fleet.run(6)

    assert min(at for at in fleet.looks[name] if at >= back) in fleet.whole[name]


def pauses(fleet, name):
    """Return the seconds between the latest probes of an engine."""
    return [after - before for before, after in itertools.pairwise(fleet.looks[name])][-3:]


def test_an_engine_that_answers_requests_is_not_probed_meanwhile():
    """A request is as good a probe; once in 30 s it is asked all the same, as its models may have changed."""
    fleet = Fleet(2)
    busy, idle = fleet.members
    fleet.run(20)
    for _ in range(140):
        busy.life.succeeded([RequestId("r")], fleet.now)
        fleet.run(1)

    assert min(pauses(fleet, busy.instance.id)) > 6 * INTERVAL_S - 2 * TICK_S
    assert max(pauses(fleet, busy.instance.id)) < 6 * INTERVAL_S + 2 * TICK_S
    assert max(pauses(fleet, idle.instance.id)) < INTERVAL_S


def test_an_engine_whose_requests_end_is_probed_within_an_interval_again():
    """It may have died with them."""
    fleet = Fleet(1)
    (member,) = fleet.members
    fleet.run(10)
    for _ in range(8):
        fleet.run(1)
        member.life.succeeded([RequestId("r")], fleet.now)
    ended = fleet.now
    fleet.run(INTERVAL_S)

    assert ended < fleet.looks[member.instance.id][-1] <= ended + INTERVAL_S


def test_a_request_that_fails_has_its_engine_probed_as_usual():
    """However many it has answered before."""
    fleet = Fleet(1)
    (member,) = fleet.members
    fleet.run(10)
    for _ in range(10):
        fleet.run(1)
        member.life.succeeded([RequestId("r")], fleet.now)
    member.life.failed(RequestId("r"), Failure.TIMEOUT, now=fleet.now)
    failed = fleet.now
    fleet.run(2)

    assert failed <= fleet.looks[member.instance.id][-1] <= failed + 2 * TICK_S


def test_a_ready_pod_without_requests_is_probed_seldom():
    """The kubelet probes it, and a pod that is not Ready gets no requests; with requests it may hang, and hold them."""
    fleet = Fleet(2)
    idle, busy = fleet.members
    for member in fleet.members:
        member.origin = Origin(EngineSource.PODS)
    busy.load.enter(RequestId("r"))
    fleet.run(120)

    assert (
        2 * INTERVAL_S < min(pauses(fleet, idle.instance.id)) <= max(pauses(fleet, idle.instance.id)) < 3 * INTERVAL_S
    )
    assert max(pauses(fleet, busy.instance.id)) < INTERVAL_S


def test_an_engine_that_is_removed_as_its_probe_begins_is_no_mistake():
    """Its probe waited for a place, and other probes end in the same moment as the next glance."""
    fleet = Fleet(1)
    (member,) = next_to_probe(fleet.schedule, fleet.members, 0.0)
    fleet.schedule.know([])

    assert not fleet.schedule.is_whole(member, now=0.0)
    fleet.schedule.ended(member.instance.id, failed=False, now=0.1)
    assert next_to_probe(fleet.schedule, fleet.members, 0.2) == [member]
