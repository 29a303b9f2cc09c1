"""Turns are fair on both sides, and every pair gets its turn."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import ANY, Instance, InstanceId, Role
from pdrelay_proxy.core.routing.policies.round_robin import Rotation, RoundRobin

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
    pairs = [turns(policy, 2, 2, 1)[0] for _ in range(4) if policy.choose(decode)]

    assert len(set(pairs)) == 4
    assert decode == [policy.choose(decode) for _ in range(2)]


@given(st.lists(st.sampled_from([(0, 1), (2, 3), (0, 1, 2, 3)]), min_size=40, max_size=80))
def test_choices_among_other_engines_do_not_disturb_the_turns(mix):
    """Several models behind one router: with one counter, every second request would always meet the same pair."""
    policy = RoundRobin()
    p, d = instances(Role.PREFILL, 4), instances(Role.DECODE, 4)
    seen = {}
    for places in mix:
        pair = policy.pair([p[i] for i in places], [d[i] for i in places])
        seen.setdefault(places, []).append(pair)

    for places, pairs in seen.items():
        size = len(places) ** 2
        assert all(len(set(pairs[i : i + size])) == size for i in range(len(pairs) - size + 1))


def test_engines_that_do_not_fit_each_other_never_meet_and_all_others_do():
    """Two versions of vLLM during an upgrade, and one engine that fits both."""
    policy = RoundRobin()
    p, d = instances(Role.PREFILL, 2), instances(Role.DECODE, 3)
    fits = {(p[0], d[0]), (p[0], d[1]), (p[1], d[1]), (p[1], d[2])}
    pairs = Counter(policy.pair(p, d, ANY, lambda one, other: (one, other) in fits) for _ in range(40))

    assert set(pairs) == fits
    assert set(pairs.values()) == {10}


@given(asked=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), start=st.integers(0, 9))
def test_each_set_has_turns_of_its_own(asked, start):
    """Whether it comes as the same object or as an equal one; a new one goes on where all of them are."""
    sets = [tuple(f"engine-{number}" for number in range(size + 1)) for size in range(4)]
    rotation = Rotation(start)
    turns = {}
    total = start
    for place, is_same in asked:
        expected = turns.get(place, total)
        turns[place], total = expected + 1, total + 1
        copied = rotation.copy()
        assert rotation.next(sets[place] if is_same else (*sets[place],)) == expected
        assert copied.next(sets[place]) == expected
