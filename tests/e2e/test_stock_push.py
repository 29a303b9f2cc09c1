"""Our router before vLLM's own connector that pushes: prefill engines write the KV cache, both legs go out at once."""

import httpx
import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import Watch, engine_spec, start_engine
from support.questions import compare, questions

# On a busy machine the first contact of two such engines was seen to take longer than the lease of 30 s. P has then
# forgotten the request, nobody tells D, and the request hangs (for 120 s, when its client gave up).
PATIENT = {"kv_lease_duration": 100}
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
BODY = {"model": "tiny", "prompt": "where does the river end", "max_tokens": 2}


@pytest.fixture(scope="module")
def asked(reference_answer):
    """Questions for each mode; the right answers are known before there are engines that leave no core for others."""
    asked = {mode: questions(10, seed=seed) for mode, seed in (("auto", 11), ("pull", 12))}
    for question in (*asked["auto"], *asked["pull"]):
        reference_answer(question)
    return asked


@pytest.fixture(scope="module")
def pushing_pair(fleet, model, asked):
    """vLLM's NixlPushConnector on both sides. Stopped as soon as possible: an engine burns a core even when idle."""
    nixl = {"connector": Connector.NIXL, "mode": TransferMode.PUSH, "extra_connector_config": PATIENT}
    specs = [engine_spec(f"stock-push-{role[0]}", model, role=role, **nixl) for role in Role]
    children = [start_engine(fleet, spec) for spec in specs]
    fleet.wait_ready(children, timeout_s=300)
    yield specs
    fleet.stop(*children)


@pytest.mark.parametrize(("mode", "route"), [("auto", "push"), ("pull", "push_cold")])
def test_what_is_pushed_gives_the_text_of_one_engine(pushing_pair, start_router, asked, reference_answer, mode, route):
    """Whether decode is told before prefill has begun or after it has ended; and decode computes nothing itself."""
    prefill, decode = pushing_pair
    url = start_router(f"router-stock-push-{mode}", [prefill], [decode], args=("--kv-transfer-mode", mode))
    httpx.post(f"{url}/v1/completions", json=BODY, timeout=120, trust_env=False)  # the first one teaches the router
    with Watch(prefill) as pushed, Watch(decode) as received:
        _, wrong = compare(url, asked[mode], reference_answer)
    taken = httpx.post(f"{url}/v1/completions", json=BODY, timeout=120, trust_env=False).headers["server-timing"]

    assert wrong == {}
    assert taken.startswith(f'mode;desc="{route}", ')
    assert pushed.delta("vllm:nixl_bytes_transferred_sum") > 0
    assert received.delta("vllm:prompt_tokens_by_source_total|local_compute") == 0
