"""The router's own policy expected_ttft beside the others, in virtual time: what it is for."""

import random
from functools import cache

import msgspec
import pytest

from pdrelay_proxy.core.model import Role, RoutingHints
from pdrelay_proxy.planning.replay.engine import EngineModel
from pdrelay_proxy.planning.replay.routers import ReplayRouter
from pdrelay_proxy.planning.replay.simulation import SimulatedFleet, replay
from pdrelay_proxy.planning.replay.summary import Targets, summarise
from pdrelay_proxy.planning.replay.traces import BlockNames, Conversations, Trace, Turn, poisson

FLEET = SimulatedFleet(4, 4)
CHATS = Conversations(150, 6, 3.0, 3.0, 1000, 500, 100).generate(16, 0)
BUSY = Conversations(200, 6, 16.0, 1.0, 1000, 500, 100).generate(16, 1)
HALF = msgspec.structs.replace(EngineModel(), step_s=0.016, prefill_token_s=1e-4, prefill_context_s=2.6e-9)


def prompts(count, per_s, long=()):
    """Prompts of 400 tokens that have nothing in common; those with these numbers have 100,000."""
    names, turns = BlockNames(0), []
    for number, at_s in zip(range(count), poisson(per_s, 3), strict=False):
        size = 100_000 if number in long else 400
        turns.append(Turn(f"r{number}", names.take(size // 16 + 2), size, 20, at_s))
    return Trace(16, turns)


@cache
def chats(policy):
    return summarise(replay(CHATS, policy, FLEET, seed=0), Targets())


@cache
def busy(policy):
    return summarise(replay(BUSY, policy, FLEET, seed=0), Targets())


def test_later_turns_wait_far_less_than_in_turn_and_streams_go_on_as_before():
    """Without a word about sessions."""
    ours, in_turn = chats("expected_ttft"), chats("round_robin")

    assert ours.later_ttft_p50 < 0.6 * in_turn.later_ttft_p50
    assert ours.itl_p99 < 1.1 * in_turn.itl_p99


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two", "prefix", "session"])
@pytest.mark.slow  # a trace is replayed under each policy
def test_no_other_policy_is_better_by_more_than_chance(policy):
    """In the middle and in the tail, quiet and busy: 5 % are what another seed changes."""
    for load in (chats, busy):
        ours, other = load("expected_ttft"), load(policy)

        assert ours.ttft_p50 < 1.05 * other.ttft_p50
        assert ours.ttft_p95 < 1.05 * other.ttft_p95
        assert ours.ttft_p99 < 1.05 * other.ttft_p99


def test_no_engine_gets_most_of_a_rush():
    """All routers that see the same would send it there."""
    ours = busy("expected_ttft")

    assert ours.prefill_unevenness < 1.5
    assert ours.decode_unevenness < 1.5


def test_a_prefill_engine_half_as_fast_gets_half_the_tokens_when_all_have_to_work():
    """By the time that its legs take."""
    found = replay(prompts(1500, 160.0), "expected_ttft", SimulatedFleet(4, 2, odd_model=HALF), seed=0)
    *quick, slow = [log.busy_s for role, log in found.engines if role is Role.PREFILL]

    assert 0.8 < slow / (sum(quick) / 3) < 1.2  # it works as long as the others, at half their pace


def test_a_very_long_prompt_holds_up_few_others():
    """Its tokens count, where the number of requests says that its engine is free."""
    trace = prompts(600, 15.0, long=(100, 350))
    ours, in_turn, by_load = (
        summarise(replay(trace, policy, FLEET, seed=0), Targets())
        for policy in ("expected_ttft", "round_robin", "power_of_two")
    )

    assert ours.ttft_p99 < 0.1 * in_turn.ttft_p99
    assert ours.ttft_p99 < by_load.ttft_p99


@pytest.mark.slow  # traces are replayed
def test_decode_engines_serve_alone_only_with_a_bound_for_their_streams():
    """0 is never; the longer a pause may be, the more they serve."""
    alone = []
    for policy in ("expected_ttft", "expected_ttft:20ms", "expected_ttft:60ms"):
        served = replay(CHATS, policy, FLEET, seed=0).served
        alone.append(sum(len(one.legs) == 1 for one in served))

    assert alone[0] == 0
    assert 0 < alone[1] < alone[2]


# An engine of a small machine: prompts take longer than it takes to decide, steps of a size differ, and its cache holds
# a tenth of all conversations.
SMALL = EngineModel(
    step_s=0.003, prefill_token_s=8e-5, prefill_context_s=2e-8, decode_request_s=4e-4, decode_context_s=1e-7,
    leg_s=0.012, api_request_s=0.002, api_token_s=3e-4, jitter=1.3, max_num_batched_tokens=2048,
    kv_tokens=223 * 32, kv_bytes_per_token=2048, link_bytes_per_s=5e8, link_s=0.01,
)  # fmt: skip


def short_chats(count, per_s, first_name=0, seed=0):
    """Chats of 8 turns: a question of 260 tokens, then of 60, answers of 24."""
    chance, names, turns, at_s = random.Random(seed), BlockNames(first_name), [], 0.0
    for chat in range(count):
        at_s += chance.expovariate(per_s)
        sizes = [260 + 84 * turn for turn in range(8)]
        blocks = names.take(-(-(sizes[-1] + 24) // 32))
        for turn, size in enumerate(sizes):
            waits = chance.expovariate(1.0) if turn else at_s
            turns.append(Turn(f"c{chat}", blocks, size, 24, waits, len(turns) - 1 if turn else None, waits=turn > 0))
    return Trace(32, turns)


@cache
def evicting(policy):
    fleet = SimulatedFleet(2, 2, SMALL, kv_events=True)
    return [summarise(replay(short_chats(60, 3.0, seed=seed), policy, fleet, seed=seed), Targets()) for seed in (0, 1)]


@pytest.mark.parametrize("policy", ["expected_ttft:800", "prefix:800"])
def test_conversations_are_served_where_they_are_cached_while_caches_evict_and_times_are_noisy(policy):
    """Of what the best of all caches had, nearly all is hit; a P that has evicted a prompt is not asked for it."""
    found, in_turn = evicting(policy), evicting("round_robin")

    assert all(one.best_hits > 0.95 for one in found)
    assert all(one.later_ttft_p50 < 0.6 * other.later_ttft_p50 for one, other in zip(found, in_turn, strict=True))
    assert all(one.computed_per_new < other.computed_per_new for one, other in zip(found, in_turn, strict=True))


def test_what_a_prefill_engine_has_evicted_is_not_believed_to_be_there():
    """Its events tell, from a moment behind its answer on; before that its prompt is on its way, and counts."""
    now = [0.0]
    router = ReplayRouter("expected_ttft", (1, 1), short_chats(1, 1.0), lambda: now[0], 0, kv_events=True)
    events = router.events("prefill-0")
    prefill, _ = router.choose(0)
    ask = RoutingHints(prompt=router._trace.ids(1))
    caches = router.fleet.caches
    assert caches.matched(prefill, ask) > 900

    for name in range(8):
        events.stored(name, name - 1 if name else None)
    router.prefilled(prefill, 0, 0, 0.0)
    assert caches.matched(prefill, ask) > 900
    for name in reversed(range(8)):
        events.removed(name)
    now[0] = 1.0
    assert caches.matched(prefill, ask) == 0
