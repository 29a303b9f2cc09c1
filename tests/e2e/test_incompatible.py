"""Engines that do not match: the decode engine serves alone, and no client sees an error."""

import json

import pytest

from support.cluster import Watch, engine_spec, nothing_held, start_engine, wait_until
from support.legs import decode, plain, prefill, prompt_of, text_of
from support.questions import Question, ask, client
from xpyd_proxy.local.recipe import Connector, Role

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_a_draft_model_that_only_the_decode_engine_has(fleet, model, reference, start_router):
    """Its layers have KV that P lacks. Each such load was an error under the policy "fail", and then D a broken one."""
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    p = engine_spec("p-no-draft", model, role=Role.PREFILL, connector=Connector.XPYD)
    d = engine_spec(
        "d-draft", model, role=Role.DECODE, connector=Connector.XPYD, failure_policy="fail",
        extra_args=("--speculative-config", json.dumps(draft)),
    )  # fmt: skip
    children = [start_engine(fleet, spec) for spec in (p, d)]
    fleet.wait_ready(children, timeout_s=300)
    prompts = [prompt_of(number, 100) for number in (11, 12, 13)]
    with Watch(d) as watch:
        texts = [text_of(decode(d, prompt, prefill(p, prompt))) for prompt in prompts]
        url = start_router("router-draft", [p], [d])
        with client(url) as api:
            routed = [ask(api, Question("ids", stream=True, prompt=tuple(prompt))).text for prompt in prompts]
    wait_until(lambda: nothing_held(d), seconds=1, what="D holds nothing")
    fleet.stop(*children)

    assert texts == [plain(reference, prompt) for prompt in prompts]
    assert routed == texts
    assert watch.delta("vllm:xpyd_loads_skipped_incompatible_total") >= len(prompts)
    assert watch.delta("vllm:external_prefix_cache_hits_total") == 0
