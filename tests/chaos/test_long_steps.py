"""A step that lasts three leases, on either side, costs no lease: renewals do not wait for the engine."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.cluster import ROOT, engine_spec, metrics, start_engine, wait_until
from support.legs import STALL_SECONDS, STALL_TOKENS, decode, plain, prefill, prompt_of, text_of
from xpyd_proxy.local.recipe import Connector, Role

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LEASE, STEP = 2.0, 6.5  # s


@pytest.fixture(scope="module")
def stalling(fleet, model):
    """A pair with leases far shorter than its longest steps; D serves one request at a time."""
    specs = [
        engine_spec(
            f"stalling-{role.value}",
            model,
            role=role,
            connector=Connector.XPYD,
            max_model_len=4096,
            extra_env={"PYTHONPATH": str(ROOT / "tests"), STALL_SECONDS: str(STEP)},
            extra_args=("--max-num-seqs", "1", "--kv-transfer-config", json.dumps(transfer_config(role))),
        )
        for role in Role
    ]
    children = [start_engine(fleet, spec) for spec in specs]
    fleet.wait_ready(children, timeout_s=300)
    yield specs
    fleet.stop(*children)


def transfer_config(role):
    return {
        "kv_connector": "StallingConnector",
        "kv_connector_module_path": "support.stalling",
        "kv_role": {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}[role],
        "kv_connector_extra_config": {"kv_lease_duration": LEASE},
    }


def stall_prompt(number):
    return prompt_of(number, STALL_TOKENS)


@pytest.mark.parametrize("stalled", ["decode", "prefill"])
def test_a_step_of_three_leases_loses_none(stalling, engines, stalled):
    """A leased request waits in D's queue while D's, or P's, engine thread is kept for 6.5 s."""
    p, d = stalling
    prompt = prompt_of(400 if stalled == "decode" else 401)
    loads, expired = metrics(d)["vllm:xpyd_loads_total"], metrics(p)["vllm:xpyd_leases_expired_total"]
    with ThreadPoolExecutor(4) as pool:
        seat = pool.submit(plain, d, prompt_of(402, 8), tokens=200 if stalled == "decode" else 1600)
        wait_until(lambda: metrics(d)["vllm:num_requests_running"] == 1, seconds=20, what="D's seat is taken")
        params = prefill(p, prompt)
        first = pool.submit(plain, d, stall_prompt(403), tokens=1) if stalled == "decode" else None
        answer = pool.submit(decode, d, prompt, params)
        wait_until(lambda: metrics(d)["vllm:xpyd_requests_borrowing"] == 1, seconds=5, what="the request is queued")
        if stalled == "prefill":
            first = pool.submit(plain, p, stall_prompt(404), tokens=1)
        start = time.monotonic()
        first.result()
        lasted = time.monotonic() - start
        text = text_of(answer.result())
        seat.result()

    assert lasted > 3 * LEASE
    assert text == plain(engines.reference, prompt)
    assert metrics(p)["vllm:xpyd_leases_expired_total"] == expired
    assert metrics(d)["vllm:xpyd_loads_total"] == loads + 1
