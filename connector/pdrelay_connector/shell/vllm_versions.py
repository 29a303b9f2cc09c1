"""The differences between supported versions of vLLM, detected by features, not by numbers."""

from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

if TYPE_CHECKING:
    from pdrelay_connector.shell.worker import PDRelayConnectorWorker

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32 external hits have no source
    CACHE_HIT_SOURCE: Any = None
else:
    CACHE_HIT_SOURCE = CacheHitSource.P2P

VLLM_VERSION: str = vllm_version
# From 0.32 on vLLM asks which new blocks a load fills; before, it zeroes those of models with a
# state all the same.
ASKS_WHAT_IS_LOADED: bool = hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")

# From 0.33 on vLLM tells a worker's connector when the cache's memory goes away, and when it is
# back.
FOLLOWS_SLEEP: bool = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
# From 0.32 on a cache says whether ranks divide its tokens among them (decode context parallelism),
# and vLLM's NixlConnector moves it.
DIVIDES_CONTEXTS: bool = ASKS_WHAT_IS_LOADED and hasattr(KVCacheSpec, "dcp_sharded")


def is_divided(spec: KVCacheSpec) -> bool:
    """Tell whether the ranks of decode context parallelism keep other tokens of this cache each."""
    return bool(getattr(spec, "dcp_sharded", False))


def returns_routed_experts(config: VllmConfig) -> bool:
    """Tell whether answers name the experts of each token, which would be wrong for loaded prompts.

    vLLM refuses this for its own P/D connectors (``vllm/config/vllm.py``,
    ``_verify_aux_output_compatibility``). The switch is the model's up to 0.30 and has a
    configuration of its own from 0.31 on.
    """
    switches: Any = getattr(config, "aux_output_config", config.model_config)
    return bool(switches.enable_return_routed_experts)


def zeroes_blocks(cache: KVCacheConfig) -> bool:
    """Tell whether vLLM zeroes new blocks, which groups of other types may have used before."""
    return bool(getattr(cache, "needs_kv_cache_zeroing", False))


def replays_window(spec: KVCacheSpec) -> bool:
    """Tell whether a sliding window is recomputed after a hit (0.32, ``--swa-bounded-replay``)."""
    return bool(getattr(spec, "bounded_replay", False))


def tokens_per_entry(spec: KVCacheSpec) -> int:
    """Return how many tokens one entry of a layer's cache covers; 0: several entries a token.

    Where a version has no such number, ``cache_regions.py`` finds that there are too few entries.
    """
    return int(getattr(spec, "tokens_per_state", 1)) if isinstance(spec, AttentionSpec) else 1


def drafts_lookahead(config: VllmConfig) -> int:
    """Return how many tokens drafts read ahead: more than 1 for MTP of several modules (0.32)."""
    return int(getattr(config, "num_prefill_lookahead_tokens", 0))


class LaterHooks:
    """Members of a connector that only some versions use; the others ignore them."""

    _kv_cache_config: KVCacheConfig  # KVConnectorBase_V1 keeps it
    _worker: "PDRelayConnectorWorker"  # PDRelayConnector has it in a worker's process
    # 0.32: the label of our loads in vllm:prompt_tokens_by_source
    _cache_hit_source = CACHE_HIT_SOURCE

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 -- vLLM's signature
        """Return True: what cannot sleep is refused by ``supported_caches.py``, in a sentence.

        vLLM calls this from 0.33 on (``kv_connector/v1/base.py``).
        """
        return True

    def unregister_kv_caches(self) -> None:
        """Let go of the cache's memory: vLLM (0.33) puts it away after this."""
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Register the cache's memory again; vLLM then passes get_handshake_metadata() on."""
        self._worker.restore_kv_caches()

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups: vLLM must not zero their blocks, which would race with loads."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))
