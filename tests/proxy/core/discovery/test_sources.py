"""A source's view holds until its next, within a bound."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.discovery.sources import MAX_ENGINES, Sources
from pdrelay_proxy.core.fleet.target import EngineSource, Target, Wanted
from pdrelay_proxy.core.model import Role

A = Wanted(Role.PREFILL, Target.parse("a:80"), "uid-a")


def replaced(sources, source, engines, now):
    """Have a source say all it has; return the addresses that differ."""
    return [key for keys in sources.replace_in_steps(source, engines, now=now) for key in keys]


def desired(sources):
    return sources.desired_at({key for view in sources.views.values() for key in view.engines})


def test_a_view_holds_until_the_source_says_something_else():
    """What is unreachable takes nothing away: it only grows old."""
    sources = Sources([EngineSource.PODS, EngineSource.STORE], now=10)
    assert list(sources.missing) == [EngineSource.PODS, EngineSource.STORE]

    assert replaced(sources, EngineSource.PODS, [A], now=20)
    assert not replaced(sources, EngineSource.PODS, [A], now=30)
    sources.heard(EngineSource.PODS, now=40)

    assert list(sources.missing) == [EngineSource.STORE]
    assert desired(sources).keys() == {A.key}
    assert [one.age_s for one in sources.freshness(now=100)] == [60, 90]
    assert sources.views[EngineSource.PODS].generation == 1


def test_the_first_view_counts_even_if_it_is_empty():
    """Nothing is something that a source can say."""
    sources = Sources([EngineSource.STORE], now=0)

    assert not replaced(sources, EngineSource.STORE, [], now=1)
    assert list(sources.missing) == []
    assert sources.views[EngineSource.STORE].generation == 1


def test_of_two_pods_at_one_address_the_one_that_stays_counts():
    """On the host's network the next pod takes the address while the last one still goes."""
    new = replace(A, identity="uid-new")
    sources = Sources([EngineSource.PODS], now=0)

    replaced(sources, EngineSource.PODS, [new, replace(A, leaves=True)], now=1)

    assert desired(sources)[A.key].wanted == new


def test_a_view_of_thousands_is_copied_once_however_many_steps_it_takes():
    """A copy for each step made the work grow with the square of the engines; what changes in between is kept."""
    many = [Wanted(Role.DECODE, Target(Address("http", f"h{n}", 80))) for n in range(2000)]
    sources = Sources([EngineSource.PODS], now=0)
    views = []
    steps = sources.replace_in_steps(EngineSource.PODS, many, now=1)
    for some in steps:
        views.append(sources.views[EngineSource.PODS].engines)
        if some:
            sources.change(EngineSource.PODS, {A.key: A}, now=1)
            break
    for _ in steps:
        views.append(sources.views[EngineSource.PODS].engines)

    assert len(views) > 2000 / 50
    assert len({id(view) for view in views}) <= 3  # the empty one before, and one for each who changed it
    assert desired(sources).keys() == {A.key, *(one.key for one in many)}


def test_a_view_is_bounded():
    """A selector that fits everything does not take the router's memory."""
    many = [Wanted(Role.DECODE, Target(Address("http", f"h{n}", 80))) for n in range(MAX_ENGINES + 5)]
    sources = Sources([EngineSource.PODS], now=0)

    replaced(sources, EngineSource.PODS, many, now=1)

    assert len(desired(sources)) == MAX_ENGINES


def test_an_engine_beyond_the_bound_comes_in_when_another_one_has_gone():
    """It stayed out until the router started anew: a source does not repeat what it has said."""
    many = [Wanted(Role.DECODE, Target(Address("http", f"h{n}", 80))) for n in range(MAX_ENGINES + 1)]
    sources = Sources([EngineSource.STORE], now=0)
    replaced(sources, EngineSource.STORE, many, now=1)
    (out,) = {one.key for one in many} - desired(sources).keys()

    changed = sources.change(EngineSource.STORE, {A.key: A, many[10].key: None}, now=2)
    assert changed == [many[10].key, out]
    assert sources.change(EngineSource.STORE, {many[11].key: None}, now=3) == [many[11].key, A.key]


ENGINES = [Wanted(Role.DECODE, Target(Address("http", host, 80))) for host in "abcde"]


SAID = st.one_of(st.none(), st.booleans())  # of an engine: it is gone, stays, or leaves


@given(st.lists(st.tuples(st.booleans(), st.dictionaries(st.sampled_from(ENGINES), SAID)), max_size=8))
def test_as_many_engines_are_in_as_there_is_room_and_none_goes_for_another(steps):
    """Whether a source says all, or what has changed; also for engines that leave, which have streams."""
    sources = Sources([EngineSource.PODS], now=0, max_engines=3)
    named = {}
    before = set()
    for is_all, said in steps:
        new = {one.key: None if leaves is None else replace(one, leaves=leaves) for one, leaves in said.items()}
        named = {key: one for key, one in {**named, **new}.items() if one is not None}
        if is_all:
            replaced(sources, EngineSource.PODS, named.values(), now=1)
        else:
            sources.change(EngineSource.PODS, new, now=1)
        found = sources.views[EngineSource.PODS].engines

        assert len(found) == min(3, len(named))
        assert found.items() <= named.items()
        assert before & named.keys() <= found.keys()
        before = {*found}
