"""The engines of others that our router is put before: vLLM's connectors, alone and inside MultiConnector."""

import tempfile

from interop.peer import Engines
from pdrelay_tools.local.recipe import EngineSpec

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PATIENT = {"kv_connector_extra_config": {"kv_lease_duration": 100}}  # as in tests/e2e/test_stock_push.py
OURS = {"kv_connector_module_path": "pdrelay_connector.nixl"}


def _multi(*connectors: dict[str, object]) -> dict[str, object]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def _example(spec: EngineSpec) -> dict[str, object]:
    """A folder for each engine: what P has stored is not what D finds."""
    folder = tempfile.mkdtemp(prefix=f"pdrelay-{spec.name}-")
    extra = {"shared_storage_path": folder}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


ENGINES = (
    Engines("nixl", "`NixlConnector`", lambda _: NIXL),
    Engines("nixl-0.31", "`NixlConnector` of vLLM 0.31", lambda _: NIXL, vllm="0.31"),
    Engines("nixl-push", "`NixlPushConnector`", lambda _: {**NIXL, "kv_connector": "NixlPushConnector", **PATIENT}),
    Engines("multi-example", "`MultiConnector`: Nixl, Example", lambda spec: _multi(NIXL, _example(spec))),
    Engines("alias", "our connector as `NixlConnector`", lambda _: NIXL | OURS, loads="vllm:pdrelay_loads_total"),
    Engines(
        "alias-push",
        "our connector as `NixlPushConnector`",
        lambda _: {**NIXL, **OURS, "kv_connector": "NixlPushConnector"},
        loads="vllm:pdrelay_loads_total",
    ),
)
