"""Many routers that probe engines beside each other, in virtual time: each with its own schedule and datagrams.

``python -m support.probing_routers`` (in tests/) prints the table of docs/several-routers.md#health-checks; for 100
routers and 1,000 engines that takes some minutes. Other numbers of both may follow the command.
"""

import itertools
import random
import sys
from collections import deque
from statistics import mean

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.probe_schedule import ProbeSchedule
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.peers.core.peer_exchange import PeerExchange
from pdrelay_proxy.features.peers.core.probe_payload import PROBES, ProbePayload
from pdrelay_proxy.settings import Settings
from support.introduced import introduced
from support.next_probes import next_to_probe

TICK_S = 0.25
TIMEOUT_S = 5.0
INTERVAL_S = 5.0
ANSWER_S = 0.05
WALL = 1000.0
SECRET = b"of this fleet"


def after(engine, router):
    """Return where a router comes on the ring that begins at an engine."""
    return router < engine, router


class Router:
    """One router's probing, as io/probes/prober.py does it."""

    def __init__(self, number, engines, *, probes=True):
        dice = random.Random(number)
        self.registry = Registry(Settings(health_check_failures=2))
        for n in range(engines):
            self.registry.add(Role.DECODE, Address("http", f"h{n}", 80), now=0.0)
        self.members = self.registry.members()
        self.name = dice.randbytes(8)
        self.probes = ProbePayload(self.registry, self.name, probes=probes)
        self.exchange = PeerExchange(self.name, SECRET, {PROBES: self.probes})
        self.schedule = ProbeSchedule(INTERVAL_S, dice.random, self.probes)
        self.open = {}  # by when a probe ends
        self.phase = dice.random() * TICK_S
        self.told = 0.0

    def says(self):
        """Return what it tells every second of engines."""
        return self.exchange.sealed(PROBES, self.probes.bodies(), wall=WALL)

    def news(self):
        return self.exchange.sealed(PROBES, self.probes.news(), wall=WALL)


class Fleet:
    """All routers, and what became of each engine; the clock moves by ticks."""

    def __init__(self, routers, engines, *, more=()):
        """``more``: routers that know one engine more than the others."""
        self.routers = [Router(n, engines + (n in more)) for n in range(routers)]
        introduced(*[router.exchange for router in self.routers])
        self.now = 0.0
        self.gone, self.refuses = set(), set()  # the latter are gone, and their probes fail at once
        self.cut = set()  # routers that the others do not hear
        self.at = {  # when each engine was probed, by any router
            one.instance.id: deque() for router in self.routers for one in router.members
        }
        self.found = {}  # when a router ejected an engine
        self.back = {}  # when one found it well again
        self.sizes = deque()  # of the datagrams that each router sent to each other one

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
        if now >= router.told + 1.0:
            router.told = now
            router.exchange.expire(now=now)
            self._introduce(router, now)
            self._send(router, router.says(), now)
        for member in next_to_probe(router.schedule, router.members, now):
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
            if not missed and router.probes.is_second_miss(name, begun=begun):
                life.missed("nor to another", now=at)
        else:
            life.seen(now=at)
        if (missed == 0) != (life.misses == 0):
            router.probes.note(name, is_missing=missed == 0)
        self._send(router, router.news(), at)
        router.schedule.ended(name, failed=failed, now=at)
        if was_there and life.state is HealthState.EJECTED:
            self.found.setdefault((number, name), at)
        elif not was_there and life.state is HealthState.HEALTHY:
            self.back.setdefault((number, name), at)

    def _introduce(self, sender, now):
        data = sender.exchange.introduction(wall=WALL)
        for number, router in enumerate(self.routers):
            if number not in self.cut:
                router.exchange.receive(data, now=now, wall=WALL)

    def _send(self, sender, datagrams, now):
        for data in datagrams:
            self.sizes.append(len(data))
            for number, router in enumerate(self.routers):
                if router is not sender and number not in self.cut:
                    assert router.exchange.receive(data, now=now, wall=WALL) is None

    def rates(self, since):
        """Return how many probes each of the living engines got in a second."""
        return [
            sum(at >= since for at in times) / (self.now - since)
            for name, times in self.at.items()
            if name not in self.gone
        ]

    def longest_gap(self, since):
        """Return the longest time without a probe of a living engine."""
        gaps = []
        for name, times in self.at.items():
            if name not in self.gone:
                row = [since, *sorted(at for at in times if at >= since), self.now]
                gaps += [b - a for a, b in itertools.pairwise(row)]
        return max(gaps)


def main(routers=100, engines=1000):
    """Print the table of the documentation."""
    fleet = Fleet(routers, engines)
    names = [member.instance.id for member in fleet.routers[0].members]
    fleet.run(30)
    since = fleet.now
    fleet.sizes.clear()
    fleet.run(60)
    rates = fleet.rates(since)
    gap = fleet.longest_gap(since)
    sizes = [*fleet.sizes]
    fleet.gone = set(names[: engines // 10])
    lost = fleet.now
    fleet.run(20)
    found = [fleet.found.get((router, name)) for router in range(routers) for name in fleet.gone]
    ejected = "not yet" if None in found else f"{max(found) - lost:.1f} s"
    fleet.gone = fleet.refuses = {names[-1]}
    fleet.run(30)
    fleet.back.clear()
    fleet.gone = set()
    up = fleet.now
    fleet.run(5)
    back = [fleet.back.get((router, names[-1])) for router in range(routers)]
    returned = "not yet" if None in back else f"{max(back) - up:.1f} s"
    rows = {
        f"probes a second of an engine, {routers} routers": f"{mean(rates):.1f} on the mean, {max(rates):.1f} at most",
        "longest time without a probe of an engine that lives": f"{gap:.1f} s",
        f"{engines // 10} of {engines:,} engines are lost: all {routers} routers have found all of them": ejected,
        "an engine that refused connections is up: all routers have found it": returned,
        "datagrams a second from each router to each other one": f"{len(sizes) / 60 / routers:.1f}",
        "bytes of one": f"{mean(sizes):.0f} on the mean, {max(sizes)} at most",
    }
    for what, value in rows.items():
        sys.stdout.write(f"| {what} | {value} |\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
