"""Settings that only one of two engines has, and that do not change its KV: right answers, or a refusal."""

import json

import httpx
import numpy as np
import pytest

from pdrelay_tools.local.recipe import Connector, Role
from support.adapters import MAX_RANK, write_adapter
from support.cluster import MODEL_NAME, Watch, engine_spec, start_engine, wait_until
from support.legs import OPEN, prefill, prompt_of, text_of
from support.questions import compare, questions

# Two more engines each, 20 s. What differs is no part of the KV, which the ordinary tests move.
pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(600)]

LOADS = "vllm:pdrelay_loads_total"
ADAPTER = "adapter"


def test_ngram_drafts_on_one_side_only(fleet, model, engines, start_router, reference_answer):
    """They have no KV: everything is loaded, and no token differs."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    args = ("--speculative-config", json.dumps(config))
    p, d = (
        engine_spec(f"ngram-{role.value}", model, role=role, connector=Connector.PDRELAY, extra_args=args)
        for role in (Role.PREFILL, Role.DECODE)
    )
    children = [start_engine(fleet, spec) for spec in (p, d)]
    fleet.wait_ready(children, timeout_s=300)
    asked = [question for question in questions(20, seed=6, longest=600) if len(question.prompt) > 40][:10]
    for name, pair in (("on-p", (p, engines.d0)), ("on-d", (engines.p0, d))):
        url = start_router(f"router-ngram-{name}", pair[:1], pair[1:])
        with Watch(pair[1]) as watch:
            _, wrong = compare(url, asked, reference_answer)
        assert (name, wrong) == (name, {})
        assert watch.delta(LOADS) == len(asked)
    fleet.stop(*children)


def complete(url, prompt, model, **fields):
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_an_adapter_loaded_while_serving_on_one_side_only(fleet, model, start_router, tmp_path):
    """D's adapter: D serves alone. P's: the client is told that there is no such model. Both: KV is loaded."""
    folder = write_adapter(tmp_path / "adapter")
    options = {
        "connector": Connector.PDRELAY,
        # Without a prefix cache, so that the last answers are of prompts that D computes itself.
        "extra_args": ("--enable-lora", "--max-lora-rank", MAX_RANK, "--no-enable-prefix-caching"),
        "extra_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    }
    p, d = (engine_spec(f"lora-{role.value}", model, role=role, **options) for role in (Role.PREFILL, Role.DECODE))
    children = [start_engine(fleet, spec) for spec in (p, d)]
    fleet.wait_ready(children, timeout_s=300)
    url = start_router("router-lora", [p], [d], args=("--health-check-interval", "0.2"))

    def change(spec, what):
        body = {"lora_name": ADAPTER, "lora_path": str(folder)}
        assert httpx.post(f"{spec.base_url}/v1/{what}_lora_adapter", json=body, timeout=60).status_code == 200

    def is_served():
        return complete(url, prompt_of(1, 40), ADAPTER).status_code == 200

    prompts = [prompt_of(number, 150) for number in range(20, 26)]
    change(d, "load")
    wait_until(is_served, seconds=10, what="the router knows D's adapter")
    expected = [text_of(complete(d.base_url, prompt, ADAPTER)) for prompt in prompts]
    with Watch(d) as alone:
        texts = [text_of(complete(url, prompt, ADAPTER)) for prompt in prompts]
    mixed = prompt_of(27, 150)  # a router that sends P's leg for the model itself: the KV is another one
    params = prefill(p, mixed)
    text = text_of(complete(d.base_url, mixed, ADAPTER, kv_transfer_params=params))
    assert complete(p.base_url, mixed, ADAPTER, kv_transfer_params=OPEN).status_code == 404
    change(p, "load")
    wait_until(lambda: is_served() and loaded_by(d, url), seconds=10, what="the router knows P's adapter")
    with Watch(d) as both:
        fresh = [prompt_of(number, 150) for number in range(30, 36)]
        paired = [text_of(complete(url, prompt, ADAPTER)) for prompt in fresh]
    change(d, "unload")
    refused = complete(d.base_url, mixed, ADAPTER, kv_transfer_params=params)
    wait_until(lambda: complete(url, mixed, ADAPTER).status_code == 503, seconds=10, what="no engine decodes it")
    base = [text_of(complete(url, prompt, MODEL_NAME)) for prompt in prompts]
    change(d, "load")
    again = [text_of(complete(d.base_url, prompt, ADAPTER)) for prompt in (*fresh, mixed)]
    fleet.stop(*children)

    assert texts == expected != base
    assert alone.delta(LOADS) == 0
    assert both.delta(LOADS) == len(fresh)
    assert [*paired, text] == again
    assert refused.status_code == 404


def loaded_by(d, url):
    """Whether a request of the adapter now takes both engines."""
    with Watch(d) as watch:
        complete(url, prompt_of(int(np.random.default_rng().integers(100, 400)), 60), ADAPTER)
    return watch.delta(LOADS) == 1
