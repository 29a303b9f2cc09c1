"""The control of the frozen decode engine (test_decode_engine.py): the same scene with vLLM's own NixlConnector.

It has no fence: what D reads after its lease, from blocks that P has reused, it takes for the prompt's KV.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from support.cluster import OVER_TCP, engine_spec, wait_until
from support.legs import decode, plain, prefill, prompt_of
from support.victims import LEASE, RUNNING, USAGE, WAITING, Victim, hold_seat, reuse_blocks
from xpyd_proxy.local.recipe import Connector, Role

# It tells of vLLM alone: no change of ours can make another thing of it, only another vLLM can.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.thorough]


@contextmanager
def stock_pair(fleet, model):
    """The engines of ``support.victims`` with vLLM's connector. Each burns a core even when idle: stopped at once."""
    common = {
        "connector": Connector.NIXL,
        "extra_connector_config": {"kv_lease_duration": int(LEASE)},
        "extra_env": OVER_TCP,
        "max_model_len": 4096,
    }
    p = Victim(engine_spec("stock-p-victim", model, role=Role.PREFILL, kv_cache_mib=32, **common), fleet)
    d = Victim(
        engine_spec("stock-d-victim", model, role=Role.DECODE, extra_args=("--max-num-seqs", "1"), **common), fleet
    )
    try:
        for victim in (p, d):
            victim.start()
        fleet.wait_ready([p.child, d.child], timeout_s=600)
        yield p, d
    finally:
        fleet.stop(*(victim.child for victim in (p, d) if victim.child in fleet.children))


def test_vllms_own_connector_answers_with_the_wrong_text(fleet, model, reference):
    """Queued requests, D frozen for three leases, P's blocks reused: HTTP 200, as if nothing had happened."""
    prompts = [prompt_of(900 + number, 600) for number in range(5)]
    with stock_pair(fleet, model) as (p, d), ThreadPoolExecutor(len(prompts) + 1) as pool:
        warm = prompt_of(910)
        assert decode(d.spec, warm, prefill(p.spec, warm)).json()["choices"][0]["text"] == plain(reference, warm)
        seat = pool.submit(hold_seat, d, 3, busy=True)
        wait_until(lambda: d.now(RUNNING) == 1, seconds=30, what="D's seat is taken")
        answers = [pool.submit(decode, d.spec, prompt, prefill(p.spec, prompt)) for prompt in prompts]
        wait_until(lambda: d.now(WAITING) == len(prompts), seconds=30, what="all are queued")
        with d.frozen():
            start = time.monotonic()
            wait_until(lambda: p.now(USAGE) == 0, seconds=LEASE + 2, what="P frees what the frozen D had leased")
            reuse_blocks(p)
            time.sleep(max(0.0, 3 * LEASE - (time.monotonic() - start)))
        responses = [answer.result() for answer in answers]
        seat.result()
    choices = [response.json()["choices"][0] for response in responses]
    wrong = [choice["text"] != plain(reference, prompt) for choice, prompt in zip(choices, prompts, strict=True)]
    print(f"\n{[response.status_code for response in responses]}, wrong: {wrong}")

    assert [response.status_code for response in responses] == [200] * len(prompts)
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert all(wrong)
