"""A prefill engine that dies or hangs, a decode engine that freezes over a read: no long wait, no wrong text."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from support.cluster import OVER_TCP, engine_spec, metrics, start_engine, wait_until
from support.legs import decode, plain, prefill, prompt_of, text_of
from xpyd_proxy.local.recipe import Connector, Role

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TIMEOUT, LEASE = 4.0, 3.0  # s


@pytest.fixture(scope="module")
def model_engines(fleet, model):
    """A prefill engine to be killed, and one decode engine for each failure policy."""
    config = {"transfer_timeout": TIMEOUT, "handshake_timeout": 2, "kv_lease_duration": LEASE, "retry_after": 0.1}
    p = _engine("p-victim", model, config, role=Role.PREFILL)
    decoders = {
        policy: _engine(f"d-{policy}", model, config, role=Role.DECODE, failure_policy=policy)
        for policy in ("recompute", "fail")
    }
    children = [start_engine(fleet, spec) for spec in (p, *decoders.values())]
    fleet.wait_ready(children, timeout_s=300)
    yield p, decoders, dict(zip(decoders, children[1:], strict=True))
    names = {child.name for child in children}  # the prefill engine may have been started again
    fleet.stop(*(child for child in fleet.children if child.name in names))


def _engine(name, model, config, **options):
    return engine_spec(
        name, model, connector=Connector.XPYD, extra_connector_config=config, extra_env=OVER_TCP, **options
    )


@pytest.fixture
def p(model_engines, fleet):
    """The prefill engine, alive; started again on the same ports if a test killed it."""
    spec, _, _ = model_engines
    alive = [child for child in fleet.children if child.name == spec.name and child.alive]
    if not alive:
        for child in [child for child in fleet.children if child.name == spec.name]:
            fleet.stop(child)
        alive = [start_engine(fleet, spec)]
        fleet.wait_ready(alive, timeout_s=120)
    return spec, alive[0]


@pytest.fixture(params=["recompute", "fail"])
def d(request, model_engines):
    return request.param, model_engines[1][request.param]


def check(policy, response, prompt, reference):
    """recompute: the text of the reference; fail: an error for this request."""
    if policy == "recompute":
        assert text_of(response) == plain(reference, prompt)
    else:
        failed = response.status_code >= 500 or response.json()["choices"][0]["finish_reason"] == "error"
        assert failed, response.text


def serves_on(spec, reference, number):
    """The decode engine is alive, right, and waits for nobody."""
    prompt = prompt_of(number, 50)

    assert plain(spec, prompt) == plain(reference, prompt)
    assert httpx.get(f"{spec.base_url}/health", trust_env=False).status_code == 200
    wait_until(lambda: metrics(spec)["vllm:xpyd_requests_borrowing"] == 0, seconds=2, what="D borrows nothing")


def test_hung_before_the_transfer(p, d, engines):
    """SIGSTOP of P between the legs: D gives up within transfer_timeout; P thaws and serves on."""
    (spec, child), (policy, decoder) = p, d
    warm, prompt = prompt_of(70), prompt_of(71, 900)
    assert text_of(decode(decoder, warm, prefill(spec, warm))) == plain(engines.reference, warm)
    params = prefill(spec, prompt)
    child.signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        response = decode(decoder, prompt, params)
        seconds = time.monotonic() - start
        check(policy, response, prompt, engines.reference)
        serves_on(decoder, engines.reference, 72)
    finally:
        child.signal(signal.SIGCONT)

    assert seconds < TIMEOUT + 2
    again = prompt_of(73)
    wait_until(lambda: metrics(spec)["vllm:xpyd_leases_held"] == 0, seconds=8, what="P frees after it thawed")
    assert text_of(decode(decoder, again, prefill(spec, again))) == plain(engines.reference, again)


def test_killed_before_the_transfer(p, d, engines):
    """kill -9 of P between the legs, met before or not: the request ends at once, by policy."""
    (spec, child), (policy, decoder) = p, d
    prompt = prompt_of(80)
    params = prefill(spec, prompt)
    child.signal(signal.SIGKILL)
    start = time.monotonic()
    response = decode(decoder, prompt, params)
    seconds = time.monotonic() - start

    check(policy, response, prompt, engines.reference)
    assert seconds < 2
    serves_on(decoder, engines.reference, 81)


def test_killed_during_the_transfer(p, d, engines):
    """P hangs so that the read is under way, then dies: the request ends when it dies, not at the timeout."""
    (spec, child), (policy, decoder) = p, d
    warm, prompt = prompt_of(90), prompt_of(91, 900)
    decode(decoder, warm, prefill(spec, warm))
    params = prefill(spec, prompt)
    child.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode, decoder, prompt, params)
        wait_until(lambda: metrics(decoder)["vllm:xpyd_requests_borrowing"] == 1, seconds=5, what="D reads")
        time.sleep(0.5)
        child.signal(signal.SIGKILL)
        killed = time.monotonic()
        response = answer.result()

    assert time.monotonic() - killed < 2
    check(policy, response, prompt, engines.reference)
    serves_on(decoder, engines.reference, 92)


def test_killed_after_the_transfer(p, d, engines):
    """What D has read is D's: an answer under way does not notice that P died."""
    (spec, child), (_, decoder) = p, d
    prompt = prompt_of(95)
    params = prefill(spec, prompt)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode, decoder, prompt, params, tokens=400)
        wait_until(lambda: metrics(spec)["vllm:xpyd_leases_held"] == 0, seconds=5, what="P was told it is read")
        child.signal(signal.SIGKILL)
        text = text_of(answer.result())

    assert text == plain(engines.reference, prompt, tokens=400)


def test_frozen_during_the_read_while_the_blocks_are_reused(p, d, engines, model_engines):
    """D's read is under way when D freezes for three leases, past its timeout; P reuses the blocks; D thaws.

    The read is given up, and what it still brings must not land in blocks that D has begun to use for itself.
    """
    (spec, child), (policy, decoder) = p, d
    frozen = model_engines[2][policy]
    warm, prompt = prompt_of(110), prompt_of(111 if policy == "fail" else 112, 900)
    decode(decoder, warm, prefill(spec, warm))
    params = prefill(spec, prompt)
    with ThreadPoolExecutor(1) as pool:
        child.signal(signal.SIGSTOP)  # so that the read is posted, but not answered
        answer = pool.submit(decode, decoder, prompt, params)
        wait_until(lambda: metrics(decoder)["vllm:xpyd_requests_borrowing"] == 1, seconds=5, what="D reads")
        time.sleep(0.3)
        frozen.signal(signal.SIGSTOP)
        child.signal(signal.SIGCONT)
        start = time.monotonic()
        try:
            wait_until(lambda: metrics(spec)["vllm:xpyd_leases_held"] == 0, seconds=LEASE + 2, what="the lease ends")
            for number in range(120, 160):  # the whole cache of P once
                plain(spec, prompt_of(number, 1900), tokens=1)
            time.sleep(max(0.0, 3 * LEASE - (time.monotonic() - start)))
        finally:
            frozen.signal(signal.SIGCONT)
        response = answer.result()

    check(policy, response, prompt, engines.reference)
    serves_on(decoder, engines.reference, 113)


def test_a_restarted_prefill_engine_is_met_again(p, d, engines):
    """Same address, new engine id: decode engines need no restart."""
    (spec, _), (_, decoder) = p, d
    prompt = prompt_of(97)
    before = metrics(decoder)["vllm:xpyd_loads_total"]

    assert text_of(decode(decoder, prompt, prefill(spec, prompt))) == plain(engines.reference, prompt)
    assert metrics(decoder)["vllm:xpyd_loads_total"] == before + 1
