"""Engines by whom they fit, and how the traffic is divided among them."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, fit, rests
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.core.routing.compatible_groups import NO_PREFILL, group_engines
from pdrelay_proxy.core.routing.group_weights import BOUND, GroupTurns, shares_of


def engines(role, facts):
    """Return engines with these facts, and the facts by engine."""
    found = [Instance(InstanceId(f"{role}-{n}"), role, Address("http", "h", n + 1)) for n in range(len(facts))]
    return found, {instance.id: one for instance, one in zip(found, facts, strict=True)}


def grouped(prefill, decode):
    (ps, p_facts), (ds, d_facts) = engines(Role.PREFILL, prefill), engines(Role.DECODE, decode)
    known = p_facts | d_facts
    return group_engines(ps, ds, lambda instance: known[instance.id]), known


def revisions(**counts):
    return [EngineCapabilities(revision=name) for name, count in counts.items() for _ in range(count)]


def shares(prefill, decode, *, may_be_alone=True):
    """Return weights by revision, and those of engines that serve alone."""
    found = shares_of(grouped(revisions(**prefill), revisions(**decode))[0], may_be_alone=may_be_alone)
    pairs = {share.group.name.removeprefix("revision "): share.weight for share in found.all if not share.alone}
    alone = {share.group.name.removeprefix("revision "): share.weight for share in found.all if share.alone}
    return pytest.approx(pairs), pytest.approx(alone)


FACTS = st.builds(
    EngineCapabilities,
    version=st.sampled_from([None, "1", "2"]),
    revision=st.sampled_from([None, "a", "b"]),
    engine_id=st.sampled_from([None, "x", "y"]),
    incompatible=st.sampled_from([None, frozenset(), frozenset("x"), frozenset("xy")]),
    resting=st.none() | st.frozensets(st.integers(0, 6).map("prefill-{}".format), max_size=3),
)


def meet(prefill, decode, known):
    return fit(known[prefill.id], known[decode.id]) and not rests(prefill.id, known[decode.id])


@given(st.lists(FACTS, max_size=7), st.lists(FACTS, max_size=7))
def test_groups_are_what_comparing_all_engines_would_bring(prefill, decode):
    """Every pair that fits is in exactly one group, no other pair is, and what is left out fits nothing."""
    found, known = grouped(prefill, decode)
    (ps, _), (ds, _) = engines(Role.PREFILL, prefill), engines(Role.DECODE, decode)
    expected = {(p.id, d.id) for p, d in itertools.product(ps, ds) if meet(p, d, known)}

    met = [(p.id, d.id) for group in found.groups for p, d in itertools.product(group.prefill, group.decode)]
    assert sorted(met) == sorted(expected)
    assert {p.id for p in found.unpaired_prefill} == {p.id for p in ps} - {p for p, _ in expected}
    assert sorted(d.id for group in found.groups for d in group.decode) == sorted(d.id for d in ds)
    assert sum(group.prefill_count for group in found.groups) == pytest.approx(len(ps) - len(found.unpaired_prefill))
    assert len({group.name for group in found.groups}) == len(found.groups)


SLICED = FACTS.flatmap(lambda facts: st.sampled_from([None, "", "z"]).map(lambda z: replace(facts, pairs_within=z)))


@given(st.lists(SLICED, max_size=7), st.lists(SLICED, max_size=7))
def test_slices_change_nothing_but_what_is_compared(prefill, decode):
    """Engines of other slices are not looked at, and fit no more than if they were."""
    found, known = grouped(prefill, decode)
    (ps, _), (ds, _) = engines(Role.PREFILL, prefill), engines(Role.DECODE, decode)
    met = [(p.id, d.id) for group in found.groups for p, d in itertools.product(group.prefill, group.decode)]

    assert sorted(met) == sorted((p.id, d.id) for p, d in itertools.product(ps, ds) if meet(p, d, known))


@given(st.lists(SLICED, max_size=7))
def test_an_engine_of_both_roles_is_never_paired_with_itself(facts):
    """No request has one engine twice; those of both roles still fit each other."""
    both = [
        [Instance(InstanceId(f"prefill-{n}"), role, Address("http", "h", n + 1)) for n in range(len(facts))]
        for role in Role
    ]
    known = dict(zip([one.id for one in both[0]], facts, strict=True))
    found = group_engines(*both, lambda one: known[one.id])
    met = {(p.id, d.id) for g in found.groups for p, d in itertools.product(g.prefill, g.decode) if p.id != d.id}

    assert met == {(p.id, d.id) for p, d in itertools.product(*both) if p.id != d.id and meet(p, d, known)}
    assert not any(len(g.prefill) == len(g.decode) == 1 and g.prefill[0].id == g.decode[0].id for g in found.groups)


@pytest.mark.parametrize("kinds", [1, 2, 5])
def test_the_work_does_not_grow_with_the_pairs_of_engines(kinds):
    """2,000 engines are a million pairs: comparing them after each change stopped the router for a second."""
    facts = [EngineCapabilities(version="1", revision=str(n % kinds)) for n in range(1000)]
    found, _ = grouped(facts, facts)

    assert found.comparisons == kinds * kinds
    assert len(found.groups) == kinds


def test_the_lists_of_all_groups_together_are_bounded():
    """Each decode engine has refused another prefill engine: small groups share one, in which pairs are compared."""
    prefill = [EngineCapabilities(engine_id=str(n)) for n in range(200)]
    decode = [EngineCapabilities(incompatible=frozenset({str(n)})) for n in range(200)]
    found, _ = grouped(prefill, decode)

    assert len(found.groups) == 64
    assert [group.all_fit for group in found.groups].count(False) == 1
    assert sum(len(group.decode) for group in found.groups) == 200


def test_one_revision_gets_everything_in_pairs():
    assert shares({"a": 4}, {"a": 16}) == ({"a": 1.0}, {})


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"a": 1}, {"a": 1}),
        ({"a": 1, "b": 1}, {"a": 1}),  # the new prefill engine is up
        ({"a": 1, "b": 1}, {"a": 1, "b": 1}),
        ({"b": 1}, {"a": 1, "b": 1}),  # the old one is gone
    ],
)
def test_a_fleet_of_one_pair_is_never_served_alone(prefill, decode):
    """The one that is left does what it always did; prefill work on the decode engine would slow down its streams."""
    _, alone = shares(prefill, decode)

    assert alone == {}


def test_revisions_get_the_lesser_of_their_shares():
    """Prefill engines are half and half, decode engines 3 to 1: nobody is stretched beyond the bound."""
    assert shares({"a": 2, "b": 2}, {"a": 6, "b": 2}) == ({"a": 2 / 3, "b": 1 / 3}, {})


def test_decode_engines_without_partners_serve_alone():
    """4P/16D, after the prefill engines: all four are new, and so are four of the decode engines."""
    assert shares({"b": 4}, {"a": 12, "b": 4}) == ({"b": 0.25 * BOUND}, {NO_PREFILL: 1 - 0.25 * BOUND})


def test_what_few_prefill_engines_cannot_take_is_served_alone():
    """16P/4D, after the decode engines: 12 prefill engines have no partner any more."""
    assert shares({"a": 12, "b": 4}, {"b": 4}) == ({"b": 0.25 * BOUND}, {"b": 1 - 0.25 * BOUND})


def test_without_leave_to_serve_alone_all_requests_are_pairs():
    """``decode_only_fallback`` is off: overloaded engines are better than none."""
    assert shares({"b": 4}, {"a": 12, "b": 4}, may_be_alone=False) == ({"b": 1.0}, {})
    assert shares({"a": 1, "b": 3}, {"a": 15, "b": 1}, may_be_alone=False) == ({"a": 0.8, "b": 0.2}, {})


def test_any_turns_in_a_row_are_divided_by_the_weights():
    """Requests between two changes may be few."""
    turns = GroupTurns()
    found = shares_of(grouped(revisions(a=2, b=2), revisions(a=14, b=2))[0], may_be_alone=True)
    for count in (20, 100, 7):
        chosen = Counter(found.all.index(turns.next(found)) for _ in range(count))
        for number, share in enumerate(found.all):
            assert chosen[number] == pytest.approx(share.weight * count, abs=2)


def test_caches_do_not_get_a_revision_more_than_the_bound():
    """All prompts are cached at the one old decode engine that is left: it gets its share and some more."""
    found = shares_of(grouped(revisions(a=4, b=4), revisions(a=1, b=7))[0], may_be_alone=True)
    turns = GroupTurns()
    old = next(share.group.decode[0].id for share in found.all if share.group.name == "revision a")
    chosen = [turns.cached(found, [old]) or turns.next(found) for _ in range(400)]

    at_old = sum(share.group.name == "revision a" for share in chosen)
    assert 0.125 * 400 < at_old < 0.125 * 400 * 1.5 + 5


def test_pairs_that_rest_cost_no_comparisons():
    """Of engines that are equal but for these: facts are compared once."""
    prefill = [EngineCapabilities(version="1")] * 400
    resting = [frozenset({f"prefill-{n % 40}", f"prefill-{n % 7}"}) for n in range(400)]
    found, _ = grouped(prefill, [EngineCapabilities(version="1", resting=each) for each in resting])
    kinds = len({frozenset(group.prefill) for group in found.groups if group.all_fit})

    assert found.comparisons <= 41 * 41
    assert kinds <= 64
    assert sum(len(group.prefill) for group in found.groups) <= 64 * 400


def test_racks_that_cannot_meet_are_two_groups():
    """However many engines they have."""
    cut = frozenset(f"prefill-{n}" for n in range(50))
    decode = [EngineCapabilities()] * 50 + [EngineCapabilities(resting=cut)] * 50
    found, _ = grouped([EngineCapabilities()] * 100, decode)

    assert [(len(group.prefill), len(group.decode)) for group in found.groups] == [(100, 50), (50, 50)]
    assert found.comparisons == 1
