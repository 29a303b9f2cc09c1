"""The blocks in engines' prefix caches, by engine and data-parallel rank, from their KV events.

A block counts as often as it was stored, and is gone when it was removed as often: vLLM keeps equal
blocks of two requests apart, and publishes both. In doubt a block counts as absent: without a known
parent, in a group of an unknown kind, or of a rank whose initial state is incomplete.

An event without blocks announces its group: an engine's plugin begins a rank's state with one for
each group.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from pdrelay_proxy.core.fleet.health import ChangeCount
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.kv_events.core.event_stream import read_event
from pdrelay_proxy.features.kv_events.core.known_prompts import CachedBeginning
from pdrelay_proxy.features.kv_events.core.rank_cache import GroupBlocks, RankCache, common_part
from pdrelay_proxy.features.kv_events.core.token_blocks import (
    ITEM,
    ROOT,
    TokenPrompt,
    extras_of,
    key_of,
    packed,
)
from pdrelay_proxy.features.kv_events.event_schemas import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
)

BLOCKS_MOST: Final = 1_000_000  # of all engines: 200 to 300 MB
ENGINE_BLOCKS_MOST: Final = 500_000  # of one engine, all its ranks and groups
RANKS_MOST: Final = 256  # of one engine
_STEP: Final = 256  # blocks that are applied between two yields: 0.4 ms of CPU
_FULL: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_WINDOW: Final = frozenset({"sliding_window", "sliding_window_mla"})
_STATE: Final = "mamba"
_NO_PREFIX: Final = frozenset({"cross_attention", "encoder_only_attention"})  # no part of a hit
# vLLM's BlockPool writes GPU on every platform; other media are other tiers
_HERE: Final = frozenset({None, "GPU"})


class IndexCounts:
    """The events of one engine since the counts were taken last."""

    __slots__ = ("cleared", "ignored", "removed", "stored", "unknown_parents")

    def __init__(self) -> None:
        self.stored = 0  # blocks
        self.removed = 0  # blocks
        self.cleared = 0  # events
        self.ignored = 0  # events: of an unknown type, another tier or an odd shape
        self.unknown_parents = 0  # blocks


class _EngineCaches:
    """The caches of one engine while its events are followed."""

    __slots__ = ("blocks", "counts", "is_dropped", "members", "ranks")

    def __init__(self, members: Mapping[InstanceId, int | None]) -> None:
        self.members = members  # the instances it is, and their ranks
        self.ranks: dict[int, RankCache] = {}
        self.blocks = 0  # of all ranks and groups
        self.counts = IndexCounts()
        self.is_dropped = False  # it has more blocks than the index keeps


class CacheIndex:
    """The caches of all engines whose events are followed.

    An engine is named by one of its instances: each data-parallel rank may be one.
    """

    def __init__(self, *, most: int = BLOCKS_MOST, engine_most: int = ENGINE_BLOCKS_MOST) -> None:
        self._most = most
        self._engine_most = engine_most
        self._engines: dict[InstanceId, _EngineCaches] = {}
        # by instance: its engine and rank
        self._locations: dict[InstanceId, tuple[_EngineCaches, int | None]] = {}
        self._blocks = 0
        self.changes = ChangeCount()  # results stay valid while its count is the same

    def __len__(self) -> int:
        return self._blocks

    def open(self, engine: InstanceId, members: Mapping[InstanceId, int | None]) -> None:
        """Begin with an empty engine; ``members``: its instances, each with its rank."""
        self.forget(engine)
        self.changes.count += 1
        caches = self._engines[engine] = _EngineCaches(members)
        for name, rank in members.items():
            self._locations[name] = (caches, rank)

    def forget(self, engine: InstanceId) -> None:
        """Forget an engine that is not followed any more."""
        caches = self._engines.pop(engine, None)
        if caches is None:
            return
        self.changes.count += 1
        self._blocks -= caches.blocks
        for name in caches.members:
            self._locations.pop(name, None)

    def blocks(self, engine: InstanceId) -> int:
        """Return how many blocks of an engine the index has."""
        caches = self._engines.get(engine)
        return 0 if caches is None else caches.blocks

    def is_dropped(self, engine: InstanceId) -> bool:
        """Tell whether an engine was dropped for too many blocks, until it is opened again."""
        caches = self._engines.get(engine)
        return caches is not None and caches.is_dropped

    def take_counts(self, engine: InstanceId) -> IndexCounts:
        """Return the counts of an engine since the last call."""
        caches = self._engines.get(engine)
        if caches is None:
            return IndexCounts()
        counts = caches.counts
        caches.counts = IndexCounts()
        return counts

    # ---- events

    def apply(self, engine: InstanceId, batch: KvEventBatch) -> Iterator[int]:
        """Apply a batch in short steps, each of which yields the engine's number of blocks.

        Raises:
            BadKvEvents: an unreadable event, which may have removed blocks.
        """
        caches = self._engines.get(engine)
        if caches is None or caches.is_dropped:
            return
        self.changes.count += 1
        rank = self._rank(caches, batch.data_parallel_rank or 0)
        if rank is None:
            return
        if not batch.events:  # the end of the initial state, or an idle batch
            rank.is_whole = True
        done = 0
        for raw in batch.events:
            # before each event: a look-up between two steps may be cached by its caller
            self.changes.count += 1
            event = read_event(raw)
            if isinstance(event, BlockStored):
                for place in range(_STEP, len(event.block_hashes), _STEP):
                    self._stored(caches, rank, event, place - _STEP)
                    yield caches.blocks
                last_start = max(0, len(event.block_hashes) - 1) // _STEP * _STEP
                self._stored(caches, rank, event, last_start)
                done += 1 + len(event.block_hashes) - last_start
            else:
                done += 1 + self._changed(caches, rank, event)
            if self._is_full(caches):
                return
            if done >= _STEP:
                done = 0
                yield caches.blocks

    def _rank(self, engine: _EngineCaches, number: int) -> RankCache | None:
        """Return the cache of a rank; None: the engine has too many ranks."""
        rank = engine.ranks.get(number)
        if rank is None:
            if len(engine.ranks) >= RANKS_MOST:
                self._drop(engine)
                return None
            rank = engine.ranks[number] = RankCache()
        return rank

    def _changed(
        self, engine: _EngineCaches, rank: RankCache, event: BlockRemoved | AllBlocksCleared | None
    ) -> int:
        """Apply an event that stores no block; return how many blocks it names."""
        if isinstance(event, BlockRemoved) and _is_here(event.medium, event.locality):
            self._remove(engine, rank, event)
            return len(event.block_hashes)
        if isinstance(event, AllBlocksCleared):
            self._clear(engine, rank)
        else:
            engine.counts.ignored += 1
        return 0

    def _stored(
        self, engine: _EngineCaches, rank: RankCache, event: BlockStored, start: int
    ) -> None:
        """Apply a part of an event: up to _STEP blocks from ``start`` on."""
        self.changes.count += 1
        if not _is_here(event.medium, event.locality):
            engine.counts.ignored += not start
        elif not self._is_full(engine) and (group := self._group(engine, rank, event)) is not None:
            self._store(engine, group, event, start)

    def _store(
        self, engine: _EngineCaches, group: GroupBlocks, event: BlockStored, start: int
    ) -> None:
        hashes = event.block_hashes[start : start + _STEP]
        added = -len(group.copies)
        if not group.is_full:
            for block in hashes:
                group.copies[block] = group.copies.get(block, 0) + 1
            engine.counts.stored += len(hashes)
        else:
            self._store_full(engine, group, event, start, hashes)
        added += len(group.copies)
        engine.blocks += added
        self._blocks += added

    def _store_full(
        self,
        engine: _EngineCaches,
        group: GroupBlocks,
        event: BlockStored,
        start: int,
        hashes: list[BlockHash],
    ) -> None:
        size = event.block_size
        extras = event.extra_keys
        lora = event.lora_name
        before = event.block_hashes[start - 1] if start else event.parent_block_hash
        parent = ROOT if before is None else group.key_of.get(before)
        if parent is None:
            engine.counts.unknown_parents += len(hashes)
            return
        tokens = packed(event.token_ids[start * size : (start + len(hashes)) * size])
        copies = group.copies
        step = size * ITEM
        child_of = group.child_of
        for place, block in enumerate(hashes):
            key = group.key_of.get(block)
            if key is None:
                own = None if extras is None else extras[start + place]
                text = b"" if own is None and lora is None else extras_of(lora, own or ())
                key = group.key_of[block] = key_of(
                    parent, tokens[place * step : (place + 1) * step], text
                )
            # of two blocks with equal contents (an adapter was replaced) the newer one is hit
            group.hash_of[key] = block
            copies[block] = copies.get(block, 0) + 1
            if parent != ROOT:
                child_of[parent] = key
            parent = key
        engine.counts.stored += len(hashes)

    def _group(
        self, engine: _EngineCaches, rank: RankCache, event: BlockStored
    ) -> GroupBlocks | None:
        """Return the group of an event; None: it does not matter, or is not understood."""
        kind = event.kv_cache_spec_kind
        number = event.group_idx or 0
        size = event.block_size
        if kind in _NO_PREFIX:
            return None
        is_full = kind in _FULL
        window = event.kv_cache_spec_sliding_window or 0
        if not is_full and kind != _STATE and (kind not in _WINDOW or window < 1):
            rank.is_unclear = True
            return None
        group = rank.groups.get(number)
        if group is None or group.is_full is not is_full or group.size < size:
            # Smaller sizes are parts of blocks (``cache_partial_block`` in
            # vllm/v1/core/block_pool.py).
            needed = 1 if kind == _STATE else max(1, -(-(window - 1) // size))
            if group is not None:
                self._lose(engine, group)
            group = rank.groups[number] = GroupBlocks(size, is_full=is_full, needed=needed)
        is_odd = is_full and len(event.token_ids) != size * len(event.block_hashes)
        is_odd = is_odd or (
            event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes)
        )
        if is_odd or size != group.size:
            engine.counts.ignored += 1
            return None
        return group

    def _remove(self, engine: _EngineCaches, rank: RankCache, event: BlockRemoved) -> None:
        group = rank.groups.get(event.group_idx or 0)
        removed = 0
        if group is not None:
            for block in event.block_hashes:
                removed += group.remove(block)
        engine.counts.removed += len(event.block_hashes)
        engine.blocks -= removed
        self._blocks -= removed

    def _clear(self, engine: _EngineCaches, rank: RankCache) -> None:
        # the groups stay: an engine's are always the same
        for group in rank.groups.values():
            self._lose(engine, group)
            group.clear()
        engine.counts.cleared += 1

    def _lose(self, engine: _EngineCaches, group: GroupBlocks) -> None:
        engine.blocks -= len(group.copies)
        self._blocks -= len(group.copies)

    def _is_full(self, engine: _EngineCaches) -> bool:
        """Drop an engine with too many blocks; return whether it is dropped."""
        if engine.blocks > self._engine_most or self._blocks > self._most:
            self._drop(engine)
        return engine.is_dropped

    def _drop(self, engine: _EngineCaches) -> None:
        self._blocks -= engine.blocks
        engine.blocks = 0
        engine.is_dropped = True
        engine.ranks.clear()

    # ---- questions

    def cached(self, instance: InstanceId, prompt: TokenPrompt, lora: str | None) -> int | None:
        """Return how many tokens of a prompt an instance has cached; None: not known.

        ``lora``: the adapter of the request. An instance that chooses among its ranks itself counts
        as its worst rank.
        """
        location = self._locations.get(instance)
        if location is None:
            return None
        engine, number = location
        if number is not None:
            rank = engine.ranks.get(number)
            return (
                None
                if rank is None or not rank.is_whole or rank.is_unclear
                else rank.cached(prompt, lora)
            )
        least: int | None = None
        for rank in engine.ranks.values():
            if not rank.is_whole or rank.is_unclear:
                return None
            tokens = rank.cached(prompt, lora)
            least = tokens if least is None else min(least, tokens)
        return least

    def beginning(
        self, instance: InstanceId, prompt: TokenPrompt, count: int, lora: str | None
    ) -> CachedBeginning | None:
        """Return how much of the first ``count`` ids an instance has cached; None: not known.

        They may be the beginning of a longer prompt. ``lora`` and several ranks as in ``cached``.
        """
        location = self._locations.get(instance)
        if location is None:
            return None
        engine, number = location
        ranks = engine.ranks
        common: CachedBeginning | None = None
        for rank in (
            ranks.values() if number is None else [ranks[number]] if number in ranks else []
        ):
            if not rank.is_whole or rank.is_unclear:
                return None
            cached = rank.beginning(prompt, count, lora)
            if cached is None:
                return None
            common = cached if common is None else common_part(common, cached)
        return common


def _is_here(medium: str | None, locality: str | None) -> bool:
    return medium in _HERE and locality != "REMOTE"
