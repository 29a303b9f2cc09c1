"""How a load is cut into parts where host memory is too small for all of it."""

from collections.abc import Iterable, Iterator, Sequence

from pdrelay_connector.core.layout.source_ranks import shared_regions
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import MAX_PART, RankInfo, Region

# a part takes at most one such share of a staging buffer: several loads are under way at the same
# time
SHARE = 4


def steps(ours: RankInfo, theirs: RankInfo) -> dict[int, int]:
    """Return how many tokens of each KV cache group fit into one part; without unlimited groups."""
    limits: dict[int, int] = {}
    for our, their in shared_regions(ours, theirs):
        unit = max(our.block_size, their.block_size)
        for region, info in ((our, ours), (their, theirs)):
            if info.staged:
                step = max(1, share_of(region) * region.block_size // unit) * unit
                limits[our.group] = min(limits.get(our.group, step), step)
    return limits


def most_blocks(token_ranges: Sequence[TokenRange], ours: RankInfo) -> list[int]:
    """Return how many of our slots of each KV cache group the largest part of a load takes."""
    counts = [0] * (1 + max(region.group for region in ours.regions))
    most = {region.group: share_of(region) for region in ours.regions}
    for token_range in token_ranges:
        counts[token_range.group] = min(len(token_range.local), most[token_range.group])
    return counts


def share_of(region: Region) -> int:
    """Return how many blocks of a host buffer one part may take; slot 0 is never used."""
    return min(MAX_PART, max(1, (region.blocks - 1) // SHARE))


def block_sizes(rank: RankInfo) -> dict[int, int]:
    """Return the tokens of a block, by KV cache group, for the groups of a rank's layers."""
    return {region.group: region.block_size for region in rank.regions}


def of_rank(token_ranges: Iterable[TokenRange], rank: RankInfo) -> list[TokenRange]:
    """Return the token ranges of the groups that a rank has: a pipeline stage may lack some."""
    groups = {region.group for region in rank.regions}
    return [token_range for token_range in token_ranges if token_range.group in groups]


def cut(
    token_ranges: Sequence[TokenRange], ours: RankInfo, theirs: RankInfo
) -> list[list[TokenRange]]:
    """Cut token ranges into parts that fit into both engines' host buffers; without one, one part.

    Parts begin and end with whole blocks on both sides, except for the first and the last.
    """
    limits = steps(ours, theirs)
    our_block_sizes = block_sizes(ours)
    their_block_sizes = block_sizes(theirs)
    pieces = [
        list(
            _pieces(
                token_range,
                limits[token_range.group],
                our_block_sizes[token_range.group],
                their_block_sizes[token_range.group],
            )
        )
        if token_range.group in limits
        else [token_range]
        for token_range in token_ranges
    ]
    return [
        [group[number] for group in pieces if number < len(group)]
        for number in range(max(map(len, pieces), default=0))
    ]


def _pieces(
    whole: TokenRange, step: int, our_block_size: int, their_block_size: int
) -> Iterator[TokenRange]:
    start = whole.start
    while start < whole.stop:
        stop = min(whole.stop, (start // step + 1) * step)
        yield whole.part(start, stop, remote_size=their_block_size, local_size=our_block_size)
        start = stop
