"""Which kernels' blocks may be cut: of those that we have not looked at, none."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    import torch
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from pdrelay_connector.core.layout.cache_groups import CacheGroup
    from pdrelay_connector.shell.cache_regions import KernelLayout
    from pdrelay_connector.shell.kernel_layout import ENTRIES, kernel_layout_of

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


class Layer(AttentionLayerBase):
    """One of a model, as vLLM finds it."""

    def __init__(self, backend):
        self.backend = SimpleNamespace(
            get_name=lambda: backend, full_cls_name=lambda: backend, is_ssm=lambda: "MAMBA" in backend
        )

    def get_attn_backend(self):
        return self.backend

    def get_kv_cache_spec(self, vllm_config):
        return None


def interior(*backends, use_mla=False, dtype=torch.bfloat16, block_sizes=(32,), head_size=64, cache_dtype="auto"):
    """Ask for the interior in a worker whose layers have these backends."""
    layers = {f"l.{number}": Layer(name) for number, name in enumerate(backends)}
    return kernel_layout_of(
        SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            model_config=SimpleNamespace(dtype=dtype, use_mla=use_mla, get_head_size=lambda: head_size),
        ),
        [*(CacheGroup(size) for size in block_sizes), CacheGroup(2048, state="of Mamba")],
    )


@pytest.fixture
def take(monkeypatch):
    """Have vLLM take an instruction set, whatever this machine has; returns what it was asked for."""

    def take(isa):
        asked = []
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *args: asked.append(args) or isa)
        return asked

    return take


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_kernels_that_keep_k_and_v_of_a_token_side_by_side(name):
    """As in vLLM's view of the cache."""
    assert interior(name, name) is KernelLayout.ENTRIES


def test_layers_may_have_several_of_them():
    """Some models have layers that one backend alone cannot do."""
    assert interior("FLASH_ATTN", "TRITON_ATTN") is KernelLayout.ENTRIES


def test_vllm_still_has_the_backends_that_we_know():
    """One that has been renamed would be opaque, and engines of unequal shapes refused."""
    assert {member.name for member in AttentionBackendEnum} >= ENTRIES | {"CPU_ATTN"}


@pytest.mark.parametrize("names", [("ROCM_AITER_FA",), ("FLASH_ATTN", "ROCM_AITER_FA"), ("CPU_ATTN", "FLASH_ATTN")])
def test_one_kernel_that_we_do_not_know_makes_all_opaque(names):
    """A guess would be a wrong answer."""
    assert interior(*names) is KernelLayout.OPAQUE


@pytest.mark.parametrize("name", ["FLASHMLA", "CPU_MLA", "SOME_NEW_MLA"])
def test_mla_has_one_vector_for_each_token_whatever_the_kernel(name):
    """There is nothing to put in another order."""
    assert interior(name, use_mla=True) is KernelLayout.ENTRIES


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx", "neon", "rvv", "vxe", "vsx"])
def test_of_a_cpus_instruction_sets_only_one_has_been_looked_at(take, isa):
    """The others pack K in ways of their own."""
    take(isa)

    assert interior("CPU_ATTN") is (KernelLayout.TRANSPOSED if isa == "vec" else KernelLayout.OPAQUE)


def test_vllm_is_asked_for_this_model_and_this_cache(take):
    """Its choice depends on all four."""
    asked = take("vec")
    interior("CPU_ATTN", dtype=torch.float16, block_sizes=(96,), head_size=80)

    assert asked == [(torch.float16, 96, 80, "auto")]


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2", "bfloat16"])
def test_a_cpu_cache_of_another_type_than_the_model_is_opaque(take, cache_dtype):
    """It has not been looked at."""
    take("vec")

    assert interior("CPU_ATTN", cache_dtype=cache_dtype) is KernelLayout.OPAQUE


def test_groups_whose_kernels_differ_are_not_cut(monkeypatch):
    """vLLM chooses an instruction set for each KV cache group, by its block size."""
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda _, size, *__: "vec" if size == 32 else "vec16")

    assert interior("CPU_ATTN", block_sizes=(32, 32)) is KernelLayout.TRANSPOSED
    assert interior("CPU_ATTN", block_sizes=(32, 16)) is KernelLayout.OPAQUE


def test_a_worker_without_attention_layers_is_not_cut(monkeypatch):
    """Nothing is known of what keeps its cache."""
    monkeypatch.setattr("pdrelay_connector.shell.kernel_layout.get_current_attn_backends", lambda _: [])

    assert interior() is KernelLayout.OPAQUE


def test_layers_that_keep_a_state_have_no_say(take):
    """Neither their backend, which vLLM lists beside the attention layers', nor the size of their blocks."""
    asked = take("vec")

    assert interior("CPU_ATTN", "MAMBA2_ATTN") is KernelLayout.TRANSPOSED
    assert len(asked) == 1
