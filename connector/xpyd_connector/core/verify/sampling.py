"""Which prefills, and which of their blocks, a prefill engine takes checksums of."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from xpyd_connector.core.ids import BlockId, RequestId
from xpyd_connector.core.messages import LentBlocks

NULL: int = 0  # vLLM's null block: a window has left it


class SampledBlock(NamedTuple):
    """A block of a prompt, and the prompt's tokens from ``start`` to ``stop`` that are compared of it."""

    group: int
    block: BlockId
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The ``share`` of prefills (0 to 1), and how many ``blocks`` of each at most."""

    share: float
    blocks: int

    def takes(self, name: RequestId) -> bool:
        """Whether the prefill of this name is sampled. All ranks of an engine decide alike."""
        return crc32(name.encode()) < self.share * (1 << 32)

    def choose(
        self,
        name: RequestId,
        groups: Sequence[Sequence[BlockId]],
        *,
        sizes: Mapping[int, int],
        states: Set[int],
        tokens: int,
        wanted: Sequence[LentBlocks] | None = None,
    ) -> tuple[SampledBlock, ...]:
        """Return blocks of a prompt of so many ``tokens``, spread evenly from a place that depends on its name.

        ``groups`` are its blocks from the first token on, or the one block of a state, by KV cache group; ``sizes`` the
        tokens of a block. With ``wanted``, only those of which the decode engine gets all compared tokens.
        """
        found = [
            each
            for each in _candidates(groups, sizes, states, tokens)
            if wanted is None or (wanted[each.group].start <= each.start and each.stop <= wanted[each.group].stop)
        ]
        count, first = min(self.blocks, len(found)), crc32(name.encode()[::-1])
        return tuple(found[(first + number * len(found) // count) % len(found)] for number in range(count))


def _candidates(
    groups: Sequence[Sequence[BlockId]], sizes: Mapping[int, int], states: Set[int], tokens: int
) -> Iterator[SampledBlock]:
    """Yield the blocks that hold something. A decode engine computes the last token, which a state has not taken in."""
    end = tokens if states else tokens - 1
    for group, ids in enumerate(groups):
        if group not in sizes:
            continue  # layers of another pipeline stage
        if group in states:
            yield from (SampledBlock(group, block, tokens - 1, tokens) for block in ids[-1:] if block != NULL)
            continue
        for number, block in enumerate(ids):
            start, stop = number * sizes[group], min((number + 1) * sizes[group], end)
            if block != NULL and start < stop:
                yield SampledBlock(group, block, start, stop)
