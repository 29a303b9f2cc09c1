"""Whole replays: what adds up, what is known by hand, and what can only become better."""

from dataclasses import replace

import msgspec
import pytest

from pdrelay_proxy.core.model import Role
from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.replay.routers import CHOICES
from pdrelay_tools.planning.replay.simulation import SimulatedFleet
from pdrelay_tools.planning.replay.simulation import replay as served_by
from pdrelay_tools.planning.replay.summary import Targets, summarise
from pdrelay_tools.planning.replay.traces import Conversations, NoReplay, Trace, Turn

CHATS = Conversations(40, 4, 4.0, 2.0, 320, 200, 60).generate(16, 0)
SMALL = SimulatedFleet(2, 2)


def changed(fleet, **model):
    return replace(fleet, model=msgspec.structs.replace(fleet.model, **model))


def replay(trace, policy="round_robin", fleet=SMALL, seed=0):
    return served_by(trace, policy, fleet, seed=seed)


def summary(*args, **options):
    return summarise(replay(*args, **options), Targets())


@pytest.mark.parametrize("policy", [*CHOICES, "prefix/session"])
def test_every_request_ends_once_and_tokens_add_up(policy):
    """Each turn has its two legs; what a leg had and what it computed is its prompt; P computes what it lacks."""
    found = replay(CHATS, policy)

    assert sorted(map(id, (one.turn for one in found.served))) == sorted(map(id, CHATS.turns))
    for one in found.served:
        (p_role, p), (d_role, d) = one.legs
        assert (p_role, d_role) == (Role.PREFILL, Role.DECODE)
        assert p.prompt_tokens == d.prompt_tokens == p.cached_tokens + p.computed_tokens
        assert d.computed_tokens == 1
        assert one.came < one.first <= one.ended
        assert 0 < one.new_tokens <= p.computed_tokens
    made = sum(tokens for role, log in found.engines for _, tokens in log.gaps)
    assert made == sum(turn.output_tokens - 1 for turn in CHATS.turns)


@pytest.mark.parametrize("policy", CHOICES)
def test_the_same_seed_is_the_same_replay(policy):
    """Nothing reads a clock, and chance has a seed."""
    assert summary(CHATS, policy) == summary(CHATS, policy)


def test_one_request_by_hand():
    """Leg, prefill, leg, transfer, first step of the decode engine; then each further token."""
    model = EngineModel(
        step_s=0.01, prefill_token_s=0.001, prefill_context_s=0, decode_request_s=0.002, decode_context_s=0,
        leg_s=0.005, kv_bytes_per_token=100, link_bytes_per_s=10_000, link_s=0.5,
    )  # fmt: skip
    (one,) = replay(Trace(16, [Turn("a", range(10), 100, 11, 3.0)]), fleet=SimulatedFleet(1, 1, model)).served

    assert one.came == 3.0
    assert one.ttft_s == pytest.approx(0.005 + 0.11 + 0.005 + 0.5 + 1.0 + 0.011)
    assert one.itl_s == pytest.approx(0.012)
    assert one.new_tokens == 100


def test_a_turn_waits_for_the_one_before_and_thinks():
    """The second turn comes two seconds after the end of the first."""
    turns = [Turn("a", range(20), 100, 11, 0.0), Turn("a", range(20), 150, 5, 2.0, goes_on=0, waits=True)]
    first, second = replay(Trace(16, turns)).served

    assert second.came == pytest.approx(first.ended + 2)
    assert second.new_tokens == 150 - 96  # of the 111 tokens so far, six blocks are full


def test_an_endless_cache_on_one_pair_computes_only_what_is_new_to_p():
    """One P and no eviction: it has each earlier prompt, but no answer, which D has generated."""
    found = replay(CHATS, fleet=changed(SimulatedFleet(1, 1), kv_tokens=10**9))

    for one in found.served:
        before = [turn for turn in CHATS.turns if turn.session == one.turn.session and turn is not one.turn]
        had = max(
            (turn.prompt_tokens // 16 for turn in before if turn.prompt_tokens < one.turn.prompt_tokens), default=0
        )
        assert one.legs[0][1].cached_tokens >= had * 16


def test_a_larger_cache_finds_more():
    """From a cache of a few conversations to an endless one."""
    hits = [summary(CHATS, fleet=changed(SMALL, kv_tokens=size)).prefill_hits for size in (4096, 16384, 10**9)]

    assert hits == sorted(hits)
    assert hits[0] < hits[2]


@pytest.mark.parametrize("seed", range(3))
def test_more_engines_are_never_worse_without_a_cache(seed):
    """Nothing is shared, so round robin over twice the engines has at most the same TTFT, within 2 %."""
    alone = Conversations(300, 1, 20.0, 0.0, 16, 2000, 100).generate(16, seed)
    few, many = (summary(alone, fleet=SimulatedFleet(size, size)) for size in (2, 4))

    assert many.ttft_p50 <= few.ttft_p50 * 1.02
    assert many.ttft_p99 <= few.ttft_p99 * 1.02
    assert many.itl_p99 <= few.itl_p99 * 1.02


def test_a_faster_link_is_never_worse():
    """With one request at a time, the difference is that of the transfer."""
    trace = Trace(16, [Turn("a", range(70), 1000, 50, 0.0)])
    slow, fast = (
        summary(trace, fleet=changed(SMALL, link_bytes_per_s=speed, link_s=0.0)).ttft_p50 for speed in (1e9, 2e9)
    )

    assert slow - fast == pytest.approx(1000 * 131_072 / 2e9)


def test_sessions_stay_where_they_were():
    """`session` sends each conversation to one pair."""
    assert summary(CHATS, "session").prefill_hits > summary(CHATS).prefill_hits
    assert summary(CHATS, "session").later_ttft_p50 < summary(CHATS).later_ttft_p50


def test_a_decode_engine_that_has_a_conversation_serves_it_alone():
    """With room for new bytes, what is mostly cached has one leg, and D computes the rest."""
    found = replay(CHATS, "prefix:1024")

    alone = [one for one in found.served if len(one.legs) == 1]
    assert 10 < len(alone) < len(found.served) - 10
    for one in alone:
        ((role, leg),) = one.legs
        assert role is Role.DECODE
        assert leg.cached_tokens > 0
        assert leg.cached_tokens + leg.computed_tokens == leg.prompt_tokens
    assert all(len(one.legs) == 2 for one in replay(CHATS, "prefix:0").served)


def test_targets_are_counted():
    """All requests are good without targets, and none with those that nothing keeps."""
    found = replay(CHATS)

    assert summarise(found, Targets()).good == 1
    assert summarise(found, Targets(ttft_s=1e-6)).good == 0
    assert 0 < summarise(found, Targets(ttft_s=summarise(found, Targets()).ttft_p50)).good < 1


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("fastest", "no policy 'fastest'"),
        ("prefix/", "no policy"),
        ("a/b/c", "no policy"),
        ("prefix:", "'' in the policy 'prefix:'"),
        ("prefix:-1", "neither a number of bytes"),
        ("prefix/vllm-router", "partner"),
    ],
)
def test_a_policy_that_does_not_exist(policy, why):
    """One sentence that names those there are."""
    with pytest.raises(NoReplay, match=why):
        replay(CHATS, policy)


def test_a_request_that_no_engine_has_room_for():
    """It would wait for ever."""
    with pytest.raises(NoReplay, match="request 0 has 2,000 tokens"):
        replay(Trace(16, [Turn("a", range(200), 1999, 1, 0.0)]), fleet=changed(SMALL, kv_tokens=1024))
