"""Engines that do not match: the decode engine serves alone, and no client sees an error."""

import json
from types import SimpleNamespace

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import Watch, engine_spec, nothing_held, start_engine, wait_until
from support.legs import decode, plain, prefill, prompt_of, text_of
from support.questions import ask, client, compare, ids, questions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
LOADS, SKIPPED = "vllm:pdrelay_loads_total", "vllm:pdrelay_loads_skipped_incompatible_total"
DRAFT_TOKENS = 2


@pytest.fixture(scope="module")
def drafting(fleet, model):
    """A prefill and a decode engine that draft with the model itself: each draft is accepted."""
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": DRAFT_TOKENS}
    specs = {
        role: engine_spec(
            f"draft-{role.value}", model, role=role, connector=Connector.PDRELAY, failure_policy="fail",
            extra_args=("--speculative-config", json.dumps(draft)),
        )
        for role in (Role.PREFILL, Role.DECODE)
    }  # fmt: skip
    children = [start_engine(fleet, spec) for spec in specs.values()]
    fleet.wait_ready(children, timeout_s=300)
    yield SimpleNamespace(p=specs[Role.PREFILL], d=specs[Role.DECODE])
    fleet.stop(*children)


def served_alone(p, d, reference, start_router):
    """Ask three prompts by hand and three through a router; check the texts, and return how D's counters moved."""
    prompts = [prompt_of(number, 100) for number in (11, 12, 13)]
    with Watch(d) as watch:
        texts = [text_of(decode(d, prompt, prefill(p, prompt))) for prompt in prompts]
        # D gives the blocks back that it does not load: a lease would hold them for 30 s.
        wait_until(lambda: nothing_held(p), seconds=20, what="P's leases are dropped")
        with client(start_router(f"router-{d.name}", [p], [d])) as api:
            routed = [ask(api, ids(prompt, stream=True)).text for prompt in prompts]

    assert texts == routed == [plain(reference, prompt) for prompt in prompts]
    assert watch.delta(SKIPPED) >= len(prompts)
    assert watch.delta("vllm:external_prefix_cache_hits_total") == 0


@pytest.mark.parametrize("has_draft", ["decode", "prefill"])
def test_a_draft_model_that_only_one_engine_has(has_draft, engines, drafting, reference, start_router):
    """Its layers have KV that the other lacks. Under "fail" each load was an error, and D a broken engine."""
    p, d = (engines.p0, drafting.d) if has_draft == "decode" else (drafting.p, engines.d0)
    served_alone(p, d, reference, start_router)


def test_a_draft_model_that_both_engines_have(drafting, start_router, reference_answer):
    """Its KV is loaded, too: D accepts every draft, but for those that vLLM makes up for the first step after a load.

    A request that lacks one token only is scheduled as one that decodes, with as many tokens as have been drafted, for
    the sake of CUDA graphs (``pad_spec_decode`` in ``vllm/v1/core/sched/scheduler.py``, 0.32). No step is lost by it.
    """
    asked = [question for question in questions(20, seed=5, longest=600) if len(question.prompt) > 40][:10]
    url = start_router("router-draft", [drafting.p], [drafting.d])
    with Watch(drafting.d) as watch:
        _, wrong = compare(url, asked, reference_answer)

    assert wrong == {}
    assert watch.delta(LOADS) == len(asked)
    assert watch.delta(DRAFTED) - watch.delta(ACCEPTED) == DRAFT_TOKENS * len(asked)


@pytest.mark.thorough  # two more engines, 25 s; `has_draft` above takes the same way
def test_blocks_of_sizes_that_do_not_divide_in_push(fleet, model, reference, start_router):
    """In push P's workers found that out, and stopped each push: an error under the policy "fail"."""
    common = {"connector": Connector.PDRELAY, "mode": TransferMode.PUSH, "failure_policy": "fail"}
    p = engine_spec("push-64", model, role=Role.PREFILL, block_size=64, **common)
    d = engine_spec("push-96", model, role=Role.DECODE, block_size=96, **common)
    children = [start_engine(fleet, spec) for spec in (p, d)]
    fleet.wait_ready(children, timeout_s=300)
    served_alone(p, d, reference, start_router)
    fleet.stop(*children)
