"""Batches of KV events as vLLM publishes them (``KVEventBatch``, vllm/distributed/kv_events.py).

A batch is the msgpack array ``[ts, [event, ...], data_parallel_rank]``, an event a map with its
class under "type".
"""

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from pdrelay_connector.errors import ProtocolViolation

BlockHash: TypeAlias = bytes | int  # int with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that are in a cache now, each the child of the one before; fields as vLLM has them."""

    block_hashes: list[BlockHash]
    token_ids: list[int]  # of all blocks
    block_size: int  # tokens
    parent_block_hash: BlockHash | None = None  # of the first block
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[msgspec.Raw] | None = None  # one for each block: LoRA, images, salt
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    lookahead_token_ids: list[msgspec.Raw] | None = None  # one for each block; vLLM 0.33


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that are no more where they were stored."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The rank has no block any more."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class _Envelope(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Kind(msgspec.Struct):
    type: str


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A batch as it was received."""

    ts: float  # s, the engine's wall clock
    events: tuple[KVEvent, ...]
    rank: int | None
    unknown: int  # events of types that are not known here, left out


_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_EVENT: msgspec.msgpack.Decoder[KVEvent] = msgspec.msgpack.Decoder(KVEvent)
_KIND = msgspec.msgpack.Decoder(_Kind)
_ENCODER = msgspec.msgpack.Encoder()


def decode_batch(payload: bytes) -> EventBatch:
    """Decode a batch; raises :exc:`~pdrelay_connector.errors.ProtocolViolation`."""
    try:
        envelope = _ENVELOPE.decode(payload)
        events = [_decode_event(raw) for raw in envelope.events]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise ProtocolViolation(f"a batch of KV events that is not vLLM's: {exc}") from exc
    known_events = tuple(event for event in events if event is not None)
    return EventBatch(
        envelope.ts, known_events, envelope.data_parallel_rank, len(events) - len(known_events)
    )


def _decode_event(raw: msgspec.Raw) -> KVEvent | None:
    try:
        return _EVENT.decode(raw)
    except msgspec.ValidationError:
        if _KIND.decode(raw).type in TYPES:
            raise
        return None  # of a later version of vLLM


def encode_batch(ts: float, events: list[KVEvent], rank: int) -> bytes:
    """Return a batch as vLLM would publish it."""
    return _ENCODER.encode((ts, events, rank))


def with_rank(payload: bytes, rank: int) -> bytes:
    """Return a batch that names this rank, with all its events, also of unknown types."""
    envelope = _ENVELOPE.decode(payload)
    return _ENCODER.encode((envelope.ts, envelope.events, rank))
