"""Which prefills, and which of their blocks, a prefill engine takes checksums of."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

from pdrelay_connector.core.ids import BlockId, RequestId
from pdrelay_connector.core.messages import LentBlocks

NULL: int = 0  # vLLM's null block: a window has left it


class SampledBlock(NamedTuple):
    """A block of a prompt, and the prompt's tokens from ``start`` to ``stop`` that are compared of
    it.
    """

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
        """Return blocks of a prompt of so many ``tokens``, spread evenly from a place that depends
        on its name.

        ``groups`` are its blocks from the first token on, or the one block of a state, by KV cache
        group; ``sizes`` the tokens of a block. With ``wanted``, only those of which the decode
        engine gets all compared tokens.
        """
        prompt = _Prompt(sizes, states, tokens)
        found = [
            (group, ids, numbers)
            for group, ids in enumerate(groups)
            if (
                numbers := prompt.numbers(group, ids, wanted[group] if wanted is not None else None)
            )
        ]
        ends = list(accumulate(len(numbers) for _, _, numbers in found))
        total = ends[-1] if ends else 0
        count = min(self.blocks, total)
        first = crc32(name.encode()[::-1])
        chosen: list[SampledBlock] = []
        for place in ((first + number * total // count) % total for number in range(count)):
            at = bisect_right(ends, place)
            group, ids, numbers = found[at]
            number = numbers[place - ends[at]]  # counted from the group's end
            chosen.append(SampledBlock(group, ids[number], *prompt.span(group, number)))
        return tuple(chosen)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What is the same for all KV cache groups of a prompt."""

    sizes: Mapping[int, int]
    states: Set[int]
    tokens: int

    @property
    def end(self) -> int:
        """Where the comparison ends: a decode engine computes the last token, which a state has not
        taken in.
        """
        return self.tokens if self.states else self.tokens - 1

    def span(self, group: int, number: int) -> tuple[int, int]:
        """Return the tokens that are compared of a block of a group, or of its state."""
        if group in self.states:
            return self.tokens - 1, self.tokens
        size = self.sizes[group]
        return number * size, min((number + 1) * size, self.end)

    def numbers(
        self, group: int, ids: Sequence[BlockId], wanted: LentBlocks | None
    ) -> Sequence[int]:
        """Return which blocks of a group hold something, without a look at each of them if all
        do.
        """
        if group not in self.sizes:
            return ()  # layers of another pipeline stage
        if group in self.states:
            first = max(len(ids) - 1, 0)
            last = len(ids)
            if wanted is not None and not wanted.start < self.tokens <= wanted.stop:
                return ()
        else:
            size = self.sizes[group]
            first = 0
            last = min(len(ids), -(-self.end // size))
            if wanted is not None:
                first = -(-wanted.start // size)
                last = last if self.end <= wanted.stop else min(last, wanted.stop // size)
        numbers = range(first, last)
        return (
            [number for number in numbers if ids[number] != NULL]
            if NULL in ids[first:last]
            else numbers
        )
