"""What we know of the order in which attention kernels keep the tokens of a block."""

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.attention.backends import cpu_attn

from xpyd_connector.core.layout.cache_groups import CacheGroup
from xpyd_connector.shell.cache_regions import KernelLayout

# They split the content of a token into K and V (read in vllm/v1/attention/backends of vLLM 0.32). Of others, such as
# ROCm's, which pack K by 16 bytes, and of versions to come we know nothing.
ENTRIES = frozenset({"FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"})


def kernel_layout_of(config: VllmConfig, groups: Sequence[CacheGroup]) -> KernelLayout:
    """Return how this worker's kernels keep a block, once its layers exist."""
    backends = {backend.get_name() for backend in get_current_attn_backends(config)}
    if config.model_config.use_mla or (backends and backends <= ENTRIES):
        return KernelLayout.ENTRIES  # of MLA, one latent vector for each token
    return _of_cpu(config, groups) if backends == {"CPU_ATTN"} else KernelLayout.OPAQUE


def _of_cpu(config: VllmConfig, groups: Sequence[CacheGroup]) -> KernelLayout:
    """Only one of its instruction sets has been looked at: by writing tokens and searching for their bytes.

    ``tests/contract/test_cpu_kernel.py`` does that again.
    """
    cache, model = config.cache_config, config.model_config
    sets = {
        cpu_attn._get_attn_isa(model.dtype, group.block_size, model.get_head_size(), str(cache.cache_dtype))  # noqa: SLF001
        for group in groups
    }
    return KernelLayout.TRANSPOSED if sets == {"vec"} and str(cache.cache_dtype) == "auto" else KernelLayout.OPAQUE
