"""Turns are fair on both sides, and every pair gets its turn."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.core.policies.round_robin import RoundRobin

sizes = st.integers(1, 12)


def instances(role, count):
    return [Instance(InstanceId(f"{role}-{i}"), role, Address("http", "h", i + 1)) for i in range(count)]


def turns(policy, x, y, count):
    prefill, decode = instances(Role.PREFILL, x), instances(Role.DECODE, y)
    return [policy.pair(prefill, decode) for _ in range(count)]


@given(x=sizes, y=sizes, before=st.integers(0, 300))
def test_every_pair_occurs_once_in_any_x_times_y_turns(x, y, before):
    """Two counters that advance together would use 2 of the 4 pairs of 2 and 2, and never find a bad one."""
    policy = RoundRobin()
    turns(policy, x, y, before)

    assert x * y == len(set(turns(policy, x, y, x * y)))


@given(x=sizes, y=sizes, count=st.integers(1, 300))
def test_no_engine_gets_more_than_its_share(x, y, count):
    """Prefill engines differ by one request at most, decode engines by two (a shift skips one turn)."""
    chosen = turns(RoundRobin(), x, y, count)
    for side, size, slack in ((0, x, 1), (1, y, 2)):
        load = Counter(pair[side].id for pair in chosen)
        counts = [load[key] for key in load] + [0] * (size - len(load))
        assert max(counts) - min(counts) <= slack


@given(x=sizes, y=sizes, more_x=sizes, more_y=sizes, before=st.integers(0, 50))
def test_engines_that_join_take_part_at_once(x, y, more_x, more_y, before):
    """The sets grow at run time; the promise holds for what they are now."""
    policy = RoundRobin()
    turns(policy, x, y, before)
    x, y = x + more_x, y + more_y

    assert x * y == len(set(turns(policy, x, y, x * y)))


def test_requests_that_are_not_split_have_turns_of_their_own():
    """Or a mix of both kinds could starve a pair."""
    policy = RoundRobin()
    decode = instances(Role.DECODE, 2)
    pairs = [turns(policy, 2, 2, 1)[0] for _ in range(4) if policy.one(decode)]

    assert len(set(pairs)) == 4
    assert decode == [policy.one(decode) for _ in range(2)]
