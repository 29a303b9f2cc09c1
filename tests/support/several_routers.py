"""Several routers before one set of engines, in virtual time: their own policies, loads and datagrams, and no network.

Engines serve one prompt at a time, in the order of arrival. A request is for any of the routers by chance, as behind a
load balancer. What a router sends takes ``delay_s`` to an engine, back, or to another router.
``python -m support.several_routers`` (in tests/) prints the table of docs/several-routers.md.
"""

import heapq
import random
import sys
from itertools import count

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role
from pdrelay_proxy.core.routing.policies.least_loaded import LeastLoaded
from pdrelay_proxy.core.routing.policies.power_of_two import PowerOfTwo
from pdrelay_proxy.core.routing.policies.round_robin import Rotation, RoundRobin
from pdrelay_proxy.core.schemas import NamedMetrics
from pdrelay_proxy.features.peers.core.load_payload import LOADS, LoadPayload, SendPace
from pdrelay_proxy.features.peers.core.peer_exchange import PeerExchange
from pdrelay_proxy.io.request_path.live_fleet import Loads
from support.introduced import introduced

SERVICE_S = 0.1
POLICIES = {
    "round_robin": lambda _, turn, __: RoundRobin(Rotation(turn), Rotation(turn)),
    "least_loaded": lambda load, turn, _: LeastLoaded(load, turn),
    "power_of_two": lambda load, _, dice: PowerOfTwo(load, dice.randrange),
}


class OneRouter:
    """What one router knows."""

    def __init__(self, number, policy, engines, clock, dice, *, exchanges):
        self.registry = Registry()
        self.instances = [self.registry.add(Role.PREFILL, Address("http", f"p{i}", 8000)) for i in range(engines)]
        self.place = {instance.id: place for place, instance in enumerate(self.instances)}
        self.loads = LoadPayload(self.registry)
        self.exchange = PeerExchange(number.to_bytes(8, "big"), b"s", {LOADS: self.loads}) if exchanges else None
        self.policy = POLICIES[policy](Loads(self.registry, clock).of, dice.randrange(1 << 16), dice)
        self.pace = SendPace()
        self.is_waiting = False

    def load(self, place):
        return self.registry.member(self.instances[place].id).load


class SimulatedFleet:
    """The routers, the engines, and what happens next."""

    def __init__(self, routers, policy, *, engines, busy, seed, delay_s, lost, exchanges, reports, draw):
        self.dice = random.Random(f"{routers} {policy} {seed}")
        self.traffic = random.Random(seed)  # the same for any number of routers, so that their waits compare
        self.lost = lost
        self.rate = engines * busy / SERVICE_S  # of arrivals a second
        self.draw = draw or (lambda: self.traffic.expovariate(1 / SERVICE_S))
        self.delay_s, self.reports = delay_s, reports
        self.now, self.events, self.order, self.waits = 0.0, [], count(), []
        self.free_at = [0.0] * engines
        self.present = [0] * engines  # requests at an engine
        self.routers = [
            OneRouter(number, policy, engines, lambda: self.now, self.dice, exchanges=exchanges)
            for number in range(routers)
        ]
        if exchanges:
            introduced(*[router.exchange for router in self.routers], wall=0.0)

    def run(self, requests):
        """Serve so many, and return how long each waited at its engine."""
        self.at(0.0, self.arrive, 0, requests)
        while self.events:
            self.now, _, act, given = heapq.heappop(self.events)
            act(*given)
        return self.waits

    def at(self, when, act, *given):
        heapq.heappush(self.events, (when, next(self.order), act, given))

    def arrive(self, number, requests):
        router = self.dice.choice(self.routers)
        service_s = self.draw()
        place = router.place[router.policy.choose(router.instances).id]
        router.load(place).enter(RequestId(str(number)))
        self.changed(router, place)
        self.at(self.now + self.delay_s, self.queue, router, place, number, service_s)
        if number + 1 < requests:
            self.at(self.now + self.traffic.expovariate(self.rate), self.arrive, number + 1, requests)

    def queue(self, router, place, number, service_s):
        begin = max(self.now, self.free_at[place])
        self.waits.append(begin - self.now)
        self.free_at[place] = begin + service_s
        self.present[place] += 1
        self.at(self.free_at[place], self.finish, router, place, number)

    def finish(self, router, place, number):
        self.present[place] -= 1
        waiting = max(0, self.present[place] - 1)  # the next one runs
        self.at(self.now + self.delay_s, self.answer, router, place, number, waiting)

    def answer(self, router, place, number, waiting):
        if self.reports:
            router.load(place).reported(NamedMetrics(waiting, 0.0), now=self.now)
        router.load(place).leave(RequestId(str(number)))
        self.changed(router, place)

    def changed(self, router, place):
        if router.exchange is not None:
            router.loads.note(router.instances[place].id)
            if not router.is_waiting:
                router.is_waiting = True
                self.at(router.pace.due(now=self.now), self.send, router)

    def send(self, router):
        router.is_waiting = False
        datagrams = router.exchange.sealed(LOADS, router.loads.bodies(now=self.now), wall=self.now)
        router.pace.note_sent(len(datagrams) * (len(self.routers) - 1), now=self.now)
        for data in datagrams:
            self.at(self.now + self.delay_s, self.hear, router, data)

    def hear(self, sender, data):
        for router in self.routers:
            if router is not sender and self.dice.random() >= self.lost:
                assert router.exchange.receive(data, now=self.now, wall=self.now) is None


def waits(
    *,
    routers,
    policy,
    engines=32,
    busy=0.7,
    requests=20_000,
    seed=1,
    delay_s=0.0002,
    lost=0.0,
    exchanges=False,
    draw=None,
):
    """Return how long each request waited at its engine, but for the first tenth.

    ``lost``: the share of datagrams that do not arrive. ``exchanges``: the routers tell each other of their requests,
    and engines report nothing.
    """
    fleet = SimulatedFleet(
        routers,
        policy,
        engines=engines,
        busy=busy,
        seed=seed,
        delay_s=delay_s,
        lost=lost,
        exchanges=exchanges,
        reports=not exchanges,
        draw=draw,
    )
    return fleet.run(requests)[requests // 10 :]


def mean_and_p95(found):
    """Return both, in milliseconds."""
    return 1e3 * sum(found) / len(found), 1e3 * sorted(found)[int(0.95 * len(found))]


if __name__ == "__main__":
    counts = (1, 2, 4, 16, 64)
    sys.stdout.write(f"| policy | {' | '.join(map(str, counts))} |\n")
    for name, exchanges in ((name, exchanges) for name in POLICIES for exchanges in (False, True)):
        if exchanges and name == "round_robin":
            continue
        row = [mean_and_p95(waits(routers=each, policy=name, exchanges=exchanges)) for each in counts]
        cells = " | ".join(f"{mean:.0f} / {p95:.0f}" for mean, p95 in row)
        sys.stdout.write(f"| `{name}`{', `--peers`' if exchanges else ''} | {cells} |\n")
