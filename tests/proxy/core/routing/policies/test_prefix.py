"""Prompts go where their beginning is."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from xpyd_proxy.core.routing.policies.least_loaded import LeastLoaded
from xpyd_proxy.core.routing.policies.prefix import BLOCK, SLACK, Prefix
from xpyd_proxy.core.routing.policies.round_robin import RoundRobin

ENGINES = [Instance(InstanceId(f"p{i}"), Role.PREFILL, Address("http", "h", i + 1)) for i in range(4)]


def ask(*letters):
    """A prompt of so many blocks."""
    return RoutingHints(prompt="".join(letter * BLOCK for letter in letters).encode())


def idle(_):
    return 0.0


def test_a_prompt_goes_to_the_longest_common_beginning():
    """The engine that has more of it cached computes less."""
    policy = Prefix(idle, RoundRobin())
    first, second = policy.one(ENGINES, ask(*"abc")), policy.one(ENGINES, ask(*"xyz"))
    assert first != second
    assert policy.one(ENGINES, ask(*"abcd")) == first
    assert policy.one(ENGINES, ask(*"xyzz")) == second
    third = policy.one([one for one in ENGINES if one != first], ask(*"abq"))
    assert policy.one(ENGINES, ask(*"abqq")) == third


def test_a_block_is_known_by_all_that_came_before_it():
    """A cache is of no use in the middle of a prompt."""
    policy = Prefix(idle, RoundRobin())
    policy.one(ENGINES, ask(*"abc"))
    others = [policy.copy().one(ENGINES, ask(*"xbc")), policy.copy().one(ENGINES, ask(*"yyyabc"))]

    assert others == [ENGINES[1]] * 2


def test_an_engine_that_is_too_busy_is_passed_over():
    """Or one popular beginning would make one engine do everything."""
    load = dict.fromkeys([one.id for one in ENGINES], 0.0)
    policy = Prefix(lambda one: load[one.id], LeastLoaded(lambda one: load[one.id]))
    home = policy.one(ENGINES, ask("a"))
    load[home.id] = SLACK
    assert policy.one(ENGINES, ask("a")) == home
    load[home.id] = SLACK + 1
    assert policy.one(ENGINES, ask("a")) != home


@settings(deadline=None)
@given(st.lists(st.tuples(st.text("ab", max_size=6), st.integers(0, 3)), max_size=80))
def test_the_load_stays_within_its_limit(steps):
    """Whatever the prompts: nobody who is chosen is more than the slack above the least loaded."""
    load = dict.fromkeys([one.id for one in ENGINES], 0)
    policy = Prefix(lambda one: load[one.id], LeastLoaded(lambda one: load[one.id]))
    for letters, ended in steps:
        least = min(load.values())
        chosen = policy.one(ENGINES, ask(*letters))
        assert load[chosen.id] <= least + SLACK
        load[chosen.id] += 1
        load[ENGINES[ended].id] = max(0, load[ENGINES[ended].id] - 1)


def test_memory_is_bounded_and_the_beginning_is_forgotten_last():
    """Without its beginning the rest of a prompt is of no use."""
    policy = Prefix(idle, RoundRobin(), most=10)
    home = policy.one(ENGINES, ask(*"abcdefgh"))
    policy.one(ENGINES, ask(*"uvwxyz"))

    assert len(policy._seen) == 10
    assert policy.one(ENGINES, ask(*"abcd")) == home


def test_short_prompts_are_spread():
    """They have no block to be known by."""
    policy = Prefix(idle, LeastLoaded(idle))
    counts = Counter(policy.one(ENGINES, RoutingHints(prompt=b"hello")).id for _ in range(40))

    assert set(counts.values()) == {10}
