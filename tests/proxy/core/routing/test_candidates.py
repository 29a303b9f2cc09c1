"""What engines come down to after any changes is what a first look at them would bring."""

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.pair_health import PairFailure
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import EngineRole, RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.core.routing.candidates import Candidates
from pdrelay_proxy.errors import NoInstance, ProxyError
from pdrelay_proxy.settings import Settings, SlicePairing
from support.searching import examples

LIMITS = {"circuit_breaker_failures": 1, "ejection_time_s": 2.0, "pair_failures": 1, "health_check_failures": 2}
ASKS = [RoutingHints(model, rank=rank) for model, rank in [(None, None), ("a", None), ("b", None), (None, 0)]]
PLACE = st.integers(0, 11)
FACTS = st.builds(
    EngineCapabilities,
    models=st.sampled_from([None, frozenset("a"), frozenset("ab"), frozenset("b")]),
    version=st.sampled_from([None, None, "1", "2"]),
    mode=st.sampled_from([None, None, EngineMode.PULL, EngineMode.PUSH]),
    engine_id=st.sampled_from([None, "x", "y"]),
    incompatible=st.sampled_from([None, None, frozenset("x"), frozenset("xy")]),
    slice=st.sampled_from([None, "z1", "z2"]),
)
EVENTS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(Role), st.sampled_from(["", "#revision=r", "#slice=z1", "#dp=2"])),
    st.tuples(st.just("remove"), PLACE),
    st.tuples(st.just("drain"), PLACE),
    st.tuples(st.just("undrain"), PLACE),
    st.tuples(st.just("learn"), PLACE, FACTS),
    st.tuples(st.just("fail"), PLACE),
    st.tuples(st.just("see"), PLACE),
    st.tuples(st.just("miss"), PLACE),
    st.tuples(st.just("turn"), PLACE, st.sampled_from(EngineRole)),
    st.tuples(st.just("rest"), PLACE, PLACE),
    st.tuples(st.just("work"), PLACE, PLACE),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0])),
)


class World:
    """A fleet, and what happens to its engines."""

    def __init__(self, slice_pairing):
        self.now, self.ports = 0.0, itertools.count(1)
        self.registry = Registry(Settings(slice_pairing=slice_pairing, **LIMITS))

    def add(self, role, fragment):
        target = Target.parse(f"http://h:{next(self.ports)}{fragment}")
        self.registry.add_target(role, target, now=self.now)

    def at(self, place):
        members = self.registry.members()
        return members[place % len(members)] if members else None

    def happens(self, event, *about):
        """Have something happen to the fleet, or to one of its engines, if there is one."""
        if event == "add":
            self.add(*about)
        elif event == "wait":
            self.now += about[0]
        elif (member := self.at(about[0])) is not None:
            with contextlib.suppress(ProxyError):  # it cannot turn, or another one is at its address
                getattr(self, event)(member, *about[1:])

    def remove(self, member):
        self.registry.remove(member.instance.id, now=self.now)

    def drain(self, member):
        self.registry.drain(member.instance.id, now=self.now)

    def undrain(self, member):
        self.registry.undrain(member.instance.id, now=self.now)

    def learn(self, member, facts):
        self.registry.learn(member.instance.id, facts)

    def fail(self, member):
        member.life.failed(RequestId("r"), Failure.UNREACHABLE, now=self.now)

    def see(self, member):
        member.life.seen(now=self.now)

    def miss(self, member):
        member.life.missed("why", now=self.now)

    def turn(self, member, to):
        self.registry.turn(member.instance.id, to, now=self.now, at_once=True)

    def rest(self, member, place):
        pair = member.instance.id, self.at(place).instance.id
        self.registry.pairs.failed(pair, PairFailure.HANDSHAKE, 1, now=self.now)
        self.registry.settle_rests(pair[1])

    def work(self, member, place):
        pair = member.instance.id, self.at(place).instance.id
        self.registry.pairs.worked(pair)
        self.registry.settle_rests(pair[1])

    def usable(self):
        """List the engines that may serve; None: there are none of a role."""
        try:
            return [self.registry.usable(role, now=self.now) for role in Role]
        except NoInstance:
            return None


def outcome(candidates, ask, *, may_be_alone):
    """Return all that a choice may depend on, in comparable form."""
    try:
        found = candidates.narrowed(ask, may_be_alone=may_be_alone)
    except ProxyError as error:
        return type(error), str(error)
    shares = [None if each is None else listed(each) for each in (found.shares, found.shares_alone)]
    sides = [[*side] for side in (found.prefill, found.decode, found.alone)]
    names = {one.id for side in sides for one in side}
    rates = {alone: (len(each), {name: each.get(name) for name in names}) for alone, each in found.rates.items()}
    return sides, found.all_fit, shares, rates


def listed(shares):
    parts = [
        (group.name, [*group.prefill], [*group.decode], group.prefill_count, group.all_fit, alone, weight, limit)
        for group, alone, weight, limit in [(one.group, one.alone, one.weight, one.limit) for one in shares.all]
    ]
    names = {name: share.group.name for name, share in shares.by_engine.items()}
    return parts, shares.upto, shares.limits, names, shares.prefill, shares.decode, shares.prefills, shares.decodes


@pytest.mark.parametrize("slice_pairing", SlicePairing)
@settings(max_examples=examples(150))
@given(
    start=st.lists(st.tuples(st.sampled_from(Role), FACTS), min_size=2, max_size=10),
    events=st.lists(st.tuples(EVENTS, st.sets(st.integers(0, len(ASKS) - 1)), st.booleans()), max_size=30),
    is_bound=st.booleans(),
)
def test_what_was_moved_on_is_what_a_first_look_brings(slice_pairing, start, events, is_bound):
    """Whatever has happened in between, and for whichever models it was asked meanwhile."""
    world, before = World(slice_pairing), None
    for role, facts in start:
        world.add(role, "")
        world.learn(world.registry.members()[-1], facts)
    for event, asked, may_be_alone in events:
        world.happens(*event)
        usable = world.usable()
        if usable is None:
            continue
        moved = Candidates(world.registry, *usable, before, is_bound=is_bound)
        for number in asked:
            anew = Candidates(world.registry, *usable, is_bound=is_bound)
            assert outcome(moved, ASKS[number], may_be_alone=may_be_alone) == outcome(
                anew, ASKS[number], may_be_alone=may_be_alone
            )
        before = moved


@given(st.lists(st.tuples(EVENTS, st.booleans()), max_size=40))
def test_who_is_usable_is_what_asking_each_engine_brings(events):
    """The registry keeps lists of who serves a role; they are in the order in which engines were added."""
    world = World(SlicePairing.OFF)
    for event, asked in events:
        world.happens(*event)
        if not asked:
            continue
        for role in Role:
            rows = [(member, member.as_role(role)) for member in world.registry.members()]
            expected = [one for member, one in rows if one is not None and member.life.may_serve(now=world.now)]
            assert [*world.registry.known(role)] == [one for _, one in rows if one is not None]
            if expected:
                assert [*world.registry.usable(role, now=world.now)] == expected
        lives = [member.life for member in world.registry.members()]
        assert world.registry.steady_until == min([life.steady_until for life in lives], default=float("inf"))


def rollout(revisions, count=60):
    """A registry of so many engines of each role, of several revisions."""
    registry = Registry()
    for role in Role:
        for number in range(count):
            facts = EngineCapabilities(frozenset("m"), "1", revision=f"r{number % revisions}")
            one = registry.add(role, Address("http", "h", number + 1), facts=facts)
            registry.member(one.id).life.seen(now=0.0)
    return registry


def groups_of(candidates):
    return {
        share.group.name: share.group for share in candidates.narrowed(RoutingHints(), may_be_alone=False).shares.all
    }


def test_a_change_of_one_engine_is_one_of_its_group_alone():
    """The lists of the other groups are the same ones, and no kinds are compared again."""
    registry = rollout(6)
    before = Candidates(registry, *[registry.usable(role) for role in Role], is_bound=True)
    old = groups_of(before)
    registry.drain(registry.known(Role.DECODE)[2].id, now=0.0)
    after = Candidates(registry, *[registry.usable(role) for role in Role], before, is_bound=True)
    new = groups_of(after)

    assert {name for name in old if new[name].decode is not old[name].decode} == {"revision r2, version 1"}
    assert all(new[name].prefill is old[name].prefill for name in old if name != "revision r2, version 1")
    assert after.latest.popitem()[1].groups.grouping.comparisons == 0


def test_a_change_that_is_none_of_a_models_leaves_what_it_comes_down_to():
    """Hundreds of models may share a router: each change would cost as many looks."""
    registry = rollout(2)
    other = registry.add(Role.DECODE, Address("http", "h", 99), facts=EngineCapabilities(frozenset("other")))
    before = Candidates(registry, *[registry.usable(role) for role in Role], is_bound=True)
    old = before.narrowed(RoutingHints("m"), may_be_alone=False)
    registry.remove(other.id, now=0.0)
    after = Candidates(registry, *[registry.usable(role) for role in Role], before, is_bound=True)

    assert after.narrowed(RoutingHints("m"), may_be_alone=False) is old
