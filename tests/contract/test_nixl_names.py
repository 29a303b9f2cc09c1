"""What vLLM does for the names of its own connectors, and so for ours under these names (pdrelay_connector/nixl.py)."""

import ast
import importlib.util
import inspect
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.mamba import mamba_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

    from pdrelay_connector.shell import vllm_versions
    from pdrelay_connector.shell.connector import PDRelayConnector
    from pdrelay_connector.shell.engine_config import read_engine_config
    from pdrelay_connector.shell.fingerprint import info_labels
    from pdrelay_connector.shell.supported_caches import check_supported

from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.settings import INSTEAD, MODE_OF_NAME, SAME
from pdrelay_tools.local.model import ensure_model

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
PATH = {"kv_connector_module_path": "pdrelay_connector.nixl"}
LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
# What is shown below of each place. One more in a new vLLM fails here.
LOOKS = {
    ("config/vllm.py", "VllmConfig._verify_aux_output_compatibility"),
    ("config/vllm.py", "VllmConfig.__post_init__"),
    ("config/vllm.py", "VllmConfig.adjust_dcp_kv_cache_interleave_size"),
    ("config/vllm.py", "VllmConfig.validate_block_size"),
    ("platforms/cpu.py", "CpuPlatform.check_and_update_config"),
    ("distributed/kv_transfer/kv_connector/factory.py", ""),  # the registry
}
# From 0.31 on. Before, vLLM refuses routed experts with any connector, and the name is nothing to a CPU's states.
LOOKS_AT_NAMES = hasattr(VllmConfig, "_verify_aux_output_compatibility")
NOT_BEFORE_0_31 = {
    ("config/vllm.py", "VllmConfig._verify_aux_output_compatibility"),
    ("platforms/cpu.py", "CpuPlatform.check_and_update_config"),
}
# From 0.33 on. Step5 has circular buffers, which are refused here whatever the connector's name is.
LATER_LOOKS = {("models/step5/nvidia/model.py", "_verify_step5_dsa_kv_transfer_compatibility")}
NO_CACHE = SimpleNamespace(kv_cache_groups=[], num_blocks=9)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    ensure_model(path)
    return path


def transfer(name, **extra):
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra, **PATH)


@pytest.fixture
def make(model):
    def make(name, extra=None, **choices):
        return EngineArgs(
            model=str(model), kv_transfer_config=transfer(name, **(extra or {})), enforce_eager=True,
            max_model_len=128, **choices,
        ).create_engine_config()  # fmt: skip

    return make


def functions_that_name_them(package):
    """Return the functions of vLLM that contain the name of one of these connectors, but for the connectors' own."""
    for file in package.rglob("*.py"):
        source = file.read_text()
        if "/nixl/" in file.as_posix() or not any(name in source for name in MODE_OF_NAME):
            continue
        stack = [("", ast.parse(source))]
        while stack:
            place, node = stack.pop()
            if isinstance(node, ast.Constant) and node.value in MODE_OF_NAME:
                yield file.relative_to(package).as_posix(), place
            inner = f"{place}.{node.name}".strip(".") if isinstance(node, ast.ClassDef | ast.FunctionDef) else place
            stack += [(inner, child) for child in ast.iter_child_nodes(node)]


def test_the_places_where_vllm_looks_at_the_name_are_known():
    looks = set(functions_that_name_them(Path(importlib.util.find_spec("vllm").origin).parent))
    assert looks - LATER_LOOKS == (LOOKS if LOOKS_AT_NAMES else LOOKS - NOT_BEFORE_0_31)


@pytest.mark.parametrize(("name", "mode"), MODE_OF_NAME.items())
def test_each_name_loads_ours_in_its_mode(make, name, mode):
    """The path wins over the registry; routers read the same mode in the engine's metrics."""
    config = make(name)
    _, settings = read_engine_config(config, NO_CACHE)

    assert KVConnectorFactory.get_connector_class(transfer(name)) is PDRelayConnector
    assert supports_hma(PDRelayConnector)
    assert (settings.mode, info_labels(config)["mode"]) == (mode, mode.value)


def test_vllms_own_are_still_there_without_the_path():
    """The registry is not touched: an engine beside ours may use them."""
    for name in MODE_OF_NAME:
        assert KVConnectorFactory.get_connector_class_by_name(name) is not PDRelayConnector


@pytest.mark.parametrize("name", MODE_OF_NAME)
def test_the_keys_that_its_operators_have_are_taken(make, name):
    """All at once, as a deployment that is moved has them."""
    theirs = dict.fromkeys(INSTEAD, 1) | dict.fromkeys(SAME, 7) | {"enforce_handshake_compat": True}

    assert read_engine_config(make(name, theirs), NO_CACHE)[1].registration_timeout == 7


@pytest.mark.parametrize("name", MODE_OF_NAME)
def test_routed_experts_are_refused_by_vllm(make, name):
    """Under our own name ours refuses them, in the same way (test_routed_experts.py)."""
    if not LOOKS_AT_NAMES:
        with pytest.raises(ValueError, match="--enable-return-routed-experts is incompatible with KV connectors"):
            make(name, enable_return_routed_experts=True)
        return
    asked = SimpleNamespace(
        use_v2_model_runner=True,
        aux_output_config=SimpleNamespace(enabled=True, enable_return_routed_experts=True),
        model_config=SimpleNamespace(runner_type="generate", is_moe=True),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        kv_transfer_config=transfer(name),
    )
    with pytest.raises(ValueError, match=f"incompatible with {name}; PD auxiliary output is not supported"):
        VllmConfig._verify_aux_output_compatibility(asked)


@pytest.mark.parametrize("name", MODE_OF_NAME)
def test_decode_context_parallelism_has_vllms_interleaving(make, name):
    """VLLM sets it for each worker before that makes the connector: for one of the names to the tokens of a block."""
    config = make(name, block_size=32)
    config.parallel_config.tensor_parallel_size = config.parallel_config.decode_context_parallel_size = 2
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)], num_blocks=9)
    adjust = config.adjust_dcp_kv_cache_interleave_size
    adjust(cache.kv_cache_groups if "kv_cache_groups" in inspect.signature(adjust).parameters else cache)  # 0.33
    if not vllm_versions.DIVIDES_CONTEXTS:
        with pytest.raises(UnsupportedCache, match=r"needs vLLM 0\.32 or later"):
            read_engine_config(config, cache)
        return
    found, _ = read_engine_config(config, cache)

    assert (found.groups[0].block_size, found.groups[0].shards, found.shards) == (64, 2, 2)
    assert found.interleave == (32 if name == "NixlConnector" else 1)


@pytest.mark.parametrize("name", MODE_OF_NAME)
def test_without_it_the_name_changes_neither_interleaving_nor_blocks(make, name):
    """Both functions do something for the name "NixlConnector", and only with several ranks."""
    config = make(name, block_size=32)
    before = config.parallel_config.cp_kv_cache_interleave_size
    config.adjust_dcp_kv_cache_interleave_size(NO_CACHE)
    config.validate_block_size()

    assert (config.parallel_config.cp_kv_cache_interleave_size, config.cache_config.block_size) == (before, 32)


def test_a_cache_that_stays_in_host_memory_is_refused_by_ours():
    """vLLM warns other connectors than "NixlConnector" of it (HiSparse), and so not ours under that name."""
    asked = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1))
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer.0"], spec, host_resident=True)]

    with pytest.raises(UnsupportedCache, match=r"layer\.0 has a KV cache in host memory"):
        check_supported(asked, SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize("name", [*MODE_OF_NAME, "PDRelayConnector"])
def test_cpu_engines_lay_out_states_by_the_name(make, monkeypatch, name):
    """Of models with convolutions. So a pair has one of these names on both sides, or none, or sets the variable."""
    monkeypatch.delenv(LAYOUT, raising=False)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    if name == "PDRelayConnector":
        monkeypatch.setitem(PATH, "kv_connector_module_path", "pdrelay_connector")
    make(name)

    assert os.environ[LAYOUT] == ("SD" if name == "PDRelayConnector" or not LOOKS_AT_NAMES else "DS")


def test_engines_that_lay_out_states_differently_refuse_each_other(monkeypatch):
    """The shapes of a state's tensors are in the fingerprint."""
    shapes = set()
    for layout in ("SD", "DS"):
        monkeypatch.setenv(LAYOUT, layout)
        mamba_utils.get_conv_state_layout.cache_clear()
        shapes.add(mamba_utils.MambaStateShapeCalculator.short_conv_state_shape(1, 8, 4))
    mamba_utils.get_conv_state_layout.cache_clear()

    assert len(shapes) == 2
