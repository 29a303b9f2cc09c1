"""All ranks of an engine, and all readers: a batch changes its rank's state, and goes to all."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pdrelay_connector.core.kv_events.cached_blocks import MAX_BLOCKS, CachedBlocks
from pdrelay_connector.core.kv_events.event_batch import (
    AllBlocksCleared,
    BlockStored,
    KVEvent,
    decode_batch,
    encode_batch,
    with_rank,
)
from pdrelay_connector.core.kv_events.group_announcements import GroupAnnouncements
from pdrelay_connector.core.kv_events.reader_queue import MAX_BATCH, MAX_BEHIND_BYTES, ReaderQueue
from pdrelay_connector.errors import ProtocolViolation

MAX_READERS = 64


@dataclass(slots=True)
class _Rank:
    blocks: CachedBlocks
    groups: GroupAnnouncements
    ts: float = 0.0  # s, of the last batch: the time of batches that are composed here


@dataclass(slots=True)
class HubCounts:
    """What has happened since the start."""

    batches: int = 0
    unknown_events: int = 0  # of types of a later vLLM; passed on
    refused_readers: int = 0  # there were too many
    forgotten: int = 0  # times that the state of a rank was given up
    overflows: int = 0  # of these, for its number of blocks
    refused_batches: int = 0  # of these, for a batch that is not vLLM's or too long
    slow_readers: int = 0  # cut off


@dataclass(slots=True)
class KVEventHub:
    """The state of each rank, and the queue of each reader."""

    max_blocks: int = MAX_BLOCKS  # of a rank
    max_behind: int = MAX_BEHIND_BYTES  # of batches that wait for a reader
    counts: HubCounts = field(default_factory=HubCounts)
    _ranks: dict[int, _Rank] = field(default_factory=dict[int, _Rank])
    _readers: list[ReaderQueue] = field(default_factory=list[ReaderQueue])

    @property
    def readers(self) -> int:
        """How many readers there are."""
        return len(self._readers)

    @property
    def blocks(self) -> dict[int, int]:
        """How many blocks are known of each rank."""
        return {rank: len(state.blocks) for rank, state in self._ranks.items()}

    def blocks_of(self, rank: int) -> CachedBlocks:
        """Return the state of a rank."""
        return self._ranks[rank].blocks

    def add_rank(self, rank: int, groups: Sequence[BlockStored] = ()) -> None:
        """Begin a rank without blocks; its KV cache groups may be known."""
        self._ranks[rank] = _Rank(CachedBlocks(self.max_blocks), GroupAnnouncements(groups))

    def remove_rank(self, rank: int) -> None:
        """Forget a rank that the engine has no more."""
        self.forget(rank)
        del self._ranks[rank]

    def publish(self, rank: int, payload: bytes) -> None:
        """Take the next batch of a rank, in the form in which vLLM published it.

        A batch that cannot be understood or passed on is lost, and with it what is known of the
        rank.
        """
        self.counts.batches += 1
        state = self._ranks[rank]
        try:
            batch = decode_batch(payload)
            fits = state.blocks.apply(batch.events)
        except ProtocolViolation:
            self._refuse(rank)
            return
        state.ts = batch.ts
        self.counts.unknown_events += batch.unknown
        for event in batch.events:
            if isinstance(event, BlockStored):
                state.groups.add(event)
        if batch.rank != rank:
            payload = with_rank(payload, rank)
        if not fits:
            self.counts.overflows += 1
            self.forget(rank)
        elif len(payload) > MAX_BATCH:
            self._refuse(rank)
        else:
            self._send(payload)

    def _refuse(self, rank: int) -> None:
        self.counts.refused_batches += 1
        self.forget(rank)

    def forget(self, rank: int) -> None:
        """Forget the state of a rank, here and at every reader: batches are lost."""
        self.counts.forgotten += 1
        state = self._ranks[rank]
        state.blocks.clear()
        self._send(encode_batch(state.ts, _beginning(state), rank))

    def join(self, wake: Callable[[], None]) -> ReaderQueue | None:
        """Return the queue of a new reader, which begins with the present state; None: too many."""
        if len(self._readers) >= MAX_READERS:
            self.counts.refused_readers += 1
            return None
        queue = ReaderQueue(self._state(), wake, self.max_behind)
        self._readers.append(queue)
        return queue

    def leave(self, queue: ReaderQueue) -> None:
        """Forget a reader, if it is still one."""
        if queue in self._readers:
            self._readers.remove(queue)

    def _send(self, payload: bytes) -> None:
        for queue in list(self._readers):
            queue.put(payload)
            if queue.closed:
                self.counts.slow_readers += 1
                self._readers.remove(queue)

    def _state(self) -> Iterator[bytes]:
        """Return the batches of the present state; later changes do not affect them."""
        pieces = [
            (rank, state.ts, _beginning(state), state.blocks.snapshot(ts=state.ts, rank=rank))
            for rank, state in sorted(self._ranks.items())
        ]
        return _state_batches(pieces)


def _beginning(state: _Rank) -> list[KVEvent]:
    """Return the first events of a state: no blocks, and the announcements of groups."""
    return [AllBlocksCleared(), *state.groups.events()]


def _state_batches(
    pieces: list[tuple[int, float, list[KVEvent], Iterator[bytes]]],
) -> Iterator[bytes]:
    for rank, ts, beginning, stored in pieces:
        yield encode_batch(ts, beginning, rank)
        yield from stored
    for rank, ts, _, _ in pieces:
        yield encode_batch(ts, [], rank)
