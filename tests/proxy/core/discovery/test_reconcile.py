"""What there should be, what there is, and what follows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.discovery.reconcile import Action, diff
from pdrelay_proxy.core.discovery.sources import Sources
from pdrelay_proxy.core.fleet.target import BY_HAND, EngineSource, Key, Origin, Target, Wanted
from pdrelay_proxy.core.model import Role

A = Wanted(Role.PREFILL, Target.parse("a:80"), "uid-a")


def carried_out(desired, current):
    """Return what is there after the actions, each of which must be possible when its turn comes."""
    found = dict(current)
    for action in diff(desired, current):
        assert (action.key in found) == (action.verb != "add")
        if action.verb == "remove":
            del found[action.key]
        else:
            found[action.key] = action.origin
    return found


def verbs(desired, current):
    return [(action.verb, action.key.authority) for action in diff(desired, current)]


def origins(*wanted, source=EngineSource.PODS):
    return {one.key: Origin(source, 1, one) for one in wanted}


ENGINES = st.builds(
    Wanted,
    st.sampled_from(Role),
    st.builds(
        lambda host, ranks, revision: Target(Address("http", host, 80), ranks, None, revision),
        st.sampled_from("abc"),
        st.sampled_from([(None,), (0, 1)]),
        st.sampled_from([None, "v1", "v2"]),
    ),
    st.sampled_from(["", "uid-1", "uid-2"]),
    st.booleans(),
)


VIEWS = st.dictionaries(st.sampled_from(EngineSource), st.lists(ENGINES, max_size=6), max_size=3)


THERE = st.dictionaries(
    st.builds(Key, st.sampled_from(Role), st.sampled_from(["a:80", "b:80", "c:80"])), st.just(BY_HAND), max_size=2
)


def union(views):
    sources = Sources(views, now=0)
    for source, engines in views.items():
        for _ in sources.replace_in_steps(source, engines, now=1):
            pass
    return sources.desired_at(dict.fromkeys(key for view in sources.views.values() for key in view.engines))


@given(VIEWS, VIEWS, THERE)
def test_the_difference_leads_to_what_is_desired_and_then_to_nothing_more(before, after, by_hand):
    """Level-triggered: whatever was missed on the way, one look is enough; and nothing that is static is touched."""
    current = carried_out(union(before), by_hand)
    desired = union(after)

    found = carried_out(desired, current)

    assert diff(desired, found) == []
    assert {key: found[key] for key in by_hand} == by_hand
    serving = {key for key, origin in desired.items() if not origin.wanted.leaves}
    assert serving | by_hand.keys() <= found.keys() <= desired.keys() | by_hand.keys()
    for key in found.keys() - by_hand.keys():
        assert found[key].wanted == desired[key].wanted
        assert found[key].source is desired[key].source


@given(VIEWS)
def test_an_engine_is_desired_if_any_source_wants_it(views):
    """The union; and it leaves as soon as one of them says so."""
    desired = union(views)

    assert desired.keys() == {one.key for engines in views.values() for one in engines}
    for key, origin in desired.items():
        naming = [source for source in EngineSource if any(one.key == key for one in views.get(source, ()))]
        assert origin.source is naming[0]
        last = [{one.key: one for one in sorted(views[source], key=lambda one: not one.leaves)} for source in naming]
        assert origin.wanted.leaves == any(view[key].leaves for view in last)


def test_an_engine_that_leaves_drains_and_one_that_stays_after_all_comes_back():
    """A pod that is not ready for a moment keeps its record."""
    leaving = origins(replace(A, leaves=True))

    assert verbs(leaving, origins(A)) == [("drain", "a:80")]
    assert verbs(origins(A), leaving) == [("undrain", "a:80")]
    assert verbs(leaving, {}) == []  # it was never here, and is not worth a start


def test_an_engine_that_leaves_may_be_told_later_to_move_its_streams():
    """One that drains too slowly is drained again; the order is not given twice."""
    leaving, moving = origins(replace(A, leaves=True)), origins(replace(A, leaves=True, moves=True))

    assert verbs(moving, origins(A)) == [("drain", "a:80")]
    assert verbs(moving, leaving) == [("drain", "a:80")]
    assert verbs(moving, moving) == []
    assert verbs(origins(A), moving) == [("undrain", "a:80")]


@pytest.mark.parametrize(
    "other",
    [
        replace(A, identity="uid-b"),
        replace(A, target=Target.parse("a:80#dp=2")),
        replace(A, target=Target.parse("a:80#revision=v2")),
    ],
)
def test_another_engine_at_the_same_address_is_a_new_one(other):
    """Nothing that is known of the old one holds for it; and the old one goes first, or the address would be taken."""
    assert verbs(origins(other), origins(A)) == [("remove", "a:80"), ("add", "a:80")]


@pytest.mark.parametrize(("old", "new"), [("1", "2"), ("", "2"), ("1", "")])
def test_an_entry_that_was_added_anew_is_a_new_engine(old, new):
    """Also one that somebody wrote by hand, without its addition; an engine of another source is the same."""
    before, after = (origins(replace(A, added=added), source=EngineSource.STORE) for added in (old, new))

    assert verbs(after, before) == [("remove", "a:80"), ("add", "a:80")]
    assert verbs(origins(A), before) == [("adopt", "a:80")]


def test_an_engine_changes_hands_without_a_break():
    """The store named it before its pod was seen; when the one no longer wants it, the other still does."""
    adopted = diff(
        origins(A, source=EngineSource.PODS), {A.key: Origin(EngineSource.STORE, 3, replace(A, identity=""))}
    )

    assert adopted == [Action("adopt", A.key, Origin(EngineSource.PODS, 1, A))]
