"""The comparison has teeth: one wrong block out of many is seen in every single answer."""

import json

import pytest

from support.cluster import ROOT, Watch, engine_spec, start_engine
from support.questions import ask, client, differences, questions
from xpyd_proxy.local.recipe import Connector, Role

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def corrupting(fleet, model):
    """A decode engine whose connector puts one wrong block into every prompt."""
    config = {
        "kv_connector": "CorruptingConnector",
        "kv_connector_module_path": "support.corrupting",
        "kv_role": "kv_consumer",
    }
    spec = engine_spec(
        "corrupting",
        model,
        role=Role.DECODE,
        connector=Connector.XPYD,
        extra_args=("--kv-transfer-config", json.dumps(config)),
        extra_env={"PYTHONPATH": str(ROOT / "tests")},
    )
    child = start_engine(fleet, spec)
    fleet.wait_ready([child], timeout_s=180)
    yield spec
    fleet.stop(child)


def test_a_wrong_block_is_caught(corrupting, engines, start_router, reference_answer):
    """Every prompt of two blocks or more comes out different, although everything else is as it should be."""
    url = start_router("router-corrupting", [engines.p0], [corrupting])
    asked = [question for question in questions(30, seed=4) if len(question.prompt) > 64][:10]
    with Watch(corrupting) as decode, client(url) as api:
        found = [differences(ask(api, question), reference_answer(question)) for question in asked]

    assert len(asked) == decode.delta("vllm:xpyd_loads_total") == 10
    assert all("logprobs" in names for names in found)
