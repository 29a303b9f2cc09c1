"""Inside vLLM's MultiConnector, before and after its ExampleConnector, the promise is the same."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector, Role, transfer_config
from support.cluster import Watch, engine_spec, start_engine
from support.questions import compare, questions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def beside_example(spec, folder, *, ours_first, by_path):
    """Return the same engine with both connectors; the other one keeps KV as files in a folder."""
    ours = transfer_config(spec)
    if not by_path:
        del ours["kv_connector_module_path"]
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": ours["kv_role"],
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": ours["kv_role"],
        "kv_load_failure_policy": spec.failure_policy,
        "kv_connector_extra_config": {"connectors": [ours, example] if ours_first else [example, ours]},
    }
    return dataclasses.replace(spec, extra_args=(*spec.extra_args, "--kv-transfer-config", json.dumps(config)))


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: which connector loads, MultiConnector decides in one way."""
    return params["pair"] is TransferMode.PUSH


@pytest.fixture(scope="module", params=TransferMode, ids=lambda mode: mode.value)
def pair(request, fleet, model, reference, tmp_path_factory):
    """Ours is first on P in pull and first on D in push. One of four goes without the entry point, by its path."""
    mode = request.param
    specs = {}
    for role, ours_first in ((Role.PREFILL, mode is TransferMode.PULL), (Role.DECODE, mode is TransferMode.PUSH)):
        by_path = (role, mode) == (Role.PREFILL, TransferMode.PULL)
        spec = engine_spec(
            f"multi-{mode.value}-{role.value}", model, role=role, connector=Connector.PDRELAY, mode=mode,
            extra_args=("--no-enable-prefix-caching",),  # so that what one connector has is not in the cache as well
            extra_env={"VLLM_PLUGINS": ""} if by_path else {},
        )  # fmt: skip
        folder = tmp_path_factory.mktemp(spec.name)
        specs[role.value] = beside_example(spec, folder, ours_first=ours_first, by_path=by_path)
    children = [start_engine(fleet, spec) for spec in specs.values()]
    fleet.wait_ready(children, timeout_s=300)
    yield SimpleNamespace(**specs, mode=mode)
    fleet.stop(*children)


def test_equal_and_each_connector_loads_in_its_turn(pair, start_router, reference_answer):
    """The prompts come twice: the second time D has them as files, which count where the other connector is first."""
    asked = [question for question in questions(30, seed=30, longest=700) if len(question.prompt) > 40][:12]
    url = start_router(f"router-multi-{pair.mode.value}", [pair.prefill], [pair.decode])
    with Watch(pair.prefill) as prefill:
        with Watch(pair.decode) as first:
            _, wrong = compare(url, asked, reference_answer)
        with Watch(pair.decode) as second:
            _, wrong_again = compare(url, asked, reference_answer)

    assert (wrong, wrong_again) == ({}, {})
    loads, skipped = "vllm:pdrelay_loads_total", "vllm:pdrelay_loads_skipped_local_total"
    if pair.mode is TransferMode.PUSH:
        assert first.delta(loads) == second.delta(loads) == len(asked)
    else:
        assert first.delta(loads) == second.delta(loads) + second.delta(skipped) == len(asked)
        assert second.delta(skipped) > len(asked) / 2  # the others are shorter than a block
    assert prefill.delta("vllm:pdrelay_leases_expired_total") == 0
