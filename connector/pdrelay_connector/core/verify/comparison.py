"""Compares the checksums of a prefill engine's blocks with those of the loaded blocks."""

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
    """Return the checksums of sampled blocks in this rank's cache.

    Layers of other pipeline stages, and blocks that cannot be read, are left out; without a
    ``cache`` the result is empty, and the reader still gets its answer.
    """
    if cache is None:
        return RankSums(worker, "", ())
    return RankSums(
        worker,
        cache.shape,
        tuple(
            BlockSum(block.group, block.start, block.stop, crc)
            for block in blocks
            if (size := cache.block_size(block.group))
            and (crc := _checksum(cache, block.block, block, size)) is not None
        ),
    )


def compare(
    sums: RankSums, token_ranges: Sequence[TokenRange], cache: CacheReader | None
) -> Comparison:
    """Compare the loaded ``local`` blocks of these token ranges with their source rank's sums.

    Nothing is compared if the rank's KV has another shape. A block is skipped if it cannot be read,
    or if not all its compared tokens were loaded. A block is read once, however often the rank
    names it: a hostile rank costs at most a scan of the token ranges, and MAX_SUMS blocks.
    """
    checked = wrong = 0
    if cache is None or sums.shape != cache.shape:
        return Comparison(0, 0)
    # the first of each stays
    distinct = {
        (block_sum.group, block_sum.start): block_sum for block_sum in reversed(sums.blocks)
    }
    for block_sum in distinct.values():
        size = cache.block_size(block_sum.group)
        if size and (block := _arrived(block_sum, token_ranges, size)) is not None:
            crc = _checksum(cache, block, block_sum, size)
            checked += crc is not None
            wrong += crc not in (None, block_sum.crc)
    return Comparison(checked, wrong)


def count(comparison: Comparison, counters: Counters) -> None:
    """Count a comparison."""
    counters.count("blocks_checked", comparison.checked)
    counters.count("blocks_wrong", comparison.wrong)
    counters.count("loads_unchecked", int(not comparison.checked))


def _arrived(block_sum: BlockSum, token_ranges: Sequence[TokenRange], size: int) -> BlockId | None:
    """Return our block of these tokens; None: not all were loaded, or not into one block."""
    if block_sum.start % size or not block_sum.start < block_sum.stop <= block_sum.start + size:
        return None
    for token_range in token_ranges:
        if (
            token_range.group == block_sum.group
            and token_range.start <= block_sum.start
            and block_sum.stop <= token_range.stop
        ):
            return token_range.local[block_sum.start // size - token_range.start // size]
    return None


def _checksum(
    cache: CacheReader, block: BlockId, tokens: BlockSum | SampledBlock, size: int
) -> int | None:
    first = tokens.start // size * size
    return cache.checksum(tokens.group, block, tokens.start - first, tokens.stop - first)
