"""Which tokens a rank keeps where several ranks divide a context among them (DCP): arithmetic.

vLLM gives ``interleave`` tokens to the first rank, as many to the second, and so on in turn
(``ComputeSlotMappingKernel`` in ``vllm/v1/worker/block_table.py``). What a rank keeps lies in its
blocks without gaps, so a block of a request's table is one block on each of the ranks.
"""

from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Places: TypeAlias = npt.NDArray[np.int64]


class Shard(NamedTuple):
    """The part of ``rank`` among ``ranks``. ``interleave`` is tokens, and divides a block."""

    rank: int = 0
    ranks: int = 1
    interleave: int = 1

    def before(self, token: int) -> int:
        """Return how many of the tokens before this one the rank keeps."""
        turns, rest = divmod(token, self.ranks * self.interleave)
        own = rest - self.rank * self.interleave
        return turns * self.interleave + min(max(own, 0), self.interleave)

    def keeps(self, tokens: Places) -> npt.NDArray[np.bool_]:
        """Return which of these tokens the rank keeps."""
        ranks: Places = tokens // self.interleave % self.ranks
        return np.equal(ranks, self.rank)

    def places(self, tokens: Places) -> Places:
        """Return the number of each token, which the rank keeps, among those that it keeps."""
        turns = tokens // (self.ranks * self.interleave)
        return turns * self.interleave + tokens % self.interleave


UNDIVIDED: Final = Shard()


def shards_in_common(shards: int, shards_here: int, shard_here: int) -> range:
    """Return which of ``shards`` parts have tokens of a part here: one number divides the other."""
    step = min(shards, shards_here)
    return range(shard_here % step, shards, step)


def shared_places(
    start: int, stop: int, unit: int, theirs: Shard, ours: Shard
) -> tuple[Places, Places]:
    """Return where, on their rank and on ours, each unit of tokens begins that both keep.

    They cover the tokens from ``start`` to ``stop``, rounded outwards to whole units. ``unit``
    tokens must lie side by side on both ranks; of equal parts any number does.
    """
    if theirs == ours:
        places = np.arange(ours.before(start) // unit * unit, ours.before(stop), unit, np.int64)
        return places, places
    tokens = np.arange(start // unit * unit, stop, unit, np.int64)
    tokens = tokens[theirs.keeps(tokens) & ours.keeps(tokens)]
    return theirs.places(tokens), ours.places(tokens)
