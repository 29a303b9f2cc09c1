"""A decode engine that is overloaded, killed, frozen or cut off: P's blocks come back, and no text is wrong."""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from support.cluster import OVER_TCP, engine_spec, metrics, nothing_held, start_engine, wait_until
from support.legs import decode, plain, prefill, prompt_of, text_of
from xpyd_proxy.local.recipe import Connector, Role

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LEASE = 3.0  # s
HELD = "vllm:xpyd_leases_held"
EXPIRED = "vllm:xpyd_leases_expired_total"


@pytest.fixture(scope="module")
def short_leases(fleet, model):
    """A prefill engine with a short lease, and a decode engine that serves one request at a time."""
    config = {"kv_lease_duration": LEASE, "transfer_timeout": 60}
    p = engine_spec(
        "p-short",
        model,
        role=Role.PREFILL,
        connector=Connector.XPYD,
        extra_connector_config=config,
        extra_env=OVER_TCP,
    )
    d = narrow_decode_engine("d-narrow", model, config)
    children = [start_engine(fleet, spec) for spec in (p, d)]
    fleet.wait_ready(children, timeout_s=300)
    yield p, d, children
    fleet.stop(*(child for child in children if child in fleet.children))


def narrow_decode_engine(name, model, config):
    return engine_spec(
        name,
        model,
        role=Role.DECODE,
        connector=Connector.XPYD,
        extra_connector_config=config,
        extra_args=("--max-num-seqs", "1"),
        max_model_len=4096,
        extra_env=OVER_TCP,
    )


@contextlib.contextmanager
def queue_of(count, p, d, *, first):
    """Fill the only seat of D with a long answer and queue ``count`` prefilled requests behind it."""
    prompts = [prompt_of(first + number) for number in range(count)]
    with ThreadPoolExecutor(count + 1) as pool:
        blocker = pool.submit(_hold_seat, d)
        wait_until(lambda: metrics(d)["vllm:num_requests_running"] == 1, seconds=30, what="the long answer runs")
        # Each decode leg follows its prefill at once, as a router sends it: unclaimed leases are short here.
        answers = [pool.submit(decode, d, prompt, prefill(p, prompt)) for prompt in prompts]
        wait_until(lambda: metrics(d)["vllm:xpyd_requests_borrowing"] == count, seconds=30, what="all are queued")
        yield prompts, answers, blocker


def _hold_seat(d):
    """Run an answer far longer than any test here needs; whoever is done with it closes D's side."""
    with contextlib.suppress(httpx.TransportError):
        decode(d, prompt_of(999, 8), None, tokens=4000)


def test_an_overloaded_decode_engine_loses_no_lease(short_leases, engines):
    """20 requests wait for more than three leases in D's queue: none expires, all are loaded, every text is right."""
    p, d, _ = short_leases
    expired, loads = metrics(p)[EXPIRED], metrics(d)["vllm:xpyd_loads_total"]
    with queue_of(20, p, d, first=200) as (prompts, answers, _):
        queued = time.monotonic()
        answers[0].result()
        waited = time.monotonic() - queued
        texts = [text_of(answer.result()) for answer in answers]

    assert waited > 3 * LEASE
    assert texts == [plain(engines.reference, prompt) for prompt in prompts]
    assert metrics(p)[EXPIRED] == expired
    assert metrics(d)["vllm:xpyd_loads_total"] == loads + 20
    wait_until(lambda: nothing_held(p), seconds=1, what="P holds nothing")


def test_a_frozen_decode_engine_costs_one_lease_and_no_text(short_leases, engines):
    """SIGSTOP of D with 20 leases: P is free within lease + 2 s; after SIGCONT every text is right all the same."""
    p, d, (_, child) = short_leases
    before = metrics(p)[EXPIRED]
    with queue_of(20, p, d, first=230) as (prompts, answers, _):
        child.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: nothing_held(p), seconds=LEASE + 2, what="P frees what a frozen D had leased")
            for number in range(300, 310):  # and uses the blocks for something else
                plain(p, prompt_of(number, 1000), tokens=1)
        finally:
            child.signal(signal.SIGCONT)
        texts = [text_of(answer.result()) for answer in answers]

    assert metrics(p)[EXPIRED] == before + 20
    assert texts == [plain(engines.reference, prompt) for prompt in prompts]


def test_a_read_that_outlives_its_lease_is_not_believed(short_leases, engines):
    """D's read is under way when D freezes for three leases; P reuses the blocks; the read ends after the thaw.

    vLLM's own connector answers HTTP 200 with the wrong text here; ours asks whether the lease held.
    """
    p, d, (p_child, d_child) = short_leases
    warm, prompt = prompt_of(320), prompt_of(321, 900)
    assert text_of(decode(d, warm, prefill(p, warm))) == plain(engines.reference, warm)
    params, before = prefill(p, prompt), metrics(d)["vllm:xpyd_loads_failed_lease_total"]
    with ThreadPoolExecutor(1) as pool:
        p_child.signal(signal.SIGSTOP)  # so that the read is posted, but not answered
        answer = pool.submit(decode, d, prompt, params)
        wait_until(lambda: metrics(d)["vllm:xpyd_requests_borrowing"] == 1, seconds=5, what="D reads")
        time.sleep(0.3)
        d_child.signal(signal.SIGSTOP)
        start = time.monotonic()
        try:
            p_child.signal(signal.SIGCONT)
            wait_until(lambda: metrics(p)[HELD] == 0, seconds=LEASE + 2, what="P frees what a frozen D had leased")
            for number in range(330, 365):  # the whole cache of P once
                plain(p, prompt_of(number, 1900), tokens=1)
            time.sleep(max(0.0, 3 * LEASE - (time.monotonic() - start)))
        finally:
            d_child.signal(signal.SIGCONT)
        text = text_of(answer.result())

    assert text == plain(engines.reference, prompt)
    assert metrics(d)["vllm:xpyd_loads_failed_lease_total"] == before + 1


def test_a_killed_decode_engine_frees_everything_within_a_second(short_leases, engines, fleet):
    """kill -9 of D with 20 leases: noticed when its connection closes; other decode engines are served meanwhile."""
    p, d, (_, child) = short_leases
    prompt = prompt_of(290)
    try:
        with queue_of(20, p, d, first=260) as (_, answers, _):
            assert metrics(p)[HELD] == 20
            child.signal(signal.SIGKILL)
            wait_until(lambda: nothing_held(p), seconds=1, what="P frees what a dead D had leased")
            text = text_of(decode(engines.d1, prompt, prefill(p, prompt)))
    finally:
        fleet.stop(child)

    assert all(answer.exception() is not None for answer in answers)  # broken connections, no made-up answers
    assert text == plain(engines.reference, prompt)
    assert metrics(p)["vllm:xpyd_leases_peer_lost_total"] >= 20


def test_a_request_that_never_reaches_decode_is_freed_at_lease_end(short_leases):
    """The TTL of last resort, on an engine that sleeps."""
    p, _, _ = short_leases
    prefill(p, prompt_of(295))
    granted = time.monotonic()
    assert not nothing_held(p)
    wait_until(lambda: nothing_held(p), seconds=LEASE + 1, what="P frees what nobody asked for")

    assert time.monotonic() - granted > LEASE - 0.5
