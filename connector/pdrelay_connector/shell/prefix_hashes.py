"""The hashes of a prompt's blocks in this engine's prefix cache, computed by vLLM's own code.

They are never compared with another engine's, as seeds and algorithms differ: each engine hashes
the tokens itself.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine.core import get_hash_fn_by_name

from pdrelay_connector.core.cached_prefix.decode_scheduler import HashBlocks
from pdrelay_connector.core.messages import FindPrefix

TOKEN = "<u4"  # numpy's name of 4 bytes, little-endian
PIECE: Final = 4096  # tokens that are hashed in one go: some milliseconds


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as a FindPrefix has them."""
    return np.asarray(token_ids, dtype=TOKEN).tobytes()


class _TokenIds:
    """The token ids of a FindPrefix, decoded on demand: 200,000 at once take milliseconds."""

    def __init__(self, packed: bytes) -> None:
        self._ids = np.frombuffer(packed, dtype=TOKEN, count=len(packed) // 4)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, part: slice) -> list[int]:
        part_of_ids: list[int] = self._ids[part].tolist()
        return part_of_ids


def prefix_hasher(algorithm: str, block_size: int) -> HashBlocks:
    """Return a function that hashes a prompt's full blocks as vLLM does for its own requests."""
    hash_blocks: Any = get_request_block_hasher(block_size, get_hash_fn_by_name(algorithm))

    def hash_prompt(message: FindPrefix) -> Iterator[Sequence[bytes]]:
        tokens = _TokenIds(message.tokens)
        request = SimpleNamespace(
            all_token_ids=tokens,
            num_tokens=0,
            block_hashes=[],
            mm_features=[],
            lora_request=None,
            prompt_embeds=None,
            cache_salt=message.salt,
        )
        while request.num_tokens < len(tokens):
            request.num_tokens = min(len(tokens), request.num_tokens + max(PIECE, block_size))
            piece: list[bytes] = hash_blocks(request)  # of the blocks behind those in block_hashes
            request.block_hashes.extend(piece)
            yield piece

    return hash_prompt
