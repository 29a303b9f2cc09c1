"""Layers of a block side by side (``VLLM_KV_CACHE_LAYOUT=BLHNC``): a block is one descriptor, texts are the same."""

import dataclasses
import json

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector, transfer_config
from support.cluster import ROOT, engine_spec, start_engine
from support.shapes import BYTES, LOADED, SMALL_STEPS, Pair, random_questions, watched, wrong_answers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK, LAYERS = 32, 4
LAYER_BYTES = BLOCK * 1024  # of a block: K and V of 4 heads of 32 in float32
LENGTHS = (33, 65, 257, 700, 1500)
DESCRIPTORS = "vllm:pdrelay_descriptors_total"


def layered(spec):
    """The same engine with BLHNC."""
    config = transfer_config(spec) | {
        "kv_connector": "LayeredConnector",
        "kv_connector_module_path": "support.layered_connector",
    }
    return dataclasses.replace(
        spec,
        extra_env={**spec.extra_env, "PYTHONPATH": str(ROOT / "tests"), "VLLM_KV_CACHE_LAYOUT": "BLHNC"},
        extra_args=(*spec.extra_args, "--kv-transfer-config", json.dumps(config)),
    )


@pytest.fixture(scope="module")
def engines(fleet, model):
    """P and D whose layers lie within blocks, and a D with vLLM's order for a CPU."""
    specs = {
        name: engine_spec(
            f"layouts-{name}", model, connector=Connector.PDRELAY, block_size=BLOCK, extra_args=SMALL_STEPS
        )
        for name in ("p", "d", "other")
    }
    specs |= {name: layered(specs[name]) for name in ("p", "d")}
    children = [start_engine(fleet, spec) for spec in specs.values()]
    fleet.wait_ready(children, timeout_s=300)
    yield specs
    fleet.stop(*children)


def moved(engines, name, reference_answer, seed):
    """Ask P and this D; return the descriptors and the blocks that D has read, after its texts were compared."""
    pair = Pair(engines["p"], engines[name], TransferMode.PULL, None)
    asked = random_questions(LENGTHS, seed=seed)
    with watched(pair) as (_, decode):
        assert wrong_answers(pair, asked, reference_answer, at_once=len(asked)) == {}
    assert decode.delta(LOADED) == sum(length - 1 for length in LENGTHS)
    return decode.delta(DESCRIPTORS), decode.delta(BYTES) / (LAYERS * LAYER_BYTES)


def test_a_block_of_all_layers_is_one_descriptor(engines, reference_answer):
    """Or less than one, where blocks are neighbours on both sides."""
    descriptors, blocks = moved(engines, "d", reference_answer, seed=1)

    assert blocks == sum(-(-(length - 1) // BLOCK) for length in LENGTHS)
    assert descriptors <= blocks


def test_a_decode_engine_with_another_layout_takes_each_layer(engines, reference_answer):
    """From where it lies in P's block: never two layers in one piece."""
    descriptors, _ = moved(engines, "other", reference_answer, seed=2)

    assert descriptors >= LAYERS * len(LENGTHS)
