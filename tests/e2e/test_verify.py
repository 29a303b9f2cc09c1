"""Checksums on real engines: a connector that spoils one block in twenty answers wrongly, unless it is compared."""

import json
from types import SimpleNamespace

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector, Role, transfer_config
from support.cluster import ROOT, Watch, engine_spec, start_engine
from support.questions import compare, questions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ALL_BLOCKS = 256  # more than a prompt here has
ASKED = 30
# The pairs of these engines fail all the time, and rest: here the router must go on with them.
STUBBORN = ("--decode-only-fallback", "false")


def spoiling(name, model, **options):
    """Return an engine whose connector spoils one block in twenty."""
    plain = engine_spec(name, model, connector=Connector.PDRELAY, **options)
    config = transfer_config(plain) | {
        "kv_connector": "SpoilingConnector",
        "kv_connector_module_path": "support.corrupting",
    }
    return engine_spec(
        name,
        model,
        connector=Connector.PDRELAY,
        **options,
        extra_args=("--kv-transfer-config", json.dumps(config)),
        extra_env={"PYTHONPATH": str(ROOT / "tests"), "SPOILT_SHARE": "0.05"},
    )


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: which way spoilt blocks came makes no difference to a router."""
    return params.get("spoilt") is TransferMode.PUSH and "without" in test


@pytest.fixture(scope="module", params=TransferMode, ids=lambda mode: mode.value)
def spoilt(request, fleet, model):
    """Two prefill engines, of which one takes checksums of all blocks, and a decode engine."""
    common = {"mode": request.param}
    mode = request.param.value
    sampled = {"verify_share": 1, "verify_blocks": ALL_BLOCKS}
    specs = {
        "blind": spoiling(f"blind-{mode}", model, role=Role.PREFILL, **common),
        "seeing": spoiling(f"seeing-{mode}", model, role=Role.PREFILL, extra_connector_config=sampled, **common),
        "d": spoiling(f"spoilt-{mode}", model, role=Role.DECODE, **common),
    }
    children = [start_engine(fleet, spec) for spec in specs.values()]
    fleet.wait_ready(children, timeout_s=300)
    yield SimpleNamespace(**specs, mode=mode)
    fleet.stop(*children)


def test_without_checksums_texts_are_wrong(spoilt, start_router, reference_answer):
    """With status 200: this is what the checksums are for."""
    url = start_router(f"router-blind-{spoilt.mode}", [spoilt.blind], [spoilt.d], args=STUBBORN)
    with Watch(spoilt.d) as decode:
        _, wrong = compare(url, questions(ASKED, seed=41), reference_answer)

    assert wrong
    assert (
        decode.delta("vllm:pdrelay_loads_failed_wrong_kv_total")
        == decode.delta("vllm:pdrelay_blocks_checked_total")
        == 0
    )


def test_with_checksums_no_text_is_wrong(spoilt, start_router, reference_answer):
    """Each load with a wrong block is found and its prompt computed again, and the engines hold nothing afterwards."""
    url = start_router(f"router-seeing-{spoilt.mode}", [spoilt.seeing], [spoilt.d], args=STUBBORN)
    with Watch(spoilt.seeing) as prefill, Watch(spoilt.d) as decode:  # at its end they hold nothing
        _, wrong = compare(url, questions(ASKED, seed=42), reference_answer)

    assert wrong == {}
    failed, found = (decode.delta(f"vllm:pdrelay_{name}_total") for name in ("loads_failed_wrong_kv", "blocks_wrong"))
    assert 0 < failed <= found < decode.delta("vllm:pdrelay_blocks_checked_total")
    assert decode.delta("vllm:pdrelay_loads_total") > 0
    assert decode.delta("vllm:pdrelay_loads_unchecked_total") == 0
    ended = sum(decode.delta(f"vllm:pdrelay_{name}_total") for name in ("loads", "loads_skipped_local"))
    assert prefill.delta("vllm:pdrelay_prefills_sampled_total") == failed + ended
