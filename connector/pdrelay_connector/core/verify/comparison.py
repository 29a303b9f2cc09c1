"""Compares the checksums of a prefill engine's blocks with those of the blocks that have
arrived.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import BlockSum, RankSums
from pdrelay_connector.core.ports import CacheReader
from pdrelay_connector.core.verify.sampling import SampledBlock


class Comparison(NamedTuple):
    """How many blocks were compared, and how many of them differ."""

    checked: int
    wrong: int

    @property
    def failure(self) -> str:
        """Why the load has failed; nothing if all compared blocks are equal."""
        if not self.wrong:
            return ""
        return f"{self.wrong} of {self.checked} sampled blocks are not what the prefill engine computed"


def sums_of(worker: int, blocks: Iterable[SampledBlock], cache: CacheReader | None) -> RankSums:
    """Take the checksums of sampled blocks of this rank's cache; layers of other pipeline stages
    are left out.

    So are blocks that cannot be read, which are all of them without a ``cache``: the reader still
    has its answer.
    """
    if cache is None:
        return RankSums(worker, "", ())
    return RankSums(
        worker,
        cache.shape,
        tuple(
            BlockSum(each.group, each.start, each.stop, crc)
            for each in blocks
            if (size := cache.block_size(each.group))
            and (crc := _checksum(cache, each.block, each, size)) is not None
        ),
    )


def compare(
    sums: RankSums, token_ranges: Sequence[TokenRange], cache: CacheReader | None
) -> Comparison:
    """Compare what has arrived in the ``local`` blocks of these token ranges with the sums of the
    rank it came from.

    Nothing is compared if the rank keeps KV in another shape, nor is a block that cannot be read,
    or of which not all compared tokens were loaded. A block is read once, however often the rank
    names it: a hostile one costs us at most a look at what was loaded, and at MAX_SUMS blocks.
    """
    checked = wrong = 0
    if cache is None or sums.shape != cache.shape:
        return Comparison(0, 0)
    # the first of each stays
    distinct = {(each.group, each.start): each for each in reversed(sums.blocks)}
    for each in distinct.values():
        size = cache.block_size(each.group)
        if size and (block := _arrived(each, token_ranges, size)) is not None:
            crc = _checksum(cache, block, each, size)
            checked += crc is not None
            wrong += crc not in (None, each.crc)
    return Comparison(checked, wrong)


def count(comparison: Comparison, counters: Counters) -> None:
    """Count a comparison."""
    counters.count("blocks_checked", comparison.checked)
    counters.count("blocks_wrong", comparison.wrong)
    counters.count("loads_unchecked", int(not comparison.checked))


def _arrived(each: BlockSum, token_ranges: Sequence[TokenRange], size: int) -> BlockId | None:
    """Return our block of these tokens; None if not all of them were loaded, or they are not in one
    block.
    """
    if each.start % size or not each.start < each.stop <= each.start + size:
        return None
    for known in token_ranges:
        if known.group == each.group and known.start <= each.start and each.stop <= known.stop:
            return known.local[each.start // size - known.start // size]
    return None


def _checksum(
    cache: CacheReader, block: BlockId, tokens: BlockSum | SampledBlock, size: int
) -> int | None:
    first = tokens.start // size * size
    return cache.checksum(tokens.group, block, tokens.start - first, tokens.stop - first)
