"""What counters prove, and which engines are asked."""

import pytest

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import Role
from pdrelay_tools.proving.core.readiness import (
    KvCounters,
    PairCounters,
    ReadinessLine,
    Sign,
    choose_pairs,
    is_ready,
    moved_between,
    prompt_length,
)

NOTHING = KvCounters({}, None, None)


def members_of(prefills, decodes):
    """Engines with these facts."""
    registry = Registry()
    for role, sides in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
        for number, facts in enumerate(sides):
            (instance,) = registry.add_target(role, Target.parse(f"{role}{number}:80"), now=0.0)
            registry.learn(instance.id, facts)
    return registry.members()


def names_of(pairs):
    return [tuple(member.instance.id for member in pair) for pair in pairs]


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (1, 5), (5, 1), (3, 2), (2, 3), (40, 10)])
def test_each_engine_is_asked_and_not_each_pair(prefills, decodes):
    """Fifty engines are six hundred pairs."""
    members = members_of([EngineCapabilities()] * prefills, [EngineCapabilities()] * decodes)
    pairs = names_of(choose_pairs(members))

    assert {name for pair in pairs for name in pair} == {member.instance.id for member in members}
    assert len(pairs) == max(prefills, decodes)


def test_engines_are_asked_with_those_that_fit_them():
    """Two models behind one router: each has its own."""
    a, b = (EngineCapabilities(fingerprint=mark) for mark in "ab")

    assert names_of(choose_pairs(members_of([a, b], [b, a]))) == [("prefill-0", "decode-1"), ("prefill-1", "decode-0")]
    assert names_of(choose_pairs(members_of([a], [b]))) == []


OURS = EngineCapabilities(connector="pdrelay", engine_id="p"), EngineCapabilities(connector="pdrelay", engine_id="d")
IN_TREE = EngineCapabilities(connector="nixl"), EngineCapabilities(connector="nixl")


def moved(facts, *, prefill=NOTHING, decode=NOTHING, before=NOTHING, requests=1):
    (pair,) = choose_pairs(members_of(facts[:1], facts[1:]))
    return moved_between(pair, PairCounters(NOTHING, prefill, before, decode), tokens=128, requests=requests)


@pytest.mark.parametrize(
    ("facts", "counters", "said"),
    [
        (OURS, {"decode": KvCounters({"p": (5e6, 0.1)}, 5e6, 128)}, "5,000,000 bytes"),  # pull
        (OURS, {"decode": KvCounters({"p_dp1": (5e6, 0.1)}, 5e6, 128)}, "5,000,000 bytes"),  # of a rank
        (OURS, {"prefill": KvCounters({"d": (5e6, 0.1)}, 5e6, None)}, "5,000,000 bytes"),  # push
        (OURS, {"decode": KvCounters({"other": (5e6, 0.1)}, 5e6, 128)}, ""),  # of another pair
        (OURS, {}, ""),
        (IN_TREE, {"decode": KvCounters({}, 4e6, 127)}, "the KV of 127 tokens"),
        (IN_TREE, {"decode": KvCounters({}, 0.0, 127)}, ""),  # they were to come, and did not
        (IN_TREE, {"decode": KvCounters({}, None, 127)}, "the KV of 127 tokens"),
        (IN_TREE, {"decode": KvCounters({}, None, 127), "requests": 2}, ""),  # of one of the two
        (IN_TREE, {"decode": KvCounters({}, None, 254), "requests": 2}, "the KV of 127 tokens"),
        (IN_TREE, {"decode": KvCounters({}, None, 0.0)}, ""),
        (IN_TREE, {"prefill": KvCounters({}, 4e6, None)}, "4,000,000 bytes"),
        (IN_TREE, {}, None),
    ],
)
def test_kv_has_moved_if_an_engine_has_counted_it(facts, counters, said):
    """An answer proves nothing: a decode engine computes what it does not get."""
    assert moved(facts, **counters) == said


def test_what_was_counted_before_is_no_proof():
    """The engines may have served others."""
    old = KvCounters({"p": (5e6, 0.1)}, 5e6, 900)

    assert moved(OURS, before=old, decode=old) == ""


def test_the_prompt_fills_blocks_of_the_engine_with_the_largest_ones():
    """A decode engine loads whole blocks."""
    assert [prompt_length(sizes) for sizes in ([], [16, 32], [16, 1056])] == [128, 128, 2112]


def test_what_is_not_known_is_not_ready():
    """A script goes by the exit code."""
    assert is_ready([ReadinessLine(Sign.OK, "a", "b")])
    assert not is_ready([ReadinessLine(Sign.OK, "a", "b"), ReadinessLine(Sign.UNKNOWN, "a", "b")])
