"""The hashes by which this engine's prefix cache knows the blocks of a prompt, computed by vLLM itself.

They are never compared with another engine's: seeds and algorithms differ. Each engine hashes the tokens again.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine.core import get_hash_fn_by_name

from xpyd_connector.core.cached_prefix.decode_scheduler import HashBlocks
from xpyd_connector.core.messages import FindPrefix

TOKEN = "<u4"  # numpy's name of 4 bytes, little-endian


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as a FindPrefix has them."""
    return np.asarray(token_ids, dtype=TOKEN).tobytes()


def prefix_hasher(algorithm: str, block_size: int) -> HashBlocks:
    """Return what hashes the full blocks of a prompt as vLLM hashes those of a request of this engine."""
    hash_blocks: Any = get_request_block_hasher(block_size, get_hash_fn_by_name(algorithm))

    def hash_prompt(message: FindPrefix) -> Sequence[bytes]:
        tokens = np.frombuffer(message.tokens[: len(message.tokens) // 4 * 4], dtype=TOKEN).tolist()
        request = SimpleNamespace(
            all_token_ids=tokens,
            num_tokens=len(tokens),
            block_hashes=[],
            mm_features=[],
            lora_request=None,
            prompt_embeds=None,
            cache_salt=message.salt,
        )
        hashes: list[bytes] = hash_blocks(request)
        return hashes

    return hash_prompt
