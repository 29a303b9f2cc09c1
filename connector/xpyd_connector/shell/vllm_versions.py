"""What differs between the versions of vLLM that run the connector, each found by its feature and not by a number."""

from typing import Any

from vllm import __version__ as vllm_version

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32 external hits have no source
    CACHE_HIT_SOURCE: Any = None
else:
    CACHE_HIT_SOURCE = CacheHitSource.P2P

VLLM_VERSION: str = vllm_version


class LaterHooks:
    """Members of a connector that only some versions ask for; the others ignore them."""

    _cache_hit_source = CACHE_HIT_SOURCE  # 0.32: the label of our loads in vllm:prompt_tokens_by_source

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 -- vLLM's signature
        """Return False: an engine that wakes up has its cache at other addresses than NIXL has registered.

        vLLM calls this from 0.33 on (``kv_connector/v1/base.py``; its default is True). Before, we refuse at start.
        """
        return False
