"""Who exists, and what is known of them."""

from operator import attrgetter

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, facts_of_models
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import EngineRole, InstanceId, RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.core.schemas import ModelCard
from pdrelay_proxy.errors import AlreadyKnown, NoInstance, UnknownInstance
from pdrelay_proxy.settings import Settings

A, B = Address("http", "a", 1), Address("http", "b", 1)


def test_ids_are_stable_and_say_nothing_about_addresses():
    """Clients see them in headers and errors."""
    registry = Registry()
    added = [registry.add(Role.PREFILL, A), registry.add(Role.DECODE, A), registry.add(Role.DECODE, B)]

    assert [instance.id for instance in added] == ["prefill-0", "decode-0", "decode-1"]
    assert tuple(added[1:]) == tuple(registry.known(Role.DECODE))


def test_an_engine_is_added_once_to_a_role():
    """Twice the same would get twice the load; another scheme is still the same port."""
    registry = Registry()
    registry.add(Role.DECODE, A)
    with pytest.raises(AlreadyKnown, match="a:1 is already known as decode-0"):
        registry.add(Role.DECODE, Address("https", "a", 1))
    with pytest.raises(AlreadyKnown, match="a:1 is already known as decode-0"):
        registry.add(Role.DECODE, A, rank=1)


def test_each_rank_is_an_instance_of_its_own():
    """With its own load, health and cache."""
    registry = Registry()
    added = registry.add_target(Role.DECODE, Target(A, (0, 1), EngineMode.PUSH), now=0)

    assert [(one.id, one.rank) for one in added] == [("decode-0", 0), ("decode-1", 1)]
    assert registry.member(added[0].id).facts == EngineCapabilities(mode=EngineMode.PUSH)
    with pytest.raises(AlreadyKnown):
        registry.add_target(Role.DECODE, Target(A, (1,)), now=0)


@pytest.mark.parametrize("role", Role)
def test_no_engine_is_an_error(role):
    """An empty list would surprise every policy."""
    with pytest.raises(NoInstance, match=f"no {role} instance"):
        Registry().usable(role)


def test_when_none_can_serve_the_error_says_what_became_of_each():
    """That is what an operator asks first."""
    registry = Registry()
    names = [registry.add(Role.DECODE, Address("http", "d", port)).id for port in (1, 2, 3)]
    registry.member(names[0]).life.missed("cannot be reached", now=0)
    registry.departures.drain(names[1], now=0)
    registry.remove(names[2], now=0)
    with pytest.raises(NoInstance) as caught:
        registry.usable(Role.DECODE)

    expected = "no decode instance can take a request: decode-0 is starting (cannot be reached), decode-1 is draining"
    assert str(caught.value) == expected


def test_the_error_names_a_few_of_thousands():
    """It goes to each client while a zone is gone."""
    registry = Registry()
    for port in range(1, 1001):
        registry.departures.drain(registry.add(Role.DECODE, Address("http", "d", port)).id, now=0)

    with pytest.raises(NoInstance, match=r"decode-15 is draining, and 984 more$"):
        registry.usable(Role.DECODE)


def broken_at(member, now):
    for number in range(3):
        member.life.failed(RequestId(f"r{number}"), Failure.TIMEOUT, now=now)


def tried(member):
    broken_at(member, -60.0)
    member.life.may_serve(now=0.0)
    member.life.claimed(RequestId("trial"))


@pytest.mark.parametrize(
    ("happen", "interval_s", "seconds"),
    [
        ([lambda one: broken_at(one, 0.0)], 5.0, 30),
        ([lambda one: broken_at(one, 0.0), lambda one: broken_at(one, -12.5)], 5.0, 18),
        ([lambda one: broken_at(one, 0.0), lambda one: one.life.missed("away", now=0.0)], 5.0, 5),
        ([lambda one: one.life.missed("away", now=0.0)], 0.0, None),
        ([lambda one: one.life.drain(now=0.0)], 5.0, None),
        ([lambda one: one.life.drain(now=0.0), tried], 5.0, 1),
        ([], 5.0, None),
    ],
    ids=["rests", "two rest", "one is away", "no probes", "drained", "tried", "none"],
)
def test_the_error_says_when_one_may_serve_again(happen, interval_s, seconds):
    """Retry-After: too short and clients come in vain, too long and they wait for nothing."""
    registry = Registry(Settings(circuit_breaker_failures=3, ejection_time_s=30.0, health_check_interval_s=interval_s))
    for port, each in enumerate(happen, 1):
        each(registry.member(registry.add(Role.DECODE, Address("http", "d", port)).id))
    with pytest.raises(NoInstance) as caught:
        registry.usable(Role.DECODE, now=0.0)

    assert caught.value.retry_after_s == seconds


def test_a_list_that_was_handed_out_does_not_change():
    """A request chooses from what was there when it came."""
    registry = Registry()
    registry.add(Role.DECODE, A)
    before = registry.usable(Role.DECODE)
    registry.add(Role.DECODE, B)

    assert len(before) == 1


@pytest.mark.parametrize("verb", ["remove", "departures.drain", "departures.undrain"])
def test_nothing_is_done_to_who_is_not_there(verb):
    """A typing error must not look like success."""
    with pytest.raises(UnknownInstance, match="no instance 'decode-7'"):
        attrgetter(verb)(Registry())(InstanceId("decode-7"), now=0)


def test_an_engine_that_retires_goes_when_it_has_nothing_left():
    """Its address may be used again before that, by an engine with another id."""
    registry = Registry()
    old = registry.add(Role.DECODE, A)
    registry.member(old.id).load.enter(RequestId("r"))
    registry.departures.retire(old.id, now=0)
    new = registry.add(Role.DECODE, A)
    registry.settle(patience_s=60, now=1)
    assert registry.known(Role.DECODE) == (old, new)
    assert registry.usable(Role.DECODE) == (new,)
    with pytest.raises(AlreadyKnown, match="a:1 is already known as decode-1"):
        registry.departures.undrain(old.id, now=1)
    registry.member(old.id).load.leave(RequestId("r"))

    assert registry.settle(patience_s=60, now=2) == [old]
    assert registry.known(Role.DECODE) == (new,)


def test_an_engine_that_retires_may_be_kept_after_all():
    """By hand; one that was drained before goes at once."""
    registry = Registry()
    one, other = registry.add(Role.DECODE, A), registry.add(Role.DECODE, B)
    registry.departures.retire(one.id, now=0)
    registry.departures.undrain(one.id, now=0)
    registry.departures.drain(other.id, now=0)
    registry.settle(patience_s=60, now=1)
    registry.departures.retire(other.id, now=1)
    registry.settle(patience_s=60, now=2)

    assert registry.known(Role.DECODE) == (one,)


def test_facts_are_added_up_and_those_of_the_removed_are_dropped():
    """They come from probes and from answers, in any order, and late."""
    registry = Registry()
    name = registry.add(Role.PREFILL, A).id
    registry.learn(name, EngineCapabilities(frozenset({"m"}), "0.32"))
    registry.learn(name, EngineCapabilities(mode=EngineMode.PULL))
    registry.learn(name, EngineCapabilities(version="0.33", connector="pdrelay"))
    assert registry.member(name).facts == EngineCapabilities(frozenset({"m"}), "0.33", "pdrelay", EngineMode.PULL)
    registry.remove(name, now=0)
    registry.learn(name, EngineCapabilities())

    assert registry.get(name) is None


def test_who_asks_is_told_of_each_engine_that_leaves_its_role():
    """It is removed, or serves another one: what was true of it there is not true any more."""
    registry = Registry()
    first, second = (registry.add(Role.DECODE, address) for address in (A, B))
    left = []
    registry.tell_departures(left.append)
    registry.remove(first.id, now=0.0)
    registry.learn(second.id, EngineCapabilities(kv_role="kv_both"))
    registry.departures.change_role(second.id, EngineRole.PREFILL, now=0.0)
    registry.settle(patience_s=60, now=61.0)

    assert left == [first.id, second.id]


def test_engines_that_serve_the_same_share_what_is_known_of_it():
    """Two thousand engines with two thousand adapters each would need gigabytes."""
    registry = Registry()
    cards = [ModelCard("m", root="/m"), *(ModelCard(f"x{n}", parent="m", root=f"/x/{n}") for n in range(3))]
    for address in (A, B):
        engine = registry.add(Role.DECODE, address)
        registry.learn(engine.id, facts_of_models(cards))
    first, second = (member.facts for member in registry.members())

    assert first.models is second.models
    assert first.adapters is second.adapters
    assert first.files is second.files
