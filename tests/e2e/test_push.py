"""Push on real engines: the same promise as pull's, whichever leg comes first."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from support.cluster import Watch, metrics, wait_until
from support.legs import coordinates, plain, prompt_of, push
from support.proc import cpu_seconds
from support.questions import ask, client, compare, differences, ids, questions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 32  # tokens
BLOCK_BYTES = 128 * 1024  # of the tiny model in float32: 4 layers, keys and values
COMPUTED, CACHED, LOADED = (
    f"vllm:prompt_tokens_by_source_total|{source}"
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
)
BORROWING = "vllm:pdrelay_requests_waiting_for_remote_kv"
fresh = itertools.count(1000)  # numbers of prompts that no engine has in its cache


@pytest.fixture(scope="module")
def pair(pushing):
    """A prefill engine, a decode engine, and how the second finds the first."""
    return pushing.p0, pushing.d0, coordinates(pushing.p0, pushing.d0)


def test_fifty_prompts_through_the_router(pushing, start_router, reference_answer):
    """1P1D, all kinds of requests: equal, and both legs are sent at once from the second request on."""
    p, d = pushing.p0, pushing.d0
    asked = questions(50, seed=10)
    url = start_router("router-push", [p], [d])
    with Watch(p) as prefill, Watch(d) as decode:
        answers, wrong = compare(url, asked, reference_answer)

    assert wrong == {}
    assert decode.delta(COMPUTED) == len(asked)  # the last token of each prompt: vLLM needs its logits
    assert decode.delta(LOADED) + decode.delta(CACHED) == sum(answer.prompt_tokens - 1 for answer in answers)
    assert decode.delta("vllm:pdrelay_loads_total") == prefill.delta("vllm:pdrelay_registrations_total") > 0
    assert prefill.delta("vllm:pdrelay_leases_expired_total") == 0


def test_two_pairs_through_the_router(pushing, start_router, reference_answer):
    """2P2D: equal, and every decode engine was written to by every prefill engine."""
    asked = questions(30, seed=12)
    specs = (pushing.p0, pushing.p1, pushing.d0, pushing.d1)
    url = start_router("router-push-2p2d", specs[:2], specs[2:])
    watches = [Watch(spec) for spec in specs]
    with ExitStack() as stack:
        _, _, d0, d1 = (stack.enter_context(watch) for watch in watches)
        answers, wrong = compare(url, asked, reference_answer)

    assert wrong == {}
    assert d0.delta(COMPUTED) + d1.delta(COMPUTED) == len(asked)
    loaded = sum(d.delta(LOADED) + d.delta(CACHED) for d in (d0, d1))
    assert loaded == sum(answer.prompt_tokens - 1 for answer in answers)
    assert all(watch.delta("vllm:pdrelay_loads_total") > 10 for watch in (d0, d1))
    assert all(metrics(spec)["vllm:pdrelay_handshakes_total"] == 2 for spec in specs[2:])


def test_prompts_that_share_a_beginning_and_come_at_the_same_time(pair, reference_answer):
    """vLLM lets a request hit blocks that another one computes in the very same step: they must not leave before it."""
    p, d, where = pair
    wrong = {}
    for _ in range(6):
        beginning = prompt_of(next(fresh), 200)
        asked = [ids([*beginning, *prompt_of(next(fresh), 20 + 9 * i)]) for i in range(8)]
        with ThreadPoolExecutor(len(asked)) as pool:
            # D has lent its blocks when P begins: whatever P takes for computed leaves at once
            answers = list(pool.map(lambda question: push(p, d, question, where, prefill_after=0.5)[0], asked))
        for question, answer in zip(asked, answers, strict=True):
            if found := differences(answer, reference_answer(question)):
                wrong[str(question.prompt[-5:])] = found

    assert wrong == {}


@pytest.mark.parametrize(
    ("length", "delays"),
    [
        (900, {"prefill_after": 1.0}),
        (901, {"decode_after": 1.0}),
        *((length, {}) for length in (1, 2, 31, 32, 33, 64, 65, 257, 700, 1500)),
    ],
)
def test_equal_whichever_leg_comes_first(pair, reference_answer, length, delays):
    """Around the boundaries of blocks (32) and of P's steps (256): nothing but the last token is computed on D."""
    p, d, where = pair
    question = ids(prompt_of(next(fresh), length))
    with Watch(p) as prefill, Watch(d) as decode:
        answer, _ = push(p, d, question, where, **delays)

    assert differences(answer, reference_answer(question)) == []
    assert decode.delta(LOADED) == length - 1
    assert decode.delta(COMPUTED) == 1
    assert prefill.delta("vllm:pdrelay_leases_expired_total") == 0


@pytest.mark.parametrize("on_prefill", [0, 96, 300])
@pytest.mark.parametrize("on_decode", [0, 96, 300])
def test_prefix_cache_hits_on_either_engine(pair, reference_answer, on_prefill, on_decode):
    """What P has cached goes first; what D has cached is not sent, and is not asked for."""
    p, d, where = pair
    prompt = prompt_of(next(fresh), 650)
    for spec, shared in ((p, on_prefill), (d, on_decode)):
        if shared:
            plain(spec, prompt[:shared] + prompt_of(99, 40), tokens=1)
    with Watch(p) as writes, Watch(d) as decode:
        answer, _ = push(p, d, ids(prompt), where)

    cached = on_decode // BLOCK * BLOCK
    assert differences(answer, reference_answer(ids(prompt))) == []
    assert writes.delta(CACHED) == on_prefill // BLOCK * BLOCK
    assert decode.delta(CACHED) == cached
    assert decode.delta(LOADED) == 649 - cached
    blocks = -(-649 // BLOCK) - cached // BLOCK
    assert writes.delta("vllm:pdrelay_bytes_transferred_total") == blocks * BLOCK_BYTES


def test_blocks_travel_while_the_next_are_computed(pair):
    """1,500 tokens in steps of 64 are written in many pieces."""
    p, d, where = pair
    d_waits = threading.Event()
    with Watch(p) as writes, ThreadPoolExecutor(1) as pool:
        question = ids(prompt_of(next(fresh), 1500))
        answer = pool.submit(push, p, d, question, where, prefill_after=d_waits)
        wait_until(lambda: metrics(d)[BORROWING] == 1, seconds=30, what="D has lent its blocks")
        d_waits.set()
        answer.result()

    assert writes.delta("vllm:pdrelay_transfer_seconds_count") >= 5


def test_a_prefill_that_is_preempted(pair, reference_answer):
    """P runs out of blocks: a prefill that is being pushed loses its own, others use them, and it starts again."""
    p, d, where = pair
    questions = [ids(prompt_of(next(fresh), 1400)) for _ in range(3)]
    with Watch(p) as watch, Watch(d), ThreadPoolExecutor(24) as pool:
        # Their answers grow by a block every 32 tokens, and vLLM takes from those who came last.
        growing = [pool.submit(plain, p, prompt_of(next(fresh), 60), tokens=400) for _ in range(12)]
        wait_until(lambda: metrics(p)["vllm:num_requests_running"] >= 6, seconds=30, what="P is busy")
        answers = [pool.submit(push, p, d, question, where) for question in questions]
        found = [answer.result()[0] for answer in answers]
        for other in growing:
            other.result()

    assert watch.delta("vllm:num_preemptions_total") > 0
    assert watch.delta("vllm:pdrelay_leases_expired_total") == 0
    assert [differences(answer, reference_answer(q)) for q, answer in zip(questions, found, strict=True)] == [[]] * 3


def test_a_decode_engine_that_waits_sleeps(pushing):
    """vLLM alone would step a thousand times a second, beside the prefill that needs the machine."""
    p, d = pushing.p0, pushing.d0
    where = coordinates(p, d)
    may_begin = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(push, p, d, ids(prompt_of(51, 700)), where, prefill_after=may_begin)
        try:
            wait_until(lambda: metrics(d)[BORROWING] == 1, seconds=20, what="D waits")
            before = cpu_seconds(pushing.decode_pid)
            start = time.monotonic()
            time.sleep(5)
            used = (cpu_seconds(pushing.decode_pid) - before) / (time.monotonic() - start)
            with client(d.base_url) as api:  # and it wakes when somebody else asks
                ask(api, ids(prompt_of(52, 20)), tokens=1)
        finally:
            may_begin.set()
        answer.result()

    assert used < 0.2
