"""The order in which attention kernels keep the content of a block, as far as it is known."""

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.attention.backends import cpu_attn

from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.shell.cache_regions import KernelLayout

# Backends that keep K and V of a token adjacent (vllm/v1/attention/backends, 0.32). Others are
# unknown: ROCm's, for example, packs K by 16 bytes.
ENTRIES = frozenset(
    {"FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"}
)


def kernel_layout_of(config: VllmConfig, groups: Sequence[CacheGroup]) -> KernelLayout:
    """Return the layout of this worker's attention kernels. Call it when the layers exist."""
    backends = {
        backend.get_name() for backend in get_current_attn_backends(config) if not backend.is_ssm()
    }
    if config.model_config.use_mla or (backends and backends <= ENTRIES):
        return KernelLayout.ENTRIES  # MLA keeps one latent vector per token
    return _of_cpu(config, groups) if backends == {"CPU_ATTN"} else KernelLayout.OPAQUE


def _of_cpu(config: VllmConfig, groups: Sequence[CacheGroup]) -> KernelLayout:
    """Return the layout of vLLM's CPU kernel. It is known for one instruction set only, ``vec``.

    ``tests/contract/test_cpu_kernel.py`` checks it: it writes tokens and searches for their bytes.
    """
    cache = config.cache_config
    model = config.model_config
    sets = {
        cpu_attn._get_attn_isa(  # noqa: SLF001
            model.dtype,
            group.block_size // group.shards,
            model.get_head_size(),
            str(cache.cache_dtype),
        )
        for group in groups
        if not group.state
    }
    return (
        KernelLayout.TRANSPOSED
        if sets == {"vec"} and str(cache.cache_dtype) == "auto"
        else KernelLayout.OPAQUE
    )
