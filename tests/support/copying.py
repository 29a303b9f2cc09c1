"""Copies between the blocks of an engine and its host memory, on the in-memory fabric."""

import itertools

from pdrelay_connector.core.ids import CopyId
from pdrelay_connector.core.ports import CopyResult
from support.in_memory import BLOCK_BYTES


class MemoryCopier:
    """Implements :class:`~pdrelay_connector.core.ports.Copier` on one memory that holds the cache and the host buffer.

    ``cache`` and ``buffer`` are regions of that memory, one of each for every layer, in the same order. Bytes are
    copied by ``poll``, one copy after the other; ``turns`` is how many polls each takes.
    """

    def __init__(self, network, memory, cache, buffer, *, turns=0):
        self._network = network
        self._memory = memory
        self._layers = list(zip(cache, buffer, strict=True))
        self._numbers = map(CopyId, itertools.count(1))
        self.running = {}  # CopyId -> (is it out, blocks, slots), in the order of asking
        self.turns = self._left = turns
        self.stuck = False  # nothing is copied: a device that is busy
        self.failure = ""  # why copies fail from now on
        self.before_copy = lambda number: None  # called when the bytes move

    def __len__(self):
        return len(self.running)

    def out(self, blocks, slots):
        """Start copying from the cache."""
        return self._start(is_out=True, blocks=blocks, slots=slots)

    def into(self, slots, blocks):
        """Start copying into the cache."""
        return self._start(is_out=False, blocks=blocks, slots=slots)

    def _start(self, *, is_out, blocks, slots):
        assert [len(group) for group in blocks] == [len(group) for group in slots]
        number = next(self._numbers)
        self.running[number] = is_out, blocks, slots
        return number

    def poll(self):
        """Copy what it is time for."""
        ended = []
        while self.running and not self.stuck and self._left <= 0:
            number = next(iter(self.running))
            self.before_copy(number)
            moved = 0 if self.failure else self._copy(*self.running[number])
            del self.running[number]
            ended.append(CopyResult(number, self.failure, moved))
            self._left = self.turns
        self._left = self._left - 1 if self.running else self.turns
        return ended

    def _copy(self, is_out, blocks, slots):
        memory = self._network.memories[self._memory]
        moved = 0
        for cache, buffer in self._layers:
            for block, slot in zip(blocks[cache.group], slots[cache.group], strict=True):
                for device, host in zip(pieces(cache, block), pieces(buffer, slot), strict=True):
                    source, target = (device, host) if is_out else (host, device)
                    memory[target] = memory[source]
                    moved += BLOCK_BYTES
        return moved


def pieces(region, block):
    """Return the numbers of the memory's pieces that a block is in, in the order of its heads and tokens."""
    addresses = [
        region.base + row * region.row_stride + head * region.head_stride + token * region.token_stride + byte
        for row in range(block * region.rows, (block + 1) * region.rows)
        for head in range(region.heads)
        for token in range(region.tokens)
        for byte in range(0, region.width, min(region.width, BLOCK_BYTES))
    ]
    return list(dict.fromkeys(address // BLOCK_BYTES for address in addresses))
