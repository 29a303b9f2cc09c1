"""Rolling updates of pools of unequal sizes, whose pods take unequally long to start: no engine gets far too much."""

import itertools
import random
from collections import Counter, deque

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, fit
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role, RoutingHints
from pdrelay_proxy.core.routing.pairing import PairSelector, PolicyPerLeg
from pdrelay_proxy.core.routing.policies.expected_ttft import ExpectedTtft
from pdrelay_proxy.core.routing.policies.least_loaded import LeastLoaded
from pdrelay_proxy.core.routing.policies.prefix import Prefix
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.core.routing.policies.session import Session
from pdrelay_proxy.core.routing.prompt_memory import PromptMemory
from pdrelay_proxy.core.routing.share_bound import BURST, EACH, ShareBounds
from pdrelay_proxy.io.request_path.engine_costs import EngineCosts
from pdrelay_proxy.io.request_path.live_fleet import Caches, LiveFleet, Loads

POOLS = [(4, 16), (16, 4)]
STARTUPS = [(1.0, 1.0), (1.0, 4.0), (4.0, 1.0)]  # how long a pod of each role takes
FACTS = {name: EngineCapabilities(version="1", revision=name) for name in ("v1", "v2")}
LOYAL = ("session", "prefix", "expected_ttft")  # send an engine more than others for what it has
IN_FLIGHT = 40  # requests at a time
SESSIONS = 4000


def events(count, startup):
    """List when a pod of a pool comes and when one goes, by a Deployment that surges by one."""
    return [
        (at, what) for n in range(count) for at, what in ((startup * (n + 1), "come"), (startup * (n + 1) + 0.1, "go"))
    ]


class Rollout:
    """A fleet on its way from v1 to v2."""

    def __init__(self, policy, sizes, startups, *, is_bound=True):
        self.policy = policy
        self.registry = Registry()
        load = Loads(self.registry, lambda: 0.0).of
        self.caches = Caches(PromptMemory(1e9), self.registry, lambda: 0.0)
        prefix = Prefix(load, LeastLoaded(load), self.caches)
        costs = EngineCosts(self.registry, self.caches, lambda: 0.0, weight=4.0, itl_most_s=None)
        expected = ExpectedTtft(costs, random.Random(0).randrange)
        self.choice = {
            "round_robin": RoundRobin(),
            "least_loaded": PolicyPerLeg(LeastLoaded(load), LeastLoaded(load)),
            "session": PolicyPerLeg(LeastLoaded(load), Session(LeastLoaded(load))),
            "prefix": PolicyPerLeg(LeastLoaded(load), prefix, decode_first=True),
            "expected_ttft": expected,
        }[policy]
        holder = {"prefix": prefix, "expected_ttft": expected}.get(policy)
        self.costs = costs if policy == "expected_ttft" else None
        bounds = ShareBounds(self.registry) if is_bound and policy in LOYAL else None
        self.pairs = PairSelector(self.registry, self.choice, holder, bounds=bounds)
        self.fleet = LiveFleet(self.registry, self.pairs, PushCoordinates(at_once=True), lambda: 0.0, costs=self.costs)
        self.sizes, self.ports, self.requests = sizes, itertools.count(1), itertools.count()
        self.old = {role: [self._add(role, "v1") for _ in range(n)] for role, n in zip(Role, sizes, strict=True)}
        self.events = sorted(
            (at, what, role)
            for role, n, startup in zip(Role, sizes, startups, strict=True)
            for at, what in events(n, startup)
        )
        self.open = deque()

    def steps(self):
        """Let one pod come or go after the other."""
        yield
        for _, what, role in self.events:
            if what == "come":
                self._add(role, "v2")
            else:
                self.registry.remove(self.old[role].pop(0).id, now=0.0)
            yield

    def ask(self):
        """Say what the next request is like: one of many conversations."""
        number = next(self.requests) % SESSIONS
        session = f"session {number}" if self.policy == "session" else None  # else no policy asks for it
        return RoutingHints("m", session, b"%d " % number + b"x" * 400)

    def serve(self, chosen, ask):
        """Have the engines serve a request; the oldest one ends."""
        request = RequestId(str(next(self.requests)))
        for instance in chosen if self.costs is not None else ():
            if instance is not None:
                self.costs.sent(instance, request, ask, computes=chosen[0] in (instance, None))
        engines = [instance for instance in chosen if instance is not None]
        self.open.append((engines, request))
        for instance in engines:
            self.fleet.enter(instance, request)
        if len(self.open) > IN_FLIGHT:
            engines, request = self.open.popleft()
            for instance in engines:
                self.fleet.leave(instance, request)

    def _add(self, role, revision):
        return self.registry.add(role, Address("http", "h", next(self.ports)), facts=FACTS[revision], now=0.0)


def worst(counts, rollout):
    """Return how many times its fair share the busiest engine got."""
    sides = [rollout.fleet.usable(role) for role in Role]
    requests = max(sum(counts[one.id] for one in side) for side in sides)
    return max(counts[one.id] * len(side) / requests for side in sides for one in side)


def run(rollout, choose, requests):
    """Return the worst factor of each step, and how many requests of all were served alone."""
    found, alone = [], 0
    for _ in rollout.steps():
        counts, choose_now = Counter(), choose(rollout)
        for _ in range(requests):
            ask = rollout.ask()
            chosen = choose_now(ask)
            rollout.serve(chosen, ask)
            engines = [instance for instance in chosen if instance is not None]
            counts.update(instance.id for instance in engines)
            alone += len(engines) == 1
            assert len({rollout.registry.facts(instance).revision for instance in engines}) == 1  # no mixed pair
        found.append(worst(counts, rollout))
    return found, alone / requests / len(found)


def by_weight(rollout, *, may_be_alone=True):
    """Choose as the router does."""
    return lambda ask: rollout.fleet.any_pair(ask, may_be_alone=may_be_alone)


def by_prefill(rollout):
    """Choose the prefill engine first, whichever revision it is of; the decode engine among those that fit it."""
    facts = rollout.registry.facts
    sides = [rollout.fleet.usable(role) for role in Role]

    def fits(p, d):
        return fit(facts(p), facts(d))

    prefill = [p for p in sides[0] if any(fits(p, d) for d in sides[1])]
    decode = [d for d in sides[1] if any(fits(p, d) for p in prefill)]
    return lambda ask: rollout.choice.pair(prefill, decode, ask, fits)


def named(value):
    return "to".join(f"{one:g}" for one in value)


@pytest.mark.parametrize("sizes", POOLS, ids=named)
@pytest.mark.parametrize("startups", STARTUPS, ids=named)
@pytest.mark.parametrize(("policy", "requests"), [("round_robin", 400), ("least_loaded", 1600)])
@pytest.mark.slow  # thousands of choices for each policy
def test_no_engine_gets_far_more_than_its_share(policy, requests, sizes, startups):
    """Without this, 12 of 16 old decode engines idle, and the 4 new ones get 4 times as much."""
    found, alone = run(Rollout(policy, sizes, startups), by_weight, requests)

    assert max(found) <= 1.5
    assert alone < 0.5


def beyond(rollout, requests):
    """Return how many requests the busiest engine gets beyond its bound, of those that find it with another one."""
    counts = Counter()
    for _ in range(requests):
        ask = rollout.ask()
        chosen = rollout.fleet.any_pair(ask, may_be_alone=True)
        engines = [instance for instance in chosen if instance is not None]
        counts.update(one.id for one in engines if rollout.registry.get(one.id).load.in_flight)
        rollout.serve(chosen, ask)
        assert len({rollout.registry.facts(instance).revision for instance in engines}) == 1  # no mixed pair
    sides = [rollout.fleet.usable(role) for role in Role]
    return max(counts[one.id] - EACH * requests / len(side) for side in sides for one in side)


def is_mixed(rollout):
    return len({rollout.registry.facts(one).revision for role in Role for one in rollout.fleet.usable(role)}) > 1


@pytest.mark.parametrize("sizes", POOLS, ids=named)
@pytest.mark.parametrize("policy", LOYAL)
@pytest.mark.slow  # the same
def test_caches_and_sessions_do_not_overload_an_engine_at_any_step(policy, sizes):
    """Hashes are uneven and caches have slack: without a bound for each engine, one gets 1.8 to 2.7 times its share."""
    rollout = Rollout(policy, sizes, STARTUPS[0])

    requests = 120 if policy == "expected_ttft" else 240
    found = [beyond(rollout, requests) for _ in rollout.steps() if is_mixed(rollout)]

    assert len(found) > 30
    assert max(found) <= BURST


@pytest.mark.parametrize("sizes", POOLS, ids=named)
@pytest.mark.parametrize("policy", LOYAL)
@pytest.mark.parametrize("startups", [STARTUPS[0], pytest.param(STARTUPS[1], marks=pytest.mark.thorough)], ids=named)
@pytest.mark.slow  # the same
def test_an_engine_gets_at_most_one_and_a_half_times_its_share(policy, sizes, startups):
    """The same where a step takes long enough that the burst is little: 160 requests for each engine on the mean."""
    rollout = Rollout(policy, sizes, startups)
    found = []
    for step, _ in enumerate(rollout.steps()):
        if is_mixed(rollout) and step % 12 == 4:
            counts = Counter()
            for _ in range(160 * max(sizes)):
                ask = rollout.ask()
                chosen = rollout.fleet.any_pair(ask, may_be_alone=True)
                rollout.serve(chosen, ask)
                counts.update(one.id for one in chosen if one is not None)
            found.append(worst(counts, rollout))

    assert len(found) == 3
    assert max(found) <= 1.5


@pytest.mark.parametrize("policy", LOYAL)
def test_without_the_bound_one_engine_gets_too_much(policy):
    """The control: what these policies do by themselves."""
    found, _ = run(Rollout(policy, (4, 16), STARTUPS[0], is_bound=False), by_weight, 160)

    assert max(found) >= 1.7


def test_most_sessions_stay_where_they_are_in_the_middle_of_a_rollout():
    """An engine that gets too much leaves a few of its requests to another, always the same one for a session."""
    rollout, last, moved = Rollout("session", (4, 16), STARTUPS[0]), {}, 0
    steps = rollout.steps()
    for _ in range(9):
        next(steps)
    rng = random.Random(1)
    for _ in range(8000):
        ask = RoutingHints("m", f"session {rng.randrange(500)}")
        chosen = rollout.fleet.any_pair(ask, may_be_alone=True)
        rollout.serve(chosen, ask)
        moved += last.get(ask.session, chosen[1]) is not chosen[1]
        last[ask.session] = chosen[1]

    assert is_mixed(rollout)
    assert 0 < moved < 0.06 * 8000


@pytest.mark.parametrize("sizes", POOLS, ids=named)
def test_the_prefill_engine_first_is_what_overloads(sizes):
    """The control: the same rollout, and the prefill engine chosen before the revision, as the router once did."""
    found, _ = run(Rollout("round_robin", sizes, STARTUPS[0]), by_prefill, 200)

    assert max(found) >= 3.5


def test_sessions_move_only_as_the_weights_do():
    """Half of the fleet is new: half of the sessions stay where they were, and none moves between old engines."""
    rollout = Rollout("session", (4, 4), STARTUPS[0])
    steps = rollout.steps()
    next(steps)
    asks = [RoutingHints("m", f"session {number}") for number in range(400)]
    before = [rollout.fleet.any_pair(ask)[1] for ask in asks]
    for role in Role:
        for _ in range(4):
            rollout._add(role, "v2")
    after = [rollout.fleet.any_pair(ask)[1] for ask in asks]

    moved = [new for old, new in zip(before, after, strict=True) if old is not new]
    assert 150 < len(moved) < 250
    assert {rollout.registry.facts(instance).revision for instance in moved} == {"v2"}


@pytest.mark.parametrize("policy", ["prefix", "expected_ttft"])
def test_a_cached_prompt_stays_at_its_revision(policy):
    """A rollout does not empty the caches of the engines that are still there."""
    rollout = Rollout(policy, (2, 2), STARTUPS[0])
    steps = rollout.steps()
    next(steps)
    ask = RoutingHints("m", prompt=b"y" * 4000)
    chosen = rollout.fleet.any_pair(ask)
    rollout.serve(chosen, ask)
    for role in Role:
        rollout._add(role, "v2")

    found = [rollout.fleet.any_pair(ask)[1] for _ in range(4)]
    assert {rollout.registry.facts(one).revision for one in found} == {"v1"}
    assert policy == "expected_ttft" or {one.id for one in found} == {chosen[1].id}  # else loads count, too
