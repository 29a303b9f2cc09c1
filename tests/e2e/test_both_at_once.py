"""One engine is D for some requests and P for others at the same time: what a long prefill does to running streams.

What was measured is printed: ``pytest -s -m thorough tests/e2e/test_both_at_once.py``.
"""

import random
import time
from contextlib import contextmanager

import httpx
import pytest

from support.both_roles import BOTH
from support.cluster import engine_spec, nothing_held, start_engine, wait_until
from support.greedy_streams import bodies, run

pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(400)]

STREAMS = 8
TOKENS = 300
PROMPTS = 3
PROMPT = 4000
LEASE_S = 5  # nobody comes for what is lent here
CHUNKS = (256, 1024, 4096)  # --max-num-batched-tokens: what vLLM computes in one step
ATTEMPTS = 3  # at small steps: a busy machine may keep an engine from its core for as long as a large one takes


@contextmanager
def engine(fleet, model, chunk):
    """Yield one that can serve both roles, and computes so many tokens in one step."""
    lease = {"extra_connector_config": {"kv_lease_duration": LEASE_S}}
    args = ("--max-num-batched-tokens", str(chunk), "--no-enable-prefix-caching")
    spec = engine_spec(f"chunk-{chunk}", model, **BOTH | lease, extra_args=args)
    child = start_engine(fleet, spec)
    fleet.wait_ready([child], timeout_s=300)
    yield spec
    wait_until(lambda: nothing_held(spec), seconds=60, what=f"{spec.name} is idle")
    fleet.stop(child)


def prefill(url, seed):
    """Have prompts computed and lent, one after the other, as a router does; return the seconds of each."""
    dice = random.Random(seed)
    took = []
    for _ in range(PROMPTS):
        body = {
            "model": "tiny",
            "prompt": [dice.randrange(10, 500) for _ in range(PROMPT)],
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        began = time.monotonic()
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
        took.append(time.monotonic() - began)
        assert answer.status_code == 200, answer.text
        assert answer.json()["kv_transfer_params"]["remote_block_ids"]
    return took


def test_a_long_prefill_holds_up_running_streams_by_a_step_and_no_more(fleet, model):
    """The step is vLLM's own, of --max-num-batched-tokens; texts are those of a quiet engine."""
    pauses = {}
    print("\n| tokens of a step | longest pause, no prompts | longest pause, 3 prompts | a prompt took, median |")
    print("|---|---|---|---|")
    for chunk in CHUNKS:
        pauses[chunk] = longest_pause(fleet, model, chunk)
    small, large = CHUNKS[0], CHUNKS[-1]
    for _ in range(ATTEMPTS - 1):
        if pauses[small] < pauses[large] / 2:
            break
        pauses[small] = min(pauses[small], longest_pause(fleet, model, small))

    assert pauses[small] < pauses[large] / 2


def longest_pause(fleet, model, chunk):
    """Return the longest pause of a stream (ms) while prompts are computed; print it, and what belongs to it."""
    with engine(fleet, model, chunk) as spec:
        asked = list(bodies(STREAMS, TOKENS, seed=4, salt="both"))
        quiet = run(spec.base_url, asked)
        took = []
        busy = run(spec.base_url, asked, lambda: took.extend(prefill(spec.base_url, 7)), behind=20)
    assert [one.verdict(other) for one, other in zip(busy, quiet, strict=True)] == ["right"] * STREAMS
    longest = [1000 * max(one.longest_s for one in streams) for streams in (quiet, busy)]
    print(f"| {chunk:,} | {longest[0]:.0f} ms | {longest[1]:.0f} ms | {1000 * sorted(took)[1]:.0f} ms |")
    return longest[1]
