"""The KV cache of a simulated engine: free blocks keep their content until they are needed.

As in vLLM (vllm/v1/core/kv_cache_manager.py, block_pool.py) the least recently used free blocks are
evicted first, and of one request the last block first, so that a prompt's beginning outlives its
end.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol


class CacheEvents(Protocol):
    """Where a cache publishes its changes, as vLLM's KV events (vllm/distributed/kv_events.py)."""

    def stored(self, name: int, before: int | None, /) -> None:
        """A block is in the cache from now on; ``before``: its parent block (None: no parent)."""
        ...

    def removed(self, name: int, /) -> None:
        """A block is gone."""
        ...


class KvCache:
    """Counts blocks; equal names are one block."""

    def __init__(self, blocks: int, events: CacheEvents | None = None) -> None:
        self.blocks = blocks  # how many there are
        self._events = events  # None: it publishes nothing
        self._users = dict[int, int]()  # of each named block in use
        self._unnamed = 0  # in use, and not full yet
        self._free = OrderedDict[int, None]()  # whose content is still there, the oldest first

    @property
    def used(self) -> int:
        """Return how many blocks are in use."""
        return len(self._users) + self._unnamed

    def count_cached(self, names: Sequence[int]) -> int:
        """Return how many of these blocks are cached, up to the first that is not."""
        for count, name in enumerate(names):
            if name not in self._users and name not in self._free:
                return count
        return len(names)

    def use_blocks(self, names: Sequence[int], unnamed: int) -> bool:
        """Use these blocks and ``unnamed`` more; False: no room, and nothing has changed."""
        users = self._users
        free = self._free
        if self.used + unnamed + len(names) - sum(map(users.__contains__, names)) > self.blocks:
            return False
        before: int | None = None
        for name in names:
            if name in users:
                users[name] += 1
            else:
                if name in free:
                    del free[name]
                elif self._events is not None:
                    self._events.stored(name, before)
                users[name] = 1
            before = name
        self._unnamed += unnamed
        while self.used + len(free) > self.blocks:
            evicted, _ = free.popitem(last=False)
            if self._events is not None:
                self._events.removed(evicted)
        return True

    def release_blocks(
        self, names: Sequence[int], unnamed: int, filled: Sequence[int] = ()
    ) -> None:
        """Release used blocks; ``filled``: the names of the unnamed blocks that are full now."""
        users = self._users
        free = self._free
        self._unnamed -= unnamed
        if self._events is not None:
            for before, name in pairwise([names[-1] if names else None, *filled]):
                if name is not None and name not in users and name not in free:
                    self._events.stored(name, before)
        for name in reversed(filled):
            if name not in users:
                free[name] = None
                free.move_to_end(name)
        for name in reversed(names):
            if users[name] == 1:
                del users[name]
                free[name] = None
            else:
                users[name] -= 1
