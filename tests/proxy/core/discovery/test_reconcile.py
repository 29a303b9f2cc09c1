"""What there should be, what there is, and what follows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.discovery.reconcile import MOST, Action, Sources, diff, entry_name, entry_of, read_entry
from pdrelay_proxy.core.fleet.target import BY_HAND, EngineSource, Key, Origin, Target, Wanted
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.errors import AddressError

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
        sources.replace(source, engines, now=1)
    return sources.desired()


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


def test_a_view_holds_until_the_source_says_something_else():
    """What is unreachable takes nothing away: it only grows old."""
    sources = Sources([EngineSource.PODS, EngineSource.STORE], now=10)
    assert list(sources.missing) == [EngineSource.PODS, EngineSource.STORE]

    assert sources.replace(EngineSource.PODS, [A], now=20)
    assert not sources.replace(EngineSource.PODS, [A], now=30)
    sources.heard(EngineSource.PODS, now=40)

    assert list(sources.missing) == [EngineSource.STORE]
    assert sources.desired().keys() == {A.key}
    assert [one.age_s for one in sources.freshness(now=100)] == [60, 90]
    assert sources.views[EngineSource.PODS].generation == 1


def test_the_first_view_counts_even_if_it_is_empty():
    """Nothing is something that a source can say."""
    sources = Sources([EngineSource.STORE], now=0)

    assert not sources.replace(EngineSource.STORE, [], now=1)
    assert list(sources.missing) == []
    assert sources.views[EngineSource.STORE].generation == 1


def test_of_two_pods_at_one_address_the_one_that_stays_counts():
    """On the host's network the next pod takes the address while the last one still goes."""
    new = replace(A, identity="uid-new")
    sources = Sources([EngineSource.PODS], now=0)

    sources.replace(EngineSource.PODS, [new, replace(A, leaves=True)], now=1)

    assert sources.desired()[A.key].wanted == new


def test_a_view_of_thousands_is_copied_once_however_many_steps_it_takes():
    """A copy for each step made the work grow with the square of the engines; what changes in between is kept."""
    many = [Wanted(Role.DECODE, Target(Address("http", f"h{n}", 80))) for n in range(2000)]
    sources = Sources([EngineSource.PODS], now=0)
    views, steps = [], sources.replace_in_steps(EngineSource.PODS, many, now=1)
    for some in steps:
        views.append(sources.views[EngineSource.PODS].engines)
        if some:
            sources.change(EngineSource.PODS, {A.key: A}, now=1)
            break
    for _ in steps:
        views.append(sources.views[EngineSource.PODS].engines)

    assert len(views) > 2000 / 50
    assert len({id(view) for view in views}) <= 3  # the empty one before, and one for each who changed it
    assert sources.desired().keys() == {A.key, *(one.key for one in many)}


def test_a_view_is_bounded():
    """A selector that fits everything does not take the router's memory."""
    many = [Wanted(Role.DECODE, Target(Address("http", f"h{n}", 80))) for n in range(MOST + 5)]
    sources = Sources([EngineSource.PODS], now=0)

    sources.replace(EngineSource.PODS, many, now=1)

    assert len(sources.desired()) == MOST


def test_an_engine_beyond_the_bound_comes_in_when_another_one_has_gone():
    """It stayed out until the router started anew: a source does not repeat what it has said."""
    many = [Wanted(Role.DECODE, Target(Address("http", f"h{n}", 80))) for n in range(MOST + 1)]
    sources = Sources([EngineSource.STORE], now=0)
    sources.replace(EngineSource.STORE, many, now=1)
    (out,) = {one.key for one in many} - sources.desired().keys()

    changed = sources.change(EngineSource.STORE, {A.key: A, many[10].key: None}, now=2)
    assert changed == [many[10].key, out]
    assert sources.change(EngineSource.STORE, {many[11].key: None}, now=3) == [many[11].key, A.key]


ENGINES = [Wanted(Role.DECODE, Target(Address("http", host, 80))) for host in "abcde"]
SAID = st.one_of(st.none(), st.booleans())  # of an engine: it is gone, stays, or leaves


@given(st.lists(st.tuples(st.booleans(), st.dictionaries(st.sampled_from(ENGINES), SAID)), max_size=8))
def test_as_many_engines_are_in_as_there_is_room_and_none_goes_for_another(steps):
    """Whether a source says all, or what has changed; also for engines that leave, which have streams."""
    sources, named, before = Sources([EngineSource.PODS], now=0, most=3), {}, set()
    for is_all, said in steps:
        new = {one.key: None if leaves is None else replace(one, leaves=leaves) for one, leaves in said.items()}
        named = {key: one for key, one in {**named, **new}.items() if one is not None}
        if is_all:
            sources.replace(EngineSource.PODS, named.values(), now=1)
        else:
            sources.change(EngineSource.PODS, new, now=1)
        found = sources.views[EngineSource.PODS].engines

        assert len(found) == min(3, len(named))
        assert found.items() <= named.items()
        assert before & named.keys() <= found.keys()
        before = {*found}


@given(
    st.sampled_from(Role),
    st.sampled_from(["h:80", "https://h_x-y.example:1", "[fd00::1]:8000", "10.0.0.1:65535", "x" * 60 + ".y:1"]),
    st.sampled_from([(None,), (0,), (0, 1, 2)]),
    st.sampled_from([None, *EngineMode]),
    st.sampled_from([None, "v1", "5f6d-a.b_c"]),
    st.booleans(),
    st.booleans(),
)
def test_an_entry_says_what_was_written(role, address, ranks, mode, revision, leaves, moves):
    """Whatever an engine is, another router reads the same."""
    wanted = Wanted(role, Target(Address.parse(address), ranks, mode, revision), leaves=leaves, moves=moves)

    assert read_entry(entry_of(wanted)) == wanted


def test_names_of_entries_are_taken_by_every_store_and_tell_engines_apart():
    """A ConfigMap takes letters, digits and -_. only, and 253 of them."""
    long = ".".join(["x" * 60] * 4)
    names = [entry_name(Key(role, at)) for role in Role for at in ("a-b:1", "a_b:1", "a:1", "[fd::1]:1", f"{long}:1")]

    assert len(set(names)) == len(names)
    assert all(len(name) < 253 and not name.strip("abcdefghijklmnopqrstuvwxyz0123456789._-") for name in names)


@pytest.mark.parametrize("text", ["", "[]", '{"role":"both","target":"a:1"}', '{"role":"decode","target":"a"}', "{}"])
def test_what_is_no_entry_is_refused(text):
    """Somebody edited the ConfigMap by hand."""
    with pytest.raises(AddressError):
        read_entry(text)
