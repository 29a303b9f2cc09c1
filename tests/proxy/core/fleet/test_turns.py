"""Engines that turn: what they serve, when, and what is true of them afterwards."""

import itertools
from operator import attrgetter

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.fleet.turns import TRANSITIONS, TURN_TIMEOUT_S, RoleTurn, TurnEvent, TurnState
from pdrelay_proxy.core.model import EngineRole, InstanceId, RequestId, Role
from pdrelay_proxy.core.routing.compatible_groups import group_engines
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.errors import AlreadyKnown, CannotTurn, NoInstance, NoMatchingInstance, UnknownInstance
from pdrelay_proxy.settings import Settings
from support.searching import examples

PREFILL, DECODE, BOTH = EngineRole
REQUEST = RequestId("r")
DEPARTURES = ["departures.drain", "departures.undrain", "departures.retire"]


def registry_of(x, y, **options):
    """Engines p0, p1, ... and d0, d1, ..."""
    registry = Registry(Settings(**options))
    for role, count in ((Role.PREFILL, x), (Role.DECODE, y)):
        for number in range(count):
            registry.add(role, Address("http", f"{role[0]}{number}", 80), now=0.0)
    return registry


def ids(registry, role):
    try:
        return [one.id for one in registry.usable(role)]
    except NoInstance:
        return []


def sides(registry):
    """Return what each side has now."""
    return ids(registry, Role.PREFILL), ids(registry, Role.DECODE)


@pytest.mark.parametrize("state", TurnState)
@pytest.mark.parametrize("event", TurnEvent)
def test_a_turn_ends_once(state, event):
    """The table is all there is."""
    turn = RoleTurn(PREFILL, 0.0, 1.0)
    turn.state = state
    if event in TRANSITIONS[state]:
        assert turn.on(event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(KeyError):
            turn.on(event)


def test_a_decode_engine_turns_when_its_requests_are_over():
    """Until then it gets nothing at all; its id and its process stay what they are."""
    registry = registry_of(1, 2)
    member = registry.member(InstanceId("decode-0"))
    member.load.enter(REQUEST)
    registry.departures.change_role("decode-0", PREFILL, now=1.0)
    assert sides(registry) == (["prefill-0"], ["decode-1"])
    assert "decode-0" in registry.departures.moving
    assert (member.role, member.heading, member.life.state) == (DECODE, PREFILL, HealthState.DRAINING)
    assert member.life.why == "turns to prefill, and its streams move"
    registry.settle(patience_s=60, now=2.0)
    assert sides(registry) == (["prefill-0"], ["decode-1"])
    member.load.leave(REQUEST)
    registry.settle(patience_s=60, now=3.0)

    assert sides(registry) == (["prefill-0", "decode-0"], ["decode-1"])
    assert (member.role, member.turn, member.drain, member.life.why) == (PREFILL, None, None, "serves prefill")
    assert not registry.departures.moving
    assert registry.departures.turns == {("prefill", "turned"): 1}


def test_a_prefill_engine_turns_when_decode_engines_have_read_what_it_lends():
    """Twice in a row it says that it keeps nothing: its numbers are those of a step before."""
    registry = registry_of(2, 1)
    member = registry.member(InstanceId("prefill-1"))
    registry.departures.change_role("prefill-1", DECODE, now=0.0)
    for now, kept in enumerate((1.0, 0.0, 0.0)):
        registry.settle(patience_s=60, now=float(now))
        assert sides(registry) == (["prefill-0"], ["decode-0"])
        member.drain.reading(kept)
    registry.settle(patience_s=60, now=3.0)

    assert sides(registry) == (["prefill-0"], ["prefill-1", "decode-0"])
    assert not registry.departures.moving


def test_an_engine_that_is_both_has_one_id_and_one_load():
    """It adds a role at once, and drops one when all it has is over."""
    registry = registry_of(1, 2)
    registry.departures.change_role("decode-0", BOTH, now=0.0)
    assert sides(registry) == (["prefill-0", "decode-0"], ["decode-0", "decode-1"])
    one, other = registry.member("decode-0").as_role(Role.PREFILL), registry.member("decode-0").as_role(Role.DECODE)
    assert (one.id, one.role, one.pool) == (other.id, Role.PREFILL, Role.DECODE)
    assert (other.role, other.pool) == (Role.DECODE, Role.DECODE)
    registry.departures.change_role("decode-0", DECODE, now=1.0)
    assert sides(registry) == (["prefill-0"], ["decode-1"])
    registry.settle(patience_s=60, now=62.0)

    assert sides(registry) == (["prefill-0"], ["decode-0", "decode-1"])
    assert registry.departures.turns == {("both", "turned"): 1, ("decode", "turned"): 1}


def test_time_ends_a_turn():
    """What cannot move and does not end must not keep an engine from all traffic: it ends beside new legs."""
    registry = registry_of(1, 2)
    member = registry.member(InstanceId("decode-0"))
    member.load.enter(REQUEST)
    registry.departures.change_role("decode-0", PREFILL, now=0.0)
    registry.settle(patience_s=60, now=TURN_TIMEOUT_S - 1)
    assert member.role is DECODE
    registry.settle(patience_s=60, now=TURN_TIMEOUT_S)

    assert sides(registry) == (["prefill-0", "decode-0"], ["decode-1"])
    assert member.life.why == "serves prefill, beside 1 of before"
    assert registry.departures.turns == {("prefill", "late"): 1}
    member.load.leave(REQUEST)


@pytest.mark.parametrize(("role", "more"), [(DECODE, {}), (BOTH, {("both", "turned"): 1})])
def test_another_turn_ends_one_that_is_under_way(role, more):
    """Back to what it serves: it is as if nothing had been."""
    registry = registry_of(1, 2)
    registry.member(InstanceId("decode-0")).load.enter(REQUEST)
    registry.departures.change_role("decode-0", PREFILL, now=0.0)
    registry.departures.change_role("decode-0", role, now=1.0)

    member = registry.member("decode-0")
    assert (member.role, member.life.why) == (role, "has not turned to prefill")
    assert "decode-0" in ids(registry, Role.DECODE)
    assert not registry.departures.moving
    assert registry.departures.turns == {("prefill", "cancelled"): 1} | more


def test_what_an_operator_drains_stays_drained_when_it_has_turned():
    """The two are asked for by themselves, in any order."""
    registry = registry_of(2, 2)
    registry.departures.drain("decode-0", now=0.0)
    registry.departures.change_role("decode-0", PREFILL, now=0.0)
    registry.departures.change_role("prefill-0", DECODE, now=0.0)
    registry.departures.drain("prefill-0", now=0.0)
    for now in (1.0, 61.0):
        registry.settle(patience_s=60, now=now)
    assert sides(registry) == (["prefill-1"], ["decode-1"])
    for name in ("decode-0", "prefill-0"):
        registry.departures.undrain(name, now=62.0)

    assert sides(registry) == (["prefill-1", "decode-0"], ["prefill-0", "decode-1"])


MOVES = "is to be drained, and its streams move"


@pytest.mark.parametrize(
    ("moves", "why", "moving"), [(True, MOVES, ["decode-0"]), (False, "is to be drained", [])], ids=["move", "wait"]
)
@pytest.mark.parametrize("drains_first", [True, False])
@pytest.mark.parametrize("end", ["cancelled", "late"])
def test_when_a_turn_is_over_a_drain_is_what_it_was_asked_to_be(moves, why, moving, drains_first, end):
    """The turn moved the streams for itself; what it leaves goes on as whoever drained the engine wants."""
    registry = registry_of(1, 2)
    member = registry.member(InstanceId("decode-0"))
    member.load.enter(REQUEST)
    steps = [
        lambda: registry.departures.drain("decode-0", now=0.0, moves=moves),
        lambda: registry.departures.change_role("decode-0", PREFILL, now=0.0),
    ]
    for step in steps if drains_first else reversed(steps):
        step()
    assert list(registry.departures.moving) == ["decode-0"]
    assert member.life.why == "turns to prefill, and its streams move"
    if end == "cancelled":
        registry.departures.change_role("decode-0", DECODE, now=1.0)
    else:
        registry.settle(patience_s=60, now=TURN_TIMEOUT_S)

    assert registry.departures.turns == {("prefill", end): 1}
    assert (member.life.state, member.life.why) == (HealthState.DRAINING, why)
    assert (list(registry.departures.moving), member.drain.moves) == (moving, moves)


def test_an_engine_can_be_told_to_move_its_streams_after_a_turn_that_was_cancelled():
    """Asked again, or for the first time."""
    registry = registry_of(1, 2)
    registry.member(InstanceId("decode-0")).load.enter(REQUEST)
    registry.departures.drain("decode-0", now=0.0)
    registry.departures.change_role("decode-0", PREFILL, now=0.0)
    registry.departures.change_role("decode-0", DECODE, now=1.0)
    registry.departures.drain("decode-0", now=2.0, moves=True)

    assert list(registry.departures.moving) == ["decode-0"]
    assert registry.member("decode-0").life.why == MOVES


def test_a_turn_to_decode_does_not_keep_the_streams_of_what_is_undrained_moving():
    """An engine that is both, drained by moving, that gives up prefill: taken back, its streams stay."""
    registry = registry_of(1, 2)
    registry.departures.change_role("decode-0", BOTH, now=0.0)
    registry.member(InstanceId("decode-0")).load.enter(REQUEST)
    registry.departures.drain("decode-0", now=1.0, moves=True)
    registry.departures.change_role("decode-0", DECODE, now=1.0)
    assert list(registry.departures.moving) == ["decode-0"]
    registry.departures.undrain("decode-0", now=2.0)

    assert not registry.departures.moving
    assert registry.member("decode-0").turn is not None


def test_what_is_taken_back_into_use_while_it_turns_still_turns():
    """A pod that is Ready again; an operator's undrain also ends the turn (io/discovery/engine_changes.py)."""
    registry = registry_of(1, 2)
    registry.departures.drain("decode-0", now=0.0)
    registry.departures.change_role("decode-0", PREFILL, now=0.0)
    registry.departures.undrain("decode-0", now=0.0)
    assert sides(registry) == (["prefill-0"], ["decode-1"])
    registry.settle(patience_s=60, now=1.0)

    assert sides(registry) == (["prefill-0", "decode-0"], ["decode-1"])


def test_an_engine_that_goes_while_it_turns_is_counted():
    """Removed at once, or retired by its source and drained."""
    registry = registry_of(1, 3)
    registry.member(InstanceId("decode-0")).load.enter(REQUEST)
    for name in ("decode-0", "decode-1"):
        registry.departures.change_role(name, PREFILL, now=0.0)
    registry.remove("decode-0", now=1.0)
    registry.departures.retire("decode-1", now=1.0)
    registry.settle(patience_s=60, now=2.0)

    assert sides(registry) == (["prefill-0"], ["decode-2"])
    assert registry.departures.turns == {("prefill", "removed"): 2}


# ---- what cannot turn


def test_the_last_engine_of_a_role_does_not_turn_unless_it_is_forced():
    """No request could be served in two legs; of two that turn at the same time the second is the last."""
    registry = registry_of(1, 2)
    with pytest.raises(
        CannotTurn, match="prefill-0 is the last prefill engine that serves: turn another one to prefill"
    ):
        registry.departures.check_role_change("prefill-0", DECODE)
    registry.departures.check_role_change("prefill-0", DECODE, force=True)
    registry.departures.check_role_change("prefill-0", BOTH)
    registry.departures.check_role_change("decode-0", PREFILL)
    registry.departures.change_role("decode-0", PREFILL, now=0.0)
    with pytest.raises(CannotTurn, match="decode-1 is the last decode engine that serves"):
        registry.departures.check_role_change("decode-1", PREFILL)

    assert registry.departures.turns == {("decode", "refused"): 1, ("prefill", "refused"): 1}


@pytest.mark.parametrize(
    "happen",
    [
        lambda registry: registry.departures.drain("decode-1", now=0.0),
        lambda registry: registry.member("decode-1").life.missed("away", now=0.0),
        lambda registry: registry.learn("decode-1", EngineCapabilities(models=frozenset({"other"}))),
    ],
    ids=["drained", "away", "another model"],
)
def test_an_engine_that_does_not_serve_the_same_is_no_other_one(happen):
    """Its requests would have nowhere to go."""
    registry = registry_of(1, 2)
    registry.learn("decode-0", EngineCapabilities(models=frozenset({"m"})))
    happen(registry)
    with pytest.raises(CannotTurn, match="decode-0 is the last decode engine"):
        registry.departures.check_role_change("decode-0", PREFILL)


def test_engines_that_cannot_serve_the_role_say_why():
    """One sentence each; nothing happens to them."""
    registry = registry_of(1, 2)
    registry.add_target(Role.DECODE, Target.parse("dp:80#dp=2"), now=0.0)
    registry.learn("decode-0", EngineCapabilities(kv_role="kv_consumer"))
    registry.add(Role.PREFILL, Address("http", "d1", 80), now=0.0)
    registry.departures.retire("prefill-0", now=0.0)
    for name, why in {
        "decode-0": "decode-0 has kv_role kv_consumer: only an engine that was started with kv_both can turn",
        "decode-1": "d1:80 is also prefill-1, which is prefill: remove one of the two",
        "decode-2": "decode-2 is rank 0 of a data-parallel engine: its ranks share an address, and cannot turn",
    }.items():
        with pytest.raises(CannotTurn, match=why):
            registry.departures.check_role_change(name, PREFILL, force=True)
        registry.departures.change_role(name, PREFILL, now=0.0)
        assert registry.member(name).heading is DECODE
    with pytest.raises(CannotTurn, match="prefill-0 is no longer listed"):
        registry.departures.check_role_change("prefill-0", BOTH)
    with pytest.raises(UnknownInstance):
        registry.departures.check_role_change("decode-9", BOTH)


def test_the_address_of_an_engine_that_has_turned_is_taken():
    """Else it would be twice in the pool that it has come to; its own role is free for nobody else either."""
    registry = registry_of(1, 2)
    registry.departures.change_role("decode-0", PREFILL, now=0.0)
    registry.settle(patience_s=60, now=1.0)
    for role in Role:
        with pytest.raises(AlreadyKnown, match="d0:80 is already known as decode-0"):
            registry.add(role, Address("http", "d0", 80))


# ---- what is true afterwards


def test_what_was_true_of_the_old_role_is_dropped_and_the_cache_is_not():
    """Its process is the same, and so is its prefix cache; its rates were those of the old role."""
    registry = registry_of(1, 2)
    member = registry.member(InstanceId("decode-0"))
    since = member.life.cache_since
    stint = member.stint
    before = registry.changes.count
    registry.departures.change_role("decode-0", PREFILL, now=1.0)
    registry.settle(patience_s=60, now=2.0)

    assert member.stint > stint
    assert member.load.report is None
    assert member.life.cache_since == since
    assert registry.changes.count > before


# ---- one request never has one engine twice


def pairs_of(registry, count=64):
    selector = PairSelector(registry, GroupChoice(RoundRobin()))
    found = [selector.pair(registry.usable(Role.PREFILL), registry.usable(Role.DECODE)) for _ in range(count)]
    return {(prefill.id, decode.id) for prefill, decode in found}


@pytest.mark.parametrize(
    ("x", "y", "both", "expected"),
    [
        (0, 2, 2, {("decode-0", "decode-1"), ("decode-1", "decode-0")}),
        (1, 1, 1, {("prefill-0", "decode-0")}),
        (0, 2, 1, {("decode-0", "decode-1")}),
        (0, 3, 3, {(f"decode-{a}", f"decode-{b}") for a, b in itertools.permutations(range(3), 2)}),
    ],
)
def test_an_engine_that_is_both_is_never_both_of_one_request(x, y, both, expected):
    """There would be nothing to transfer, and no slot that another engine could have had."""
    registry = registry_of(x, y)
    for number in range(both):
        registry.departures.change_role(f"decode-{number}", BOTH, now=0.0)

    assert pairs_of(registry) == expected


def test_one_engine_that_is_both_is_no_pair():
    """It serves alone, as a decode engine without a prefill engine does."""
    registry = registry_of(0, 1)
    registry.departures.change_role("decode-0", BOTH, now=0.0)
    with pytest.raises(NoMatchingInstance):
        pairs_of(registry)
    found = group_engines(registry.usable(Role.PREFILL), registry.usable(Role.DECODE), registry.facts)

    assert not found.pairs


class Turning(RuleBasedStateMachine):
    """Engines of one router under everything that operators, requests and deaths do to them, in any order."""

    def __init__(self):
        super().__init__()
        self.registry = registry_of(2, 2)
        self.now, self.serial, self.ports = 0.0, itertools.count(), itertools.count(1)
        self.running = {}  # request -> the engines that have it, as they were chosen
        self.begun = 0  # turns
        self.resting = set()

    def known(self):
        return [member.instance.id for member in self.registry.members()]

    @rule(role=st.sampled_from(Role))
    def come(self, role):
        if len(self.known()) < 8:
            self.registry.add(role, Address("http", "h", next(self.ports)), now=self.now)

    @precondition(lambda self: self.known())
    @rule(data=st.data(), to=st.sampled_from(EngineRole), force=st.booleans())
    def turn(self, data, to, force):
        name = data.draw(st.sampled_from(self.known()))
        member = self.registry.member(name)
        before = member.turn
        try:
            self.registry.departures.check_role_change(name, to, force=force)
        except CannotTurn:
            return
        self.registry.departures.change_role(name, to, now=self.now)
        assert member.heading is to
        self.begun += member.turn not in (None, before)

    @precondition(lambda self: self.known())
    @rule(data=st.data(), verb=st.sampled_from([*DEPARTURES, "remove"]), moves=st.booleans())
    def change(self, data, verb, moves):
        name = data.draw(st.sampled_from(self.known()))
        more = {"moves": moves} if verb == DEPARTURES[0] else {}
        attrgetter(verb)(self.registry)(name, now=self.now, **more)
        if verb == "remove":
            self.running = {request: found for request, found in self.running.items() if name not in found}

    @precondition(lambda self: self.known())
    @rule(data=st.data(), is_up=st.booleans())
    def probe(self, data, is_up):
        life = self.registry.member(data.draw(st.sampled_from(self.known()))).life
        if is_up:
            life.seen(now=self.now)
        else:
            for _ in range(3):
                life.missed("killed", now=self.now)

    @rule()
    def request(self):
        try:
            pair = PairSelector(self.registry, GroupChoice(RoundRobin())).pair(
                self.registry.usable(Role.PREFILL, now=self.now), self.registry.usable(Role.DECODE, now=self.now)
            )
        except NoInstance:
            return
        prefill, decode = pair
        assert prefill.id != decode.id
        assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
        name = RequestId(f"r{next(self.serial)}")
        self.running[name] = [one.id for one in pair]
        for one in pair:
            member = self.registry.member(one.id)
            assert member.role.serves(one.role)
            assert member.turn is None
            member.load.enter(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        name = data.draw(st.sampled_from(list(self.running)))
        for engine in self.running.pop(name):
            self.registry.member(engine).load.leave(name)

    @precondition(lambda self: self.registry.departures.moving and self.running)
    @rule()
    def move(self):
        """A stream of an engine that is drained by moving goes on at another one."""
        for name, engines in self.running.items():
            if engines[-1] in self.registry.departures.moving:
                others = [one for one in ids(self.registry, Role.DECODE) if one not in engines]
                if others:
                    self.registry.member(engines[-1]).load.leave(name)
                    engines[-1] = others[0]
                    self.registry.member(others[0]).load.enter(name)

    @precondition(lambda self: self.known())
    @rule(data=st.data(), kept=st.sampled_from([0.0, 0.0, 1.0]))
    def read(self, data, kept):
        member = self.registry.member(data.draw(st.sampled_from(self.known())))
        if member.drain is not None:
            member.drain.reading(kept)

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0, 40.0]))
    def settle(self, seconds):
        self.now += seconds
        turning = {m.instance.id: (m, m.turn) for m in self.registry.members() if m.turn is not None}
        left = {name: member.load.in_flight for name, (member, _) in turning.items()}
        self.registry.settle(patience_s=10, now=self.now)
        for name, (member, turn) in turning.items():
            if turn.state is TurnState.TURNED:
                assert not left[name]
                assert member.role is turn.to
            elif turn.state is TurnState.LATE:
                assert self.now >= turn.until
            elif turn.state is TurnState.LEAVING:
                assert self.now < turn.until or member.retires
        gone = set(turning) - set(self.known())
        self.running = {request: found for request, found in self.running.items() if not gone & set(found)}

    @invariant()
    def every_engine_is_on_the_sides_that_it_serves(self):
        for member in self.registry.members():
            on = [role for role in Role if member.instance.id in {one.id for one in self.registry.known(role)}]
            assert on == [role for role in Role if member.role.serves(role)]
            if member.turn is not None:
                assert member.life.state in (HealthState.DRAINING, HealthState.DRAINED)
                assert not any(member.instance.id in side for side in sides(self.registry))
            elif member.drain is None:
                assert member.life.state not in (HealthState.DRAINING, HealthState.DRAINED)

    @invariant()
    def every_turn_has_an_end(self):
        over = sum(n for (_, outcome), n in self.registry.departures.turns.items() if outcome != "refused")
        assert over >= self.begun - sum(member.turn is not None for member in self.registry.members())

    @invariant()
    def only_what_is_drained_moves(self):
        for member in self.registry.members():
            moves = member.drain is not None and member.drain.moves
            assert (member.instance.id in self.registry.departures.moving) == moves


Turning.TestCase.settings = hypothesis_settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestTurning = Turning.TestCase
