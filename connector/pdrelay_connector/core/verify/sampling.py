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
    """A block of a prompt, and its compared tokens from ``start`` to ``stop``."""

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
        lent: Sequence[LentBlocks] | None = None,
    ) -> tuple[SampledBlock, ...]:
        """Return blocks of a prompt, spread evenly from a place that its name decides.

        ``groups``: its blocks by KV cache group, from the first token on (one block for a state);
        ``sizes``: tokens of a block. ``lent``: only blocks whose compared tokens the decode engine
        all gets.
        """
        prompt = _Prompt(sizes, states, tokens)
        choices = [
            (group, ids, numbers)
            for group, ids in enumerate(groups)
            if (numbers := prompt.numbers(group, ids, lent[group] if lent is not None else None))
        ]
        ends = list(accumulate(len(numbers) for _, _, numbers in choices))
        total = ends[-1] if ends else 0
        count = min(self.blocks, total)
        first = crc32(name.encode()[::-1])
        chosen: list[SampledBlock] = []
        for place in ((first + number * total // count) % total for number in range(count)):
            at = bisect_right(ends, place)
            group, ids, numbers = choices[at]
            number = numbers[place - ends[at]]  # counted from the group's end
            chosen.append(SampledBlock(group, ids[number], *prompt.span(group, number)))
        return tuple(chosen)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The properties of a prompt that all KV cache groups share."""

    sizes: Mapping[int, int]
    states: Set[int]
    tokens: int

    @property
    def end(self) -> int:
        """The end of the compared tokens: a decode engine computes the last token itself."""
        return self.tokens if self.states else self.tokens - 1

    def span(self, group: int, number: int) -> tuple[int, int]:
        """Return the tokens that are compared of a block of a group, or of its state."""
        if group in self.states:
            return self.tokens - 1, self.tokens
        size = self.sizes[group]
        return number * size, min((number + 1) * size, self.end)

    def numbers(self, group: int, ids: Sequence[BlockId], lent: LentBlocks | None) -> Sequence[int]:
        """Return the numbers of a group's blocks that are not null; a range if all are."""
        if group not in self.sizes:
            return ()  # layers of another pipeline stage
        if group in self.states:
            first = max(len(ids) - 1, 0)
            last = len(ids)
            if lent is not None and not lent.start < self.tokens <= lent.stop:
                return ()
        else:
            size = self.sizes[group]
            first = 0
            last = min(len(ids), -(-self.end // size))
            if lent is not None:
                first = -(-lent.start // size)
                last = last if self.end <= lent.stop else min(last, lent.stop // size)
        numbers = range(first, last)
        return (
            [number for number in numbers if ids[number] != NULL]
            if NULL in ids[first:last]
            else numbers
        )
