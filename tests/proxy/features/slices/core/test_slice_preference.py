"""Engines pair within their slice: always where that is required, and else but for a reason where it is preferred."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.routing.compatible_groups import group_engines
from pdrelay_proxy.core.routing.fleet_groups import fleet_groups_in_steps
from pdrelay_proxy.core.routing.group_weights import BOUND, shares_of
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.errors import NoInstance
from pdrelay_proxy.features import feature_policies, pairs_within
from pdrelay_proxy.features.slices.core.slice_preference import CrossingReason, divide_by_slice, nearest, slice_sizes
from pdrelay_proxy.features.slices.settings import SlicePairing, SliceSettings
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.settings import PolicyName, Settings
from support.feature_routing import routing_of_features

BRITTLE = Settings(circuit_breaker_failures=1, ejection_time_s=5)
REQUIRE, PREFER = SlicePairing.REQUIRE, SlicePairing.PREFER
SIZES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6)
PLACES = st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from(["v1", "v2", None]))


class World:
    """A fleet of engines in slices, and what chooses among them."""

    def __init__(self, pairing=REQUIRE, policy=PolicyName.ROUND_ROBIN, decode_policy=None):
        self.now = 0.0
        chosen = replace(BRITTLE, prefill_policy=policy, decode_policy=decode_policy or policy)
        self.settings = chosen.with_features(SliceSettings(pairing))
        self.registry, self.ports = Registry(self.settings, pairs_within(self.settings)), itertools.count(1)
        learned = PushCoordinates(at_once=True)
        added = routing_of_features(self.settings, self.registry, lambda: self.now)
        self.fleet = fleet_of(self.settings, self.registry, learned, lambda: self.now, lambda n: n // 2, added=added)

    def add(self, role, name=None, revision=None):
        target = Target.parse(f"h:{next(self.ports)}")
        return self.registry.add_target(role, replace(target, slice=name, revision=revision), now=self.now)[0]

    def fill(self, **sizes):
        """Add engines, as (prefill, decode) by slice."""
        for name, counts in sizes.items():
            for role, count in zip(Role, counts, strict=True):
                for _ in range(count):
                    self.add(role, name)
        return self

    def of(self, role, name):
        return [one for one in self.registry.known(role) if self.slice(one) == name]

    def slice(self, instance):
        return None if instance is None else self.registry.facts(instance).slice

    def eject(self, instance):
        self.registry.member(instance.id).life.failed(RequestId("r"), Failure.UNREACHABLE, now=self.now)

    def chosen(self, count, ask=None, **more):
        """Count the slices of the engines of so many requests."""
        pairs = [self.fleet.any_pair(ask or RoutingHints(), may_be_alone=True, **more) for _ in range(count)]
        return Counter((self.slice(p), self.slice(d)) for p, d in pairs)


@given(
    st.lists(PLACES, min_size=1, max_size=6),
    st.lists(PLACES, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["eject", "drain", "rest"])), max_size=4),
    st.sampled_from([PolicyName.ROUND_ROBIN, PolicyName.LEAST_LOADED, PolicyName.SESSION, PolicyName.PREFIX]),
    st.booleans(),
)
def test_where_slices_are_required_no_pair_is_of_two(prefill, decode, events, policy, again):
    """Whatever is ejected, on trial, drained or of another revision; no slice is a slice as well."""
    world = World(REQUIRE, policy)
    for role, places in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for name, revision in places:
            world.add(role, name, revision)
    engines = [one for role in Role for one in world.registry.known(role)]
    for number, event in events:
        one = engines[number % len(engines)]
        if event == "eject":
            world.eject(one)
        elif event == "drain":
            world.registry.departures.drain(one.id, now=world.now)
        world.now += 6.0 if event == "rest" else 0.1

    for number in range(8):
        ask = RoutingHints(None, f"session {number}", b"x" * 600 + bytes([number]), again=again)
        try:
            p, d = world.fleet.any_pair(ask, may_be_alone=True)
        except NoInstance:
            break
        assert p is None or world.slice(p) == world.slice(d)
        for other in world.registry.fitting(engines[0], world.registry.known(Role.DECODE)):
            assert world.slice(other) == world.slice(engines[0])


def busiest(world, shares):
    """Return how many times the mean the busiest engine of each role gets."""
    found = Counter()
    for share in shares.all:
        for engine in share.group.decode:
            found[engine.id] += share.weight / len(share.group.decode)
        for engine in () if share.alone else share.group.prefill:
            found[engine.id] += share.weight / len(share.group.prefill)
    return [max(found[one.id] for one in world.registry.known(role)) * len(world.registry.known(role)) for role in Role]


def shares_in(world, *, may_be_alone=True):
    grouping = group_engines(*(world.registry.known(role) for role in Role), world.registry.facts)
    return shares_of(grouping, may_be_alone=may_be_alone) if grouping.pairs else None


@given(SIZES)
def test_uneven_slices_get_no_engine_more_than_the_bound_where_one_is_preferred(sizes):
    """All of the traffic is pairs, and those of two slices are only what no slice can take."""
    world = World(PREFER).fill(**{f"s{n}": size for n, size in enumerate(sizes)})
    p, d = (len(world.registry.known(role)) for role in Role)
    if not p or not d:
        return
    shares = divide_by_slice(shares_in(world), world.slice)

    assert max(busiest(world, shares)) <= BOUND + 1e-6
    assert sum(share.weight for share in shares.all) == pytest.approx(1)
    crossing = sum(
        share.weight
        for share in shares.all
        if world.slice(share.group.prefill[0]) != world.slice(share.group.decode[0])
    )
    fair = sum(min(ps / p, ds / d) for ps, ds in sizes)
    assert crossing == pytest.approx(max(0.0, 1 - fair * BOUND), abs=1e-6)
    assert len(shares.all) <= 2 * len(sizes)
    for share in shares.all:  # no share is of engines of several slices of a role
        for side in (share.group.prefill, share.group.decode):
            assert len({world.slice(one) for one in side}) == 1


@given(SIZES)
def test_uneven_slices_get_no_engine_more_than_the_bound_where_one_is_required(sizes):
    """What no slice can take as pairs is served by decode engines alone, as during a rollout."""
    world = World(REQUIRE).fill(**{f"s{n}": size for n, size in enumerate(sizes)})
    shares = shares_in(world)
    found = world.registry
    if shares is None:
        return
    grouping = group_engines(*(found.known(role) for role in Role), found.facts)
    lonely = [len(grouping.unpaired_prefill), len(grouping.unpaired_decode)]
    # A single engine without a partner is not counted: the first or last one of a rollout.
    slack = [
        n / (n - 1) if alone == 1 else 1 for alone, n in zip(lonely, map(len, map(found.known, Role)), strict=True)
    ]

    for most, factor in zip(busiest(world, shares), slack, strict=True):
        assert most <= BOUND * factor + 1e-6
    assert all(
        world.slice(p) == world.slice(d)
        for share in shares.all
        if not share.alone
        for p, d in itertools.product(share.group.prefill, share.group.decode)
    )


@pytest.mark.parametrize(("slices_of_fleet", "size"), [(28, 72), (250, 8), (1000, 2)])
def test_the_work_grows_with_the_engines_and_not_with_the_pairs_of_slices(slices_of_fleet, size):
    """2,000 engines in hundreds of NVLink domains: each domain is compared with itself."""
    world = World(REQUIRE).fill(**{f"s{n}": (size // 2, size // 2) for n in range(slices_of_fleet)})
    found = group_engines(*(world.registry.known(role) for role in Role), world.registry.facts)

    assert found.comparisons == slices_of_fleet
    assert len(found.groups) == slices_of_fleet
    assert all(group.all_fit for group in found.groups)


def test_without_the_setting_slices_play_no_part():
    assert set(World(SlicePairing.OFF).fill(a=(1, 1), b=(1, 1)).chosen(8)) == set(itertools.product("ab", "ab"))


@pytest.mark.parametrize("pairing", [PREFER, REQUIRE])
def test_even_slices_share_the_work_and_never_cross(pairing):
    assert World(pairing).fill(a=(2, 4), b=(1, 2)).chosen(300) == {
        ("a", "a"): pytest.approx(200, abs=3),
        ("b", "b"): pytest.approx(100, abs=3),
    }


def test_a_slice_is_divided_by_revision_as_well():
    """Both dimensions count together: a rollout within slices mixes neither."""
    world = World(REQUIRE)
    for name, revision in itertools.product("ab", ("v1", "v2")):
        for role in Role:
            world.add(role, name, revision)
    facts = world.registry.facts
    pairs = [world.fleet.any_pair(RoutingHints(), may_be_alone=True) for _ in range(400)]

    met = Counter((facts(p).slice, facts(p).revision, facts(d).slice, facts(d).revision) for p, d in pairs)
    assert met == {(s, r, s, r): pytest.approx(100, abs=3) for s, r in itertools.product("ab", ("v1", "v2"))}


def test_with_one_revision_in_a_slice_another_slice_may_help():
    """Preferred: the new decode engine has no prefill engine of its revision in its own slice."""
    world = World(PREFER)
    for role, name, revision in (
        *((role, "a", "v1") for role in Role),
        (Role.PREFILL, "b", "v2"),
        (Role.DECODE, "a", "v2"),
    ):
        world.add(role, name, revision)

    assert set(world.chosen(40)) == {("a", "a"), ("b", "a")}


def lacking(world, what):
    """Take the decode engines of slice a away."""
    for one in world.of(Role.DECODE, "a"):
        if what == "removed":
            world.registry.remove(one.id, now=0.0)
        elif what == "drained":
            world.registry.departures.drain(one.id, now=0.0)
        elif what == "ejected":
            world.eject(one)
        elif what == "not up":
            world.registry.member(one.id).life.missed("cannot be reached", now=0.0)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("removed", CrossingReason.NO_ENGINE),
        ("drained", CrossingReason.DRAINING),
        ("ejected", CrossingReason.UNAVAILABLE),
        ("not up", CrossingReason.UNAVAILABLE),
    ],
)
def test_pairs_cross_when_a_slice_has_no_engine_that_could_take_them(what, reason):
    """Its prefill engines go on, with decode engines elsewhere, and the reason is counted."""
    world = World(PREFER).fill(a=(2, 2), b=(2, 2))
    assert set(world.chosen(40)) == {("a", "a"), ("b", "b")}
    lacking(world, what)

    chosen = world.chosen(100)
    assert set(chosen) == {("a", "b"), ("b", "b")}
    assert world.fleet.preference.counted == {(reason,): chosen["a", "b"]}


def test_pairs_cross_when_the_engines_of_a_slice_are_full():
    """3P1D beside 1P3D: a slice alone would get twice what the mean engine gets; 0.3 of the requests cross."""
    world = World(PREFER).fill(a=(3, 1), b=(1, 3))

    assert world.chosen(1000) == {
        ("a", "a"): pytest.approx(350, abs=5),
        ("b", "b"): pytest.approx(350, abs=5),
        ("a", "b"): pytest.approx(300, abs=5),
    }
    assert world.fleet.preference.counted == {(CrossingReason.FULL,): pytest.approx(300, abs=5)}


def rehearsed(world):
    """Choose as an explanation does."""
    return world.fleet.rehearsal().pair(world.fleet.usable(Role.PREFILL), world.fleet.usable(Role.DECODE))


def test_an_engine_without_a_partner_in_its_slice_gets_nothing_while_the_other_slices_can_take_all():
    """3P3D beside 1P: three prefill engines have 1.33 times the mean of four, and no KV crosses."""
    world = World(PREFER).fill(a=(3, 3), b=(1, 0))

    assert world.chosen(300) == {("a", "a"): 300}
    assert not world.fleet.preference.counted
    assert {world.slice(rehearsed(world)[0]) for _ in range(8)} == {"a"}
    for one in world.of(Role.PREFILL, "a")[1:]:
        world.eject(one)  # now the mean is of two, and the one that is left gets no more than 1.4 times that
    assert world.chosen(300) == {("a", "a"): pytest.approx(210, abs=3), ("b", "a"): pytest.approx(90, abs=3)}


@given(SIZES, st.sampled_from([PolicyName.ROUND_ROBIN, PolicyName.LEAST_LOADED]))
def test_pairs_are_chosen_as_the_slices_are_divided_and_as_the_status_page_shows(sizes, policy):
    """However many slices can take part: also if it is one, beside engines without a partner."""
    world = World(PREFER, policy).fill(**{f"s{n}": size for n, size in enumerate(sizes)})
    p, d = (len(world.registry.known(role)) for role in Role)
    if not p or not d:
        return
    fair = sum(min(ps / p, ds / d) for ps, ds in sizes)
    chosen = world.chosen(200)
    crossing = sum(count for (one, other), count in chosen.items() if one != other)
    groups = finish(fleet_groups_in_steps(world.registry, world.fleet.preference, may_be_alone=True))

    expected = max(0.0, 1 - fair * BOUND)
    assert crossing == (0 if expected < 1e-9 else pytest.approx(200 * expected, abs=4 * len(sizes)))
    if len([size for size in sizes if any(size)]) > 1:
        assert sum(group.pairs for group in groups) == pytest.approx(1)
        assert sum(group.pairs for group in groups if " to " in group.name) == pytest.approx(expected, abs=1e-6)
        shown = {name for group in groups for name in group.name.rpartition("slice ")[2].split(" to ")}
        assert shown == {f"s{number}" for number, size in enumerate(sizes) if any(size)}


def test_pairs_cross_when_the_engines_of_a_slice_have_failed_the_request():
    world = World(PREFER).fill(a=(1, 1), b=(0, 1))
    decode = world.of(Role.DECODE, "b")
    p, d = world.fleet.pair(world.of(Role.PREFILL, "a"), decode, RoutingHints(again=True))

    assert (world.slice(p), world.slice(d)) == ("a", "b")
    assert world.fleet.preference.counted == {(CrossingReason.FAILED,): 1}


def test_what_is_only_explained_is_not_counted():
    world = World(PREFER).fill(a=(1, 0), b=(0, 1))
    rehearsed(world)

    assert not world.fleet.preference.counted


def test_an_engine_on_trial_gets_a_partner_of_its_slice():
    world = World(PREFER).fill(a=(1, 1), b=(1, 1))
    world.eject(world.of(Role.PREFILL, "b")[0])
    world.now = 6.0
    p, d = world.fleet.any_pair()

    assert (world.slice(p), world.slice(d)) == ("b", "b")


@pytest.mark.parametrize("pairing", [PREFER, REQUIRE])
def test_a_session_stays_in_its_slice(pairing):
    world = World(pairing, PolicyName.SESSION).fill(a=(2, 2), b=(2, 2))
    for number in range(40):
        assert len(world.chosen(5, RoutingHints(session=f"session {number}"))) == 1
    at_a = sum(("a", "a") in world.chosen(1, RoutingHints(session=f"session {number}")) for number in range(400))

    assert 150 < at_a < 250


@pytest.mark.parametrize("pairing", [PREFER, REQUIRE])
@pytest.mark.parametrize(
    "policies",
    [
        (PolicyName.PREFIX, PolicyName.PREFIX),
        (PolicyName.PREFIX, PolicyName.ROUND_ROBIN),
        *[(name, name) for name in feature_policies()],
    ],
)
def test_a_conversation_stays_where_its_prompt_is_cached(pairing, policies):
    """The slice is chosen before the engines: by turns alone a conversation would lose its cache each time."""
    world = World(pairing, *policies).fill(a=(2, 2), b=(2, 2), c=(2, 2))
    ask = RoutingHints("m", prompt=b'"' + b"y" * 4000 + b'"')
    first = world.fleet.any_pair(ask)
    for engine in first:
        world.fleet.caches.sent(engine, ask)

    assert {world.slice(world.fleet.any_pair(ask)[1]) for _ in range(4)} == {world.slice(first[1])}


def test_another_decode_engine_for_blocks_that_wait_is_of_the_same_slice_if_one_is():
    """The prefill engine holds the KV: to read it across slices is the last way, better than to compute it again."""
    world = World(PREFER).fill(a=(1, 1), b=(1, 2))
    (p,), decodes = world.of(Role.PREFILL, "b"), world.registry.known(Role.DECODE)

    assert world.fleet.nearest(p, decodes) == world.of(Role.DECODE, "b")
    assert nearest(p, world.of(Role.DECODE, "a"), world.slice) == world.of(Role.DECODE, "a")
    world.fleet.took_over(p, world.of(Role.DECODE, "a")[0], RoutingHints())
    assert world.fleet.preference.counted == {(CrossingReason.FAILED,): 1}


def test_reasons_are_about_the_model_of_the_request():
    """The decode engine of the slice serves another model: to this request it is not there."""
    world = World(PREFER).fill(a=(1, 1), b=(0, 1))
    served = {name: world.registry.facts(world.of(Role.DECODE, name)[0]) for name in "ab"}
    for name, model in (("a", "x"), ("b", "y")):
        world.registry.learn(world.of(Role.DECODE, name)[0].id, replace(served[name], models=frozenset({model})))
    preference = world.fleet.preference
    pair = world.of(Role.PREFILL, "a")[0], world.of(Role.DECODE, "b")[0]

    assert preference.reason(*pair, RoutingHints("y")) is CrossingReason.NO_ENGINE


def test_the_status_page_says_which_slice_lacks_engines():
    world = World(REQUIRE).fill(a=(2, 2), b=(3, 0))
    rows = [
        (row.name, row.prefill, row.decode)
        for row in finish(fleet_groups_in_steps(world.registry, world.fleet.preference, may_be_alone=True))
    ]

    assert rows == [("slice a", 2, 2), ("no decode engine fits, slice b", 3, 0)]
    assert slice_sizes(world.registry) == {
        ("a", Role.PREFILL): 2,
        ("a", Role.DECODE): 2,
        ("b", Role.PREFILL): 3,
        ("b", Role.DECODE): 0,
    }


def test_the_status_page_shows_what_crosses():
    world = World(PREFER).fill(a=(3, 1), b=(1, 3))
    rows = {
        row.name: row.pairs
        for row in finish(fleet_groups_in_steps(world.registry, world.fleet.preference, may_be_alone=True))
    }

    assert rows == {
        "unknown facts, slice a": pytest.approx(0.35),
        "unknown facts, slice b": pytest.approx(0.35),
        "unknown facts, slice a to b": pytest.approx(0.3),
    }


def test_the_status_page_shows_engines_that_get_nothing():
    """Their slice has no partner for them, and the other slice can take all."""
    world = World(PREFER).fill(a=(3, 3), b=(1, 0))
    groups = [
        (row.name, row.prefill, row.decode, row.pairs)
        for row in finish(fleet_groups_in_steps(world.registry, world.fleet.preference, may_be_alone=True))
    ]

    assert groups == [("unknown facts, slice a", 3, 3, pytest.approx(1)), ("unknown facts, slice b", 1, 0, 0.0)]


def test_engines_without_a_slice_are_one_of_their_own():
    """Also beside a slice that an operator calls none: sessions go to both in proportion."""
    world = World(PREFER, PolicyName.SESSION).fill(none=(1, 1))
    for role in Role:
        world.add(role)
    chosen = Counter()
    for number in range(200):
        chosen += world.chosen(1, RoutingHints(session=f"session {number}"))

    assert set(chosen) == {("none", "none"), (None, None)}
    assert 60 < chosen["none", "none"] < 140


def test_an_engine_on_trial_without_a_partner_lets_no_revisions_meet():
    """It waits for its trial, and no engine fits it: the others choose as if it were not there."""
    world = World(SlicePairing.OFF)
    for role, revision in itertools.product(Role, ("v1", "v2")):
        world.add(role, None, revision)
    lone = world.add(Role.PREFILL, None, "v3")
    world.eject(lone)
    world.now = 6.0
    facts = world.registry.facts

    for _ in range(8):
        p, d = world.fleet.any_pair()
        assert facts(p).revision == facts(d).revision
