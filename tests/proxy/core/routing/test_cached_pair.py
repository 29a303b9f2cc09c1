"""The quick choice of two engines is the one that a look at all engines would have brought."""

import itertools
import math
import random
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.departures import Departures
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId, RequestId, Role, RoutingHints, SingleEngineReason
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.core.routing.alone_bound import AloneBound
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.pairing import PolicyPerLeg
from pdrelay_proxy.core.routing.policies.least_loaded import LeastLoaded
from pdrelay_proxy.core.routing.policies.power_of_two import PowerOfTwo
from pdrelay_proxy.core.routing.policies.prefix import Prefix
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.core.routing.policies.session import Session
from pdrelay_proxy.core.routing.prompt_memory import PromptMemory
from pdrelay_proxy.core.schemas import Coordinates, NamedMetrics
from pdrelay_proxy.errors import ProxyError
from pdrelay_proxy.io.request_path.caches import Caches
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet, Loads
from pdrelay_proxy.settings import Settings
from support.searching import examples

LIMITS = Settings(circuit_breaker_failures=2, health_check_failures=2, ejection_time_s=2.0)


def _prefix(load, caches):
    return PolicyPerLeg(
        Prefix(load, LeastLoaded(load), caches), Prefix(load, LeastLoaded(load), caches), decode_first=True
    )


POLICIES = {
    "prefix": _prefix,
    "round robin": lambda *_: RoundRobin(),
    "least loaded": lambda load, _: PolicyPerLeg(LeastLoaded(load), LeastLoaded(load)),
    "two choices": lambda load, _: PolicyPerLeg(
        PowerOfTwo(load, random.Random(1).randrange), PowerOfTwo(load, _second_dice())
    ),
    "session": lambda load, _: PolicyPerLeg(LeastLoaded(load), Session(LeastLoaded(load))),
}
SOME = st.integers(0, 7)  # an engine, by its place
A_ROLE = st.sampled_from(Role)
ASKS = st.builds(
    RoutingHints,
    model=st.sampled_from([None, None, "a", "b"]),
    session=st.sampled_from([None, "s", "t"]),
    prompt=st.sampled_from([b"", b"x" * 300, b"y" * 600]),
    rank=st.sampled_from([None, None, None, 0, 1]),
    again=st.booleans(),
)
FACTS = st.one_of(
    st.just(EngineCapabilities()),
    st.builds(EngineCapabilities, models=st.sampled_from([frozenset("a"), frozenset("ab")])),
    st.builds(EngineCapabilities, version=st.sampled_from("12")),
    st.builds(EngineCapabilities, mode=st.sampled_from(EngineMode)),
    st.builds(EngineCapabilities, revision=st.sampled_from("rs")),
)
ANSWERS = st.sampled_from(
    [None, *(Coordinates(remote_engine_id=name, remote_host="h", remote_port=1, tp_size=1) for name in "xy")]
)


def _second_dice():
    return random.Random(2).randrange


class Side:
    """A fleet, with its own clock."""

    def __init__(self, policy):
        self.now = 0.0
        self.registry = Registry(LIMITS)
        self.learned = PushCoordinates(at_once=True)
        load = Loads(self.registry, self.clock).of
        self.caches = Caches(PromptMemory(60.0, most=30), self.registry, self.clock)
        choice = policy(load, self.caches)
        holder = choice.decode if policy is _prefix else None
        self.pairs = PairSelector(self.registry, GroupChoice(choice, holder), AloneBound(self.registry, self.clock))
        self.fleet = LiveFleet(self.registry, self.pairs, self.learned, self.clock)

    def clock(self):
        return self.now

    def slowly(self, ask):
        """Choose by a look at each engine, with nothing that is remembered of earlier ones."""
        anew = replace(self.pairs, **{name: [] for name in ("_whole", "_parts")}, _snapshots={})
        decodes = self.scratch(Role.DECODE)
        fleet = LiveFleet(self.registry, anew, self.learned, self.clock)
        return fleet.pair(self.scratch(Role.PREFILL), decodes, ask)

    def scratch(self, role):
        """List the engines that may serve, each of which is asked; raises NoInstance."""
        sides = [(member, member.as_role(role)) for member in self.registry.members()]
        found = [one for member, one in sides if one is not None and member.life.may_serve(now=self.now)]
        return found or self.fleet.usable(role)

    def shown(self):
        return [(m.instance.id, m.life.state, m.life.why, m.facts, m.load.in_flight) for m in self.registry.members()]


def outcome(do, *args):
    """Return what a choice brought: two engines, or an error."""
    try:
        return tuple(instance.id for instance in do(*args))
    except ProxyError as error:
        return type(error), str(error)


class Calm(RuleBasedStateMachine):
    """The same happens to two fleets: one chooses as it likes, the other one always looks at all its engines."""

    @initialize(
        name=st.sampled_from(sorted(POLICIES)), prefill=st.integers(1, 4), decode=st.integers(1, 4), often=st.booleans()
    )
    def begin(self, name, prefill, decode, often):
        self.often = often  # requests come between any two events
        self.quick, self.slow = self.sides = Side(POLICIES[name]), Side(POLICIES[name])
        self.requests = itertools.count()
        self.legs = []
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for port in range(count):
                for side in self.sides:
                    side.registry.add(role, Address("http", "h", port + 1), now=side.now)

    def each(self, do):
        """Do it to both, which must bring the same."""
        found = [do(side) for side in self.sides]
        assert found[0] == found[1]
        return found[0]

    def at(self, side, place):
        members = side.registry.members()
        return members[place % len(members)] if members else None

    def have(self, place, do):
        """Do something to both records of an engine, if there is one."""
        for side in self.sides:
            if (member := self.at(side, place)) is not None:
                do(side, member)

    @rule(asks=st.lists(ASKS, min_size=1, max_size=3), times=st.integers(1, 3))
    def choose(self, asks, times):
        for ask in asks * times:
            chosen = self.chosen(ask)
            if isinstance(chosen[0], str):
                request = RequestId(f"r{next(self.requests)}")
                for name in chosen:
                    self.each(lambda side, name=name, request=request: self.send(side, name, request))
                    self.legs.append((name, request))

    def chosen(self, ask):
        """Have both choose, which must bring the same."""
        chosen = outcome(self.quick.fleet.any_pair, ask)
        assert chosen == outcome(self.slow.slowly, ask)
        return chosen

    @rule(ask=ASKS, least=st.sampled_from([0, 100, 400, 5000]), answered=st.booleans())
    def choose_one(self, ask, least, answered):
        """A decode engine serves it alone; one that is said to have nearly all of the prompt is the one chosen."""
        self.each(lambda side: outcome(self.one, side, ask, least, answered))

    def one(self, side, ask, least, answered):
        decodes = side.fleet.usable(Role.DECODE)
        if side is self.quick:
            reason, cached = side.fleet.any_small(ask, least)
        else:
            reason, cached = side.fleet.pairs.small(decodes, ask, least)
        chosen = side.fleet.choose(decodes, ask)
        assert chosen in decodes
        has = side.caches.matched(chosen, ask, is_there=True)
        assert has >= cached or reason is None
        if answered:
            side.caches.answered(chosen, ask, 100)
        assert reason is not SingleEngineReason.CACHED or ask.blocks.size - cached < least
        return [chosen]

    def send(self, side, name, request):
        side.fleet.enter(side.registry.member(name).instance, request)

    @precondition(lambda self: self.legs)
    @rule(place=SOME, failure=st.sampled_from([None, None, *Failure]), answer=ANSWERS)
    def end(self, place, failure, answer):
        name, request = self.legs.pop(place % len(self.legs))
        for side in self.sides:
            if (member := side.registry.get(name)) is None:
                continue
            if failure is None:
                if member.instance.role is Role.PREFILL:
                    side.learned.learn(name, answer)
                side.fleet.all_answered(member.instance, (request,))
            side.fleet.ended(member.instance, request, failure)

    @rule(role=A_ROLE, port=st.integers(1, 5), rank=st.sampled_from([None, None, 0, 1]), facts=FACTS)
    def add(self, role, port, rank, facts):
        address = Address("http", "h", port)
        is_new = not any(
            member.instance.role is role
            and member.instance.address == address
            and not member.retires
            and (rank is None or member.instance.rank in (None, rank))
            for member in self.slow.registry.members()
        )
        found = self.each(lambda side: outcome(self.added, side, role, address, rank, facts))
        assert (len(found) == 1) == is_new

    def added(self, side, role, address, rank, facts):
        return [side.registry.add(role, address, rank=rank, facts=facts, now=side.now)]

    @rule(place=SOME)
    def remove(self, place):
        self.have(place, lambda side, member: side.registry.remove(member.instance.id, now=side.now))

    @rule(place=SOME, retires=st.booleans())
    def drain(self, place, retires):
        how = Departures.retire if retires else Departures.drain
        self.have(place, lambda side, member: how(side.registry.departures, member.instance.id, now=side.now))

    @rule(place=SOME)
    def undrain(self, place):
        def undrained(side):
            member = self.at(side, place)
            side.registry.departures.undrain(member.instance.id, now=side.now)
            return [member.instance]

        if self.slow.registry.members():
            self.each(lambda side: outcome(undrained, side))

    @rule()
    def recover(self):
        """All that can serve again does."""
        for side in self.sides:
            for member in side.registry.members():
                if member.drain is not None and not member.retires:
                    side.registry.departures.undrain(member.instance.id, now=side.now)
                member.life.missed("why", now=side.now)
                member.life.seen(now=side.now)

    @rule(facts=FACTS)
    def join(self, facts):
        """One more of each role."""
        address = Address("http", "h", 100 + next(self.requests))
        for role in Role:
            self.each(lambda side, role=role: self.added(side, role, address, None, facts))

    @rule()
    def settle(self):
        self.each(lambda side: side.registry.settle(patience_s=4.0, now=side.now))

    @rule(place=SOME, facts=FACTS)
    def learn(self, place, facts):
        self.have(place, lambda side, member: side.registry.learn(member.instance.id, facts))

    @rule(place=SOME, silent=st.booleans(), times=st.integers(1, 2))
    def miss(self, place, silent, times):
        for _ in range(times):
            self.have(place, lambda side, member: member.life.missed("why", now=side.now, silent=silent))

    @rule(place=SOME)
    def see(self, place):
        self.have(place, lambda side, member: member.life.seen(now=side.now))

    @rule(place=SOME, failure=st.sampled_from([Failure.UNREACHABLE, Failure.HTTP_5XX, Failure.TIMEOUT]))
    def trip(self, place, failure):
        """As many legs fail as it takes."""
        for number in range(2 * LIMITS.circuit_breaker_failures):
            request = RequestId(f"f{number}")
            self.have(place, lambda side, member, r=request: side.fleet.ended(member.instance, r, failure))

    @rule(place=SOME, waiting=st.integers(0, 4))
    def report(self, place, waiting):
        self.have(place, lambda side, member: member.load.reported(NamedMetrics(float(waiting), 0.5), now=side.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 5.0, 40.0]))
    def wait(self, seconds):
        for side in self.sides:
            side.now += seconds

    @invariant()
    def same(self):
        if hasattr(self, "sides"):
            if self.often:
                self.chosen(RoutingHints())
                self.chosen(RoutingHints(model="a"))
            for role in Role:
                slow = outcome(self.slow.scratch, role)
                assert outcome(self.quick.fleet.usable, role) == slow
            assert self.quick.shown() == self.slow.shown()


TestCalm = Calm.TestCase
TestCalm.settings = settings(max_examples=examples(80), stateful_step_count=25)


def fleet(now=0.0):
    side = Side(POLICIES["round robin"])
    for role in Role:
        for port in (1, 2):
            side.registry.add(role, Address("http", "h", port), now=now)
    return side


def test_no_look_is_needed_until_something_changes():
    """Else there would be no point in it."""
    side = fleet()
    assert side.pairs.quick_pair(RoutingHints()) is None
    side.fleet.any_pair()
    assert side.pairs.quick_pair(RoutingHints()) is not None
    assert side.pairs.quick_pair(RoutingHints(model="a")) is None
    assert side.pairs.quick_pair(RoutingHints(rank=0)) is None

    side.registry.learn(InstanceId("prefill-0"), EngineCapabilities(version="1"))
    assert side.pairs.quick_pair(RoutingHints()) is None
    side.fleet.any_pair()
    side.registry.learn(InstanceId("prefill-0"), EngineCapabilities(version="1"))  # nothing new
    assert side.pairs.quick_pair(RoutingHints()) is not None


def test_who_may_serve_alone_is_remembered_with_the_pairs():
    """Each request is looked at before it is split; an engine that fits no other one may serve alone, too."""
    side = fleet()
    lonely = side.registry.add(Role.DECODE, Address("http", "h", 9), facts=EngineCapabilities(version="2"))
    for member in side.registry.members()[:2]:
        side.registry.learn(member.instance.id, EngineCapabilities(version="1"))
    assert side.pairs.quick_alone(RoutingHints(), 0.0) is None

    side.fleet.any_pair()

    assert list(side.pairs.quick_alone(RoutingHints(), 0.0)) == list(side.fleet.usable(Role.DECODE))
    assert lonely in side.pairs.quick_alone(RoutingHints(), 0.0)
    assert side.pairs.quick_alone(RoutingHints(rank=0), 0.0) is None
    assert side.pairs.quick_alone(RoutingHints(model="a"), 0.0) is None


def test_a_choice_is_remembered_until_time_changes_it():
    """An engine that rests will be tried; until then the choice stands. One that is tried changes with each request."""
    side = fleet()
    assert side.registry.steady_until == math.inf
    life = side.registry.members()[0].life
    for _ in range(LIMITS.circuit_breaker_failures):
        life.failed(RequestId("r"), Failure.UNREACHABLE, now=0.0)
    side.fleet.any_pair()

    assert life.state is HealthState.EJECTED
    assert side.registry.steady_until == LIMITS.ejection_time_s
    assert side.pairs.quick_pair(RoutingHints(), now=LIMITS.ejection_time_s - 0.1) is not None
    assert side.pairs.quick_pair(RoutingHints(), now=LIMITS.ejection_time_s) is None
    side.registry.usable(Role.PREFILL, now=LIMITS.ejection_time_s)
    assert life.state is HealthState.HALF_OPEN
    assert side.pairs.quick_pair(RoutingHints(), now=LIMITS.ejection_time_s) is None


def test_an_engine_that_stays_away_does_not_make_each_request_look_at_all_engines():
    """Hundreds may be gone with their zone for hours."""
    side = fleet()
    life = side.registry.members()[0].life
    life.seen(now=0.0)
    for _ in range(LIMITS.health_check_failures):
        life.missed("cannot be reached", now=0.0)
    side.fleet.any_pair()

    life.missed("cannot be reached", now=90.0)
    assert life.state is HealthState.EJECTED
    assert side.pairs.quick_pair(RoutingHints(), now=99.0) is not None


def test_what_is_remembered_is_bounded():
    """Clients can think of models without end; each still gets what a look would bring."""
    quick, slow = fleet(), fleet()
    for number in [*range(200), *range(200)]:
        ask = RoutingHints(model=f"m{number}")
        assert outcome(quick.fleet.any_pair, ask) == outcome(slow.slowly, ask)
    assert len(quick.pairs._snapshots) <= 64
