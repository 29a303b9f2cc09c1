"""The promise: through the router, text and logprobs are those of a single engine, and D computed no prompt."""

from contextlib import ExitStack

import pytest

from support.cluster import Watch
from support.questions import compare, ids, questions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

COMPUTED, CACHED, LOADED = (
    f"vllm:prompt_tokens_by_source_total|{source}"
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
)


def test_one_pair(one_pair, engines, reference_answer):
    """50 prompts over 1P1D: equal, and every prompt token but the last was loaded or in D's own cache."""
    asked = questions(50, seed=1)
    with Watch(engines.d0) as decode, Watch(engines.p0) as prefill:
        answers, wrong = compare(one_pair, asked, reference_answer)

    assert wrong == {}
    assert decode.delta(COMPUTED) == len(asked)  # the last token of each prompt: vLLM needs its logits
    assert decode.delta(LOADED) + decode.delta(CACHED) == sum(answer.prompt_tokens - 1 for answer in answers)
    assert decode.delta(LOADED) == decode.delta("vllm:external_prefix_cache_hits_total") > 0
    assert decode.delta("vllm:pdrelay_loads_total") == prefill.delta("vllm:pdrelay_leases_done_total") == len(asked)
    assert decode.delta("vllm:pdrelay_bytes_transferred_total") > 0


def test_two_pairs(two_pairs, engines, reference_answer):
    """30 prompts over 2P2D: equal, all four engines took part, each D met each P."""
    asked = questions(30, seed=2)
    watches = [Watch(spec) for spec in (engines.p0, engines.p1, engines.d0, engines.d1)]
    with ExitStack() as stack:
        p0, p1, d0, d1 = (stack.enter_context(watch) for watch in watches)
        answers, wrong = compare(two_pairs, asked, reference_answer)

    assert wrong == {}
    assert d0.delta("vllm:pdrelay_loads_total") + d1.delta("vllm:pdrelay_loads_total") == len(asked)
    assert abs(d0.delta("vllm:pdrelay_loads_total") - d1.delta("vllm:pdrelay_loads_total")) <= 2
    assert abs(p0.delta("vllm:pdrelay_leases_done_total") - p1.delta("vllm:pdrelay_leases_done_total")) <= 2
    assert d0.delta(COMPUTED) + d1.delta(COMPUTED) == len(asked)
    cached = d0.delta(CACHED) + d1.delta(CACHED)
    assert d0.delta(LOADED) + d1.delta(LOADED) + cached == sum(answer.prompt_tokens - 1 for answer in answers)


@pytest.mark.parametrize("length", [1, 2, 8, 31, 32, 33, 63, 64, 65, 66, 96, 97, 1500])
def test_around_block_boundaries(one_pair, engines, reference_answer, length):
    """Shorter than a block (32 tokens), exactly at a boundary, one beyond: the places where off-by-one lives."""
    question = ids([(7 * length + 11 * i) % 480 + 10 for i in range(length)])
    with Watch(engines.d0) as decode:
        _, wrong = compare(one_pair, [question], reference_answer)

    assert wrong == {}
    assert decode.delta(LOADED) == length - 1
    assert decode.delta(COMPUTED) == 1


@pytest.mark.parametrize(("shared", "loaded"), [(0, 99), (31, 99), (32, 67), (96, 3), (99, 3), (100, 3)])
def test_prefix_cache_hits_on_the_decode_engine(one_pair, engines, reference_answer, shared, loaded):
    """Only what D's own cache lacks is moved: whole blocks of 32 that a prompt shares with an earlier one stay."""
    first = [(13 * shared + 5 * i) % 470 + 20 for i in range(100)]
    second = first[:shared] + [(29 * i + shared) % 470 + 21 for i in range(100 - shared)]
    compare(one_pair, [ids(first)], reference_answer)
    with Watch(engines.d0) as decode:
        _, wrong = compare(one_pair, [ids(second)], reference_answer)

    assert wrong == {}
    assert decode.delta(LOADED) == loaded
    assert decode.delta(CACHED) == 99 - loaded


def test_a_full_hit_on_the_decode_engine_moves_nothing(one_pair, engines, reference_answer):
    """A prompt of three blocks and one token: everything but the last token is here, and P hears so at once."""
    question = ids([(17 * i) % 450 + 30 for i in range(97)])
    compare(one_pair, [question], reference_answer)
    with Watch(engines.d0) as decode, Watch(engines.p0) as prefill:
        _, wrong = compare(one_pair, [question], reference_answer)

    assert wrong == {}
    assert decode.delta("vllm:pdrelay_bytes_transferred_total") == 0
    assert prefill.delta("vllm:pdrelay_leases_dropped_total") == 1


def test_nothing_is_held_afterwards(one_pair, two_pairs, engines, reference_answer):
    """Every block is back when it was read, on an engine that sleeps: no lease has to run out."""
    with ExitStack() as stack:
        p0, p1, *_ = (stack.enter_context(Watch(spec)) for spec in (engines.p0, engines.p1, engines.d0, engines.d1))
        compare(two_pairs, questions(4, seed=3), reference_answer)

    granted, done, expired = (
        sum(p.delta(f"vllm:pdrelay_leases_{what}_total") for p in (p0, p1)) for what in ("granted", "done", "expired")
    )
    assert (granted, done, expired) == (4, 4, 0)
