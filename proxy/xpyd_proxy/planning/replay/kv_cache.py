"""The KV cache of one simulated engine: blocks in use, and free blocks that keep their content until they are needed.

As vLLM's (vllm/v1/core/kv_cache_manager.py, block_pool.py): least recently used free blocks go first, of one request
the last block first, so that the beginning of a prompt outlives its end.
"""

from collections import OrderedDict
from collections.abc import Sequence


class KvCache:
    """Counts blocks; equal names are one block."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks  # how many there are
        self._users = dict[int, int]()  # of each named block in use
        self._unnamed = 0  # in use, and not full yet
        self._free = OrderedDict[int, None]()  # whose content is still there, the oldest first

    @property
    def used(self) -> int:
        """Return how many blocks are in use."""
        return len(self._users) + self._unnamed

    def found(self, names: Sequence[int]) -> int:
        """Return how many of these blocks are there, up to the first that is not."""
        for count, name in enumerate(names):
            if name not in self._users and name not in self._free:
                return count
        return len(names)

    def take(self, names: Sequence[int], unnamed: int) -> bool:
        """Use these blocks and ``unnamed`` more; False: there is no room, and nothing has changed."""
        users, free = self._users, self._free
        if self.used + unnamed + len(names) - sum(map(users.__contains__, names)) > self.blocks:
            return False
        for name in names:
            if name in users:
                users[name] += 1
            else:
                free.pop(name, None)
                users[name] = 1
        self._unnamed += unnamed
        while self.used + len(free) > self.blocks:
            free.popitem(last=False)
        return True

    def give(self, names: Sequence[int], unnamed: int, filled: Sequence[int] = ()) -> None:
        """Give back what was taken; ``filled``: the unnamed blocks that have become these."""
        users, free = self._users, self._free
        self._unnamed -= unnamed
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
