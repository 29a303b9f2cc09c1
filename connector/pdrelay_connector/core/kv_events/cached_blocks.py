"""The blocks that one data-parallel rank has cached, by its events.

A block is named by its hash and its place: medium, KV cache group, locality, ownership. A
``BlockRemoved`` takes what was stored with the same four. The names are a set, as vLLM's events do
not tell copies of a block apart: with two copies, the first that is evicted takes the name. A block
may then be cached and unknown, never the other way round.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import msgspec

from pdrelay_connector.core.kv_events.event_batch import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    encode_batch,
)
from pdrelay_connector.errors import ProtocolViolation

MAX_BLOCKS = 1_000_000  # of one rank
MAX_BLOCK_BYTES = 96 << 10  # of one block in a snapshot; a larger one is not kept
MAX_BATCH_BYTES = 256 << 10  # of one batch of a snapshot
_FIELDS_BYTES = 400  # of an event besides its blocks and texts, at most
_NIL = b"\xc0"

# medium, group, locality, ownership
Place: TypeAlias = tuple[str | None, int | None, str | None, str | None]


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What the blocks of one event have in common."""

    block_size: int  # tokens
    lora_id: int | None
    lora_name: str | None
    spec_kind: str | None
    sliding_window: int | None
    place: Place
    size: int  # bytes of an event besides its blocks, at most


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One block at one place."""

    parent: BlockHash | None
    tokens: bytes  # 4 bytes each, in this machine's order; none where the event did not tell them
    extra_key: bytes | None  # msgpack
    lookahead: bytes | None  # msgpack
    kind: BlockKind


CachedCopies: TypeAlias = tuple[CachedBlock, ...]  # one for each place, mostly one


class CachedBlocks:
    """The set of blocks, by events in their order."""

    def __init__(self, limit: int = MAX_BLOCKS) -> None:
        self.overflows = 0  # times that everything was forgotten for its number
        self._limit = limit
        self._blocks: dict[BlockHash, CachedCopies] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def names(self) -> set[tuple[BlockHash, Place]]:
        """Return the names of all blocks."""
        return {(name, copy.kind.place) for name, copies in self._blocks.items() for copy in copies}

    def apply(self, events: Sequence[KVEvent]) -> bool:
        """Follow a batch; return False if there were too many blocks, and all were forgotten.

        Raises :exc:`~pdrelay_connector.errors.ProtocolViolation` for impossible tokens; some events
        are applied then.
        """
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.clear()
        if len(self._blocks) <= self._limit:
            return True
        self.overflows += 1
        self.clear()
        return False

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks = {}  # the old table may be long, and a snapshot may have it

    def snapshot(self, *, ts: float, rank: int) -> Iterator[bytes]:
        """Return batches that store all present blocks, parents first, encoded one at a time."""
        return _compose(dict(self._blocks), ts, rank)

    def _store(self, event: BlockStored) -> None:
        place = (event.medium, event.group_idx, event.locality, event.ownership)
        spec = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        texts = (
            event.lora_name,
            event.kv_cache_spec_kind,
            event.medium,
            event.locality,
            event.ownership,
        )
        size = _FIELDS_BYTES + sum(4 * len(text) for text in texts if text is not None)
        kind = BlockKind(event.block_size, event.lora_id, event.lora_name, *spec, place, size)
        parents: Iterator[BlockHash | None] = iter([event.parent_block_hash, *event.block_hashes])
        extras = _per_block(event, event.extra_keys)
        lookaheads = _per_block(event, event.lookahead_token_ids)
        rows = zip(event.block_hashes, parents, _tokens(event), extras, lookaheads, strict=False)
        for name, parent, tokens, extra, lookahead in rows:
            block = CachedBlock(parent if tokens else None, tokens, extra, lookahead, kind)
            if _size(name, block) <= MAX_BLOCK_BYTES:
                self._put(name, block)
            else:
                self._drop(name, place)

    def _put(self, name: BlockHash, block: CachedBlock) -> None:
        copies = self._blocks.get(name)
        if copies is None:
            self._blocks[name] = (block,)
        else:
            other_places = (copy for copy in copies if copy.kind.place != block.kind.place)
            self._blocks[name] = (*other_places, block)

    def _remove(self, event: BlockRemoved) -> None:
        place = (event.medium, event.group_idx, event.locality, event.ownership)
        for name in event.block_hashes:
            self._drop(name, place)

    def _drop(self, name: BlockHash, place: Place) -> None:
        rest = tuple(copy for copy in self._blocks.get(name, ()) if copy.kind.place != place)
        if rest:
            self._blocks[name] = rest
        else:
            self._blocks.pop(name, None)


def _tokens(event: BlockStored) -> Iterator[bytes]:
    """Yield the tokens of each block; none if they cannot be assigned (a group skips blocks)."""
    size = event.block_size
    if size <= 0 or len(event.token_ids) != size * len(event.block_hashes):
        return repeat(b"", len(event.block_hashes))
    try:
        data = array("I", event.token_ids).tobytes()
    except OverflowError as exc:
        raise ProtocolViolation(f"a KV event with a token id out of range: {exc}") from exc
    step = size * array("I").itemsize
    return (data[at : at + step] for at in range(0, len(data), step))


def _per_block(event: BlockStored, values: list[msgspec.Raw] | None) -> Iterable[bytes | None]:
    """Return a value for each block; None for nil, and for all if their number is wrong."""
    if values is None or len(values) != len(event.block_hashes):
        return repeat(None, len(event.block_hashes))
    return (None if data == _NIL else data for data in map(bytes, values))


def _size(name: BlockHash, block: CachedBlock) -> int:
    """Return an upper bound of a block's bytes as an event."""
    hashes = sum(
        len(block_hash) if isinstance(block_hash, bytes) else 9
        for block_hash in (name, block.parent)
        if block_hash is not None
    )
    extras = len(block.extra_key or b"") + len(block.lookahead or b"")
    return block.kind.size + hashes + 10 + len(block.tokens) // 4 * 5 + extras


def _compose(blocks: dict[BlockHash, CachedCopies], ts: float, rank: int) -> Iterator[bytes]:
    events: list[KVEvent] = []
    last: tuple[BlockHash, CachedBlock, BlockStored] | None = None
    total = 0
    for name, block in _parents_first(blocks):
        size = _size(name, block)
        if total + size > MAX_BATCH_BYTES:
            yield encode_batch(ts, events, rank)
            events = []
            total = 0
            last = None
        if last is not None and _continues(block, last[0], last[1]):
            event = last[2]
            size = size - block.kind.size
        else:
            event = _event_of(block)
            events.append(event)
        event.block_hashes.append(name)
        event.token_ids.extend(array("I", block.tokens))
        if event.extra_keys is not None and block.extra_key is not None:
            event.extra_keys.append(msgspec.Raw(block.extra_key))
        if event.lookahead_token_ids is not None and block.lookahead is not None:
            event.lookahead_token_ids.append(msgspec.Raw(block.lookahead))
        total += size
        last = name, block, event
    if events:
        yield encode_batch(ts, events, rank)


def _event_of(block: CachedBlock) -> BlockStored:
    kind = block.kind
    medium, group, locality, ownership = kind.place
    return BlockStored(
        block_hashes=[],
        token_ids=[],
        block_size=kind.block_size,
        parent_block_hash=block.parent,
        lora_id=kind.lora_id,
        medium=medium,
        lora_name=kind.lora_name,
        extra_keys=None if block.extra_key is None else [],
        group_idx=group,
        kv_cache_spec_kind=kind.spec_kind,
        kv_cache_spec_sliding_window=kind.sliding_window,
        locality=locality,
        ownership=ownership,
        lookahead_token_ids=None if block.lookahead is None else [],
    )


def _continues(block: CachedBlock, before: BlockHash, previous: CachedBlock) -> bool:
    """Tell whether a block can be in the same event as the previous one."""
    same = block.kind == previous.kind and (block.extra_key is None) == (previous.extra_key is None)
    same = same and (block.lookahead is None) == (previous.lookahead is None)
    return same and bool(block.tokens) and bool(previous.tokens) and block.parent == before


def _parents_first(
    blocks: dict[BlockHash, CachedCopies],
) -> Iterator[tuple[BlockHash, CachedBlock]]:
    """Yield all blocks, each after its parent if that is there; the table is used up."""
    for first in list(blocks):
        chain: list[BlockHash] = []
        visited: set[BlockHash] = set()
        name: BlockHash | None = first
        # seen: a loop is no tree, and must end
        while name is not None and name in blocks and name not in visited:
            chain.append(name)
            visited.add(name)
            name = next((copy.parent for copy in blocks[name] if copy.parent is not None), None)
        for block_hash in reversed(chain):
            for copy in blocks.pop(block_hash):
                yield block_hash, copy
