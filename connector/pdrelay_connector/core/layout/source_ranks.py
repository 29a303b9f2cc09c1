"""From which ranks of a prefill engine a rank of a decode engine gets its layers, heads and tokens.

Engines may differ in tensor, context and pipeline parallelism. ``rank`` is the number of a rank
among the tensor-parallel ranks of its pipeline stage.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pdrelay_connector.core.layout.shards import shards_in_common
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.errors import IncompatiblePeer


class HeadSource(NamedTuple):
    """The remote rank that provides heads ``first`` to ``last`` (excluded) of a layer.

    Where remote ranks divide a context among them, several provide the same heads of other tokens.
    """

    rank: int
    first: int
    last: int


def heads_of(all_heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the first head of a rank, and the one after its last, as vLLM 0.32 shards them.

    With fewer heads than ranks, consecutive ranks keep the same head (``QKVParallelLinear`` in
    ``model_executor/layers/linear.py``). Raises :exc:`~pdrelay_connector.errors.IncompatiblePeer`
    if neither number is a multiple of the other.
    """
    if not 0 <= rank < ranks:
        raise IncompatiblePeer(
            f"rank {rank} of an engine of {ranks} ranks; they are numbered from 0"
        )
    if max(all_heads, ranks) % min(all_heads, ranks):
        raise IncompatiblePeer(
            f"{all_heads} KV heads on {ranks} tensor-parallel ranks; one must be a multiple of the "
            f"other"
        )
    first = rank * all_heads // ranks
    return first, first + max(all_heads // ranks, 1)


def head_sources(
    all_heads: int,
    ranks: int,
    ranks_here: int,
    rank_here: int,
    *,
    shards: int = 1,
    shards_here: int = 1,
) -> tuple[HeadSource, ...]:
    """Return which of ``ranks`` remote ranks provide the heads of a local rank.

    If several remote ranks keep the same of a head, the local ranks with that head spread over
    them; equal engines pair up by rank. ``shards``: how many ranks divide a context among them
    (there are ranks enough: :func:`check_shapes`). Raises
    :exc:`~pdrelay_connector.errors.IncompatiblePeer` like :func:`heads_of`.
    """
    first, last = heads_of(all_heads, ranks_here, rank_here)
    _, heads_each = heads_of(all_heads, ranks, 0)
    copies = max(ranks // all_heads, 1)
    copies_here = max(ranks_here // all_heads, 1)
    if copies > 1:
        copy = rank_here % copies_here * (copies // shards) // copies_here * shards
        return tuple(
            HeadSource(head * copies + copy + shard, head, head + 1)
            for head in range(first, last)
            for shard in shards_in_common(shards, shards_here, rank_here % shards_here)
        )
    cuts = [first, *range((first // heads_each + 1) * heads_each, last, heads_each), last]
    return tuple(HeadSource(begin // heads_each, begin, end) for begin, end in pairwise(cuts))


def shared_heads(source: RankInfo, its: Region, target: RankInfo, wanted: Region) -> range:
    """Return the heads of a layer that a decode engine's rank gets from a prefill engine's rank.

    None if the target gets them from other ranks with the same heads, or the source has other
    tokens. Of one layer, a rank provides heads that lie side by side.
    """
    owners = head_sources(
        its.all_heads,
        source.ranks,
        target.ranks,
        target.rank,
        shards=its.shards,
        shards_here=wanted.shards,
    )
    return next(
        (range(owner.first, owner.last) for owner in owners if owner.rank == source.rank), range(0)
    )


def needed_ranks(ours: RankInfo, theirs: Sequence[RankInfo]) -> tuple[RankInfo, ...]:
    """Return the ranks of a prefill engine that our rank, of a decode engine, reads from.

    Raises :exc:`~pdrelay_connector.errors.IncompatiblePeer` if they do not have all of our layers,
    heads and tokens.
    """
    owners = {(layer, info.rank): info for info in theirs for layer in by_layer(info)}
    divided = _shards_by_layer(theirs)
    needed: dict[int, RankInfo] = {}
    layers = {(region.layer, region.all_heads, region.shards) for region in ours.regions}
    for layer, heads, shards_here in sorted(layers):
        for owner in head_sources(
            heads,
            theirs[0].ranks,
            ours.ranks,
            ours.rank,
            shards=divided.get(layer, 1),
            shards_here=shards_here,
        ):
            if (info := owners.get((layer, owner.rank))) is None:
                raise IncompatiblePeer(
                    f"it says nothing of {layer or 'the layers'} on its rank {owner.rank}, which "
                    f"is needed here"
                )
            needed[info.worker] = info
    return tuple(needed[worker] for worker in sorted(needed))


def _shards_by_layer(ranks: Sequence[RankInfo]) -> dict[str, int]:
    """Return how many ranks divide a context, for each layer; all ranks must say the same."""
    shards: dict[str, tuple[int, int]] = {}
    for region in (region for info in ranks for region in info.regions):
        division = region.shards, region.interleave
        if shards.setdefault(region.layer, division) != division:
            raise IncompatiblePeer(
                f"its ranks do not agree how they divide the tokens of {region.layer or 'a layer'}"
            )
    return {layer: number for layer, (number, _) in shards.items()}


def shared_regions(ours: RankInfo, theirs: RankInfo) -> list[tuple[Region, Region]]:
    """Return the regions of the layers that both ranks have, in our order."""
    their_regions = by_layer(theirs)
    return [
        pair
        for layer, our_regions in by_layer(ours).items()
        for pair in zip(our_regions, their_regions.get(layer, ()), strict=False)
    ]


def by_layer(info: RankInfo) -> dict[str, list[Region]]:
    """Return the regions of each layer of a rank, in their order."""
    regions: dict[str, list[Region]] = {}
    for region in info.regions:
        regions.setdefault(region.layer, []).append(region)
    return regions
