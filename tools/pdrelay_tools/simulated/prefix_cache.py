"""A simulated engine's LRU prefix cache and its KV events (vllm/distributed/kv_events.py)."""

import asyncio
import hashlib
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import msgspec

from pdrelay_tools.simulated.rules import Json

_POLL_S: Final = 0.002  # tests use a cache from other threads than the one that serves it
_LIFE_S: Final = 5.0


class PrefixCache:
    """``blocks`` blocks of ``size`` tokens; the events are those of rank 0."""

    def __init__(self, blocks: int, *, size: int = 16) -> None:
        self.readers: list[deque[bytes]] = []  # unsent batches of each connection
        self._most = blocks
        self._size = size
        # the BlockStored event of each block, the least recently used first
        self._stored: OrderedDict[bytes, Json] = OrderedDict()
        self._lock = threading.Lock()

    def use(self, ids: Sequence[int], salt: str | None = None) -> int:
        """Compute a prompt; return how many of its tokens were cached."""
        with self._lock:
            blocks = self._blocks(ids, salt)
            names = list(blocks)[: self._most]
            hit = next(
                (place for place, name in enumerate(names) if name not in self._stored), len(names)
            )
            new = [name for name in names[hit:] if name not in self._stored]
            for name in reversed(names):  # the end of a prompt is evicted before its beginning
                self._stored[name] = blocks[name]
                self._stored.move_to_end(name)
            evicted = [
                self._stored.popitem(last=False)[0] for _ in range(len(self._stored) - self._most)
            ]
            events = [*map(_removed, evicted), *(blocks[name] for name in new)]
            self._publish(events)
            return min(hit, (len(ids) - 1) // self._size) * self._size

    def clear(self) -> None:
        """Evict all blocks."""
        with self._lock:
            self._stored.clear()
            self._publish([{"type": "AllBlocksCleared"}])

    def has(self, ids: Sequence[int], salt: str | None = None) -> int:
        """Return how many tokens of a prompt are cached."""
        hit = 0
        parent = None
        with self._lock:
            while hit < (len(ids) - 1) // self._size:
                parent = self._name(ids, hit * self._size, parent, salt)
                if parent not in self._stored:
                    break
                hit += 1
        return hit * self._size

    async def frames(self) -> AsyncGenerator[bytes]:
        """Yield the present blocks, and then every change, as frames of the KV events route."""
        waiting = deque[bytes]()
        with self._lock:
            self.readers.append(waiting)
            state = _parents_first(self._stored)
            waiting += [_batch([{"type": "AllBlocksCleared"}, *state]), _batch([])]
        number = 0
        silent_s = 0.0
        try:
            while True:
                while waiting:
                    payload = waiting.popleft()
                    yield (
                        (len(payload) + 8).to_bytes(4, "big") + number.to_bytes(8, "big") + payload
                    )
                    number = number + 1
                    silent_s = 0.0
                await asyncio.sleep(_POLL_S)
                silent_s += _POLL_S
                if silent_s > _LIFE_S:
                    yield bytes(4)
                    silent_s = 0.0
        finally:
            self.readers.remove(waiting)

    def _publish(self, events: Sequence[Json]) -> None:
        if events:
            for waiting in self.readers:
                waiting.append(_batch(events))

    def _name(
        self, ids: Sequence[int], start: int, parent: bytes | None, salt: str | None
    ) -> bytes:
        """Return the hash of the block that begins there."""
        tokens = array("I", ids[start : start + self._size]).tobytes()
        keys = b"" if start or salt is None else salt.encode()
        return hashlib.sha256(b"%b|%b|%b" % (parent or b"", tokens, keys)).digest()

    def _blocks(self, ids: Sequence[int], salt: str | None) -> dict[bytes, Json]:
        """Return the BlockStored events of a prompt's full blocks, by their hashes."""
        blocks = dict[bytes, Json]()
        parent = None
        for start in range(0, len(ids) // self._size * self._size, self._size):
            tokens = list(ids[start : start + self._size])
            keys = None if start or salt is None else (salt,)
            name = self._name(ids, start, parent, salt)
            blocks[name] = {
                "type": "BlockStored",
                "block_hashes": [name],
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": self._size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [keys],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
            parent = name
        return blocks


def _removed(name: bytes) -> Json:
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}


def _batch(events: Sequence[Json]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


def _parents_first(stored: OrderedDict[bytes, Json]) -> list[Json]:
    """Order stored blocks so that each comes after its parent, if that is stored."""
    ordered = dict[bytes, Json]()
    for name in stored:
        chain = list[bytes]()
        ancestor = name
        while ancestor in stored and ancestor not in ordered:
            chain.append(ancestor)
            ancestor = stored[ancestor]["parent_block_hash"]
        ordered.update((ancestor, stored[ancestor]) for ancestor in reversed(chain))
    return list(ordered.values())
