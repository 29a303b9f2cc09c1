"""The KV events of an engine, as vLLM 0.32 writes them in msgpack (vllm/distributed/kv_events.py).

Types are strict; unknown fields are ignored, because later versions add some.
"""

from typing import Annotated, Final, TypeAlias

import msgspec

# of one batch: a frame is as long as that of the shortest; of 16 MiB of nils there would be a GB
EVENTS_MOST: Final = 2**18
HASH_MOST: Final = 64  # bytes of a hash; vLLM's have 32 (SHA-256) or 16 (xxHash)
# An int with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES.
BlockHash: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=HASH_MOST)] | int
_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_BlockSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**20)]  # tokens
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Group: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=63)]


class BlockStored(msgspec.Struct, tag="BlockStored", gc=False):
    """Consecutive blocks of one KV cache group were stored."""

    block_hashes: list[BlockHash]
    token_ids: list[_TokenId]
    block_size: _BlockSize
    # of the block before the first; None: a prompt begins here
    parent_block_hash: BlockHash | None = None
    lora_name: str | None = None
    # One for each block, untagged and in vLLM's order: the name of the LoRA adapter, (id, offset)
    # of images and the like, the salt, and digests of embeddings (``to_event_extra_keys`` in
    # vllm/v1/core/kv_cache_utils.py).
    extra_keys: list[tuple[msgspec.Raw, ...] | None] | None = None
    medium: str | None = None
    group_idx: _Group | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: _Count | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    """One copy of each block was removed: a block may be cached several times."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: _Group | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """The cache of a rank is empty."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventKind(msgspec.Struct):
    """The type of any event."""

    type: str


class KvEventBatch(msgspec.Struct, array_like=True):
    """The events that one rank published at once, not decoded yet."""

    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MOST)]
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0, le=4095)] | None = None
