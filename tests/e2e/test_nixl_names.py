"""Our connector under the names of vLLM's own, as a deployment that had those starts it: the promise is the same."""

import json

import pytest

from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import Watch, engine_spec, start_engine
from support.questions import compare, questions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["NixlConnector", "NixlPushConnector"])
def pair(request, fleet, model, reference):
    """As vLLM's documentation starts them, but for the path: both roles on either side, and no key of ours."""
    config = {
        "kv_connector": request.param,
        "kv_connector_module_path": "pdrelay_connector.nixl",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
    }
    specs = [
        engine_spec(
            f"{request.param}-{role.value}".lower(), model, role=role, connector=Connector.PDRELAY,
            extra_args=("--kv-transfer-config", json.dumps(config)),
        )
        for role in Role
    ]  # fmt: skip
    children = [start_engine(fleet, spec) for spec in specs]
    fleet.wait_ready(children, timeout_s=300)
    yield specs
    fleet.stop(*children)


def test_equal_and_the_kv_has_moved(pair, start_router, reference_answer):
    """By its own way: D reads under the one name, and P writes under the other."""
    prefill, decode = pair
    asked = questions(12, seed=44)
    url = start_router(f"router-{decode.name}", [prefill], [decode])
    with Watch(prefill) as sender, Watch(decode) as receiver:
        _, wrong = compare(url, asked, reference_answer)

    assert wrong == {}
    assert receiver.delta("vllm:pdrelay_loads_total") == len(asked)
    assert (sender.delta("vllm:pdrelay_pushes_total") > 0) == ("push" in decode.name)
