"""KV events as vLLM makes and reads them, and a reader of our stream that is independent of the code under test."""

import warnings

import msgspec
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

GPU = "GPU"
MAX_FRAME = 16 << 20


def stored(names, *, parent=None, size=4, group=0, medium=GPU):
    """Return a chain of blocks, with tokens of their own."""
    return BlockStored(
        block_hashes=list(names),
        parent_block_hash=parent,
        token_ids=[index % 50_000 for index in range(size * len(names))],
        block_size=size,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=group,
        kv_cache_spec_kind="full_attention",
    )


def removed(names, *, group=0, medium=GPU):
    return BlockRemoved(block_hashes=list(names), medium=medium, group_idx=group)


def cleared():
    return AllBlocksCleared()


def branch(path, start, **options):
    """Return the blocks of a path through a tree from some depth on; a name is its path, as a hash is its prefix."""
    start = min(start, len(path) - 1)
    names = [bytes(path[:end]) for end in range(start + 1, len(path) + 1)]
    return stored(names, parent=bytes(path[:start]) or None, **options)


_PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
_PLACES = {"group": st.sampled_from([0, 1]), "medium": st.sampled_from([GPU, "CPU"])}
EVENTS = st.one_of(
    st.builds(branch, _PATHS, st.integers(0, 3), **_PLACES),
    st.builds(removed, st.lists(st.builds(bytes, _PATHS), max_size=3), **_PLACES),
    st.builds(cleared),
)


def batch(*events, rank=0, ts=0.0):
    """Return a batch as vLLM's publisher encodes it."""
    return msgspec.msgpack.encode(KVEventBatch(ts=ts, events=list(events), data_parallel_rank=rank))


def decoded(payload):
    """Return a batch as vLLM's own subscribers decode it."""
    return msgspec.msgpack.decode(payload, type=KVEventBatch)


def apply(blocks, payload):
    """Apply a batch to a reader's state: rank -> {(hash, place)}."""
    found = decoded(payload)
    known = blocks.setdefault(found.data_parallel_rank, set())
    for event in found.events:
        if isinstance(event, AllBlocksCleared):
            known.clear()
            continue
        place = (event.medium, event.group_idx, event.locality, event.ownership)
        names = {(name, place) for name in event.block_hashes}
        if isinstance(event, BlockStored):
            known |= names
        else:
            known -= names


def blocks_of(payloads, rank=0):
    """Return what a rank has after these batches."""
    blocks = {}
    for payload in payloads:
        apply(blocks, payload)
    return blocks.get(rank, set())


class StreamReader:
    """A reader of ``GET /v1/pdrelay/kv_events``, as docs/kv-events.md describes the bytes."""

    def __init__(self):
        self.blocks = {}  # rank -> {(hash, place)}
        self.batches = []
        self.signs_of_life = 0
        self.complete = set()  # ranks whose state was told to its end
        self._data = b""

    def feed(self, data):
        self._data += data
        while len(self._data) >= 4:
            length = int.from_bytes(self._data[:4], "big")
            assert length <= MAX_FRAME
            if length == 0:
                self.signs_of_life += 1
                self._data = self._data[4:]
                continue
            if len(self._data) < 4 + length:
                return
            number = int.from_bytes(self._data[4:12], "big")
            payload = self._data[12 : 4 + length]
            assert number == len(self.batches)
            self._data = self._data[4 + length :]
            self.batches.append(payload)
            apply(self.blocks, payload)
            if not decoded(payload).events:
                self.complete.add(decoded(payload).data_parallel_rank)

    def names(self, rank=0):
        return self.blocks.get(rank, set())


def follow_frames(data):
    reader = StreamReader()
    reader.feed(data)
    return reader
