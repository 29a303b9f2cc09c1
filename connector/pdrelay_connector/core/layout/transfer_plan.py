"""Plans the byte runs of a transfer between two engines that keep the same KV in different shapes.

Engines may differ in tensor, context and pipeline parallelism, block size and layout. A plan is one
table of runs: remote address, local address, bytes. Runs that are adjacent on both sides are
merged, across blocks and layers. Block 0, vLLM's null block (``v1/core/block_pool.py``), is never
transferred, so no run reaches from one layer's tensor into the tensor behind it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pdrelay_connector.core.ids import BlockId
from pdrelay_connector.core.layout.shards import (
    UNDIVIDED,
    Shard,
    shards_in_common,
    shared_places,
)
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.errors import IncompatiblePeer, ProtocolViolation

SMALLEST_RUN = 16  # bytes; for shorter runs the NIXL descriptors would outweigh the KV
HIGHEST_END = (1 << 63) - 1  # address; runs are signed 64-bit integers
_UNKNOWN_ORDER = "must be equal, because the order within its attention kernel's blocks is unknown"

Integers: TypeAlias = npt.NDArray[np.int64]
Spans: TypeAlias = npt.NDArray[np.int64]  # one row per run: remote address, local address, bytes


class TokenRange(NamedTuple):
    """The tokens from ``start`` to ``stop`` of one KV cache group, and their blocks on both sides.

    The first block of each list contains token ``start``; both lists reach at least to ``stop``.
    ``whole``: all of the target's blocks is overwritten, and nothing earlier is left in them.
    """

    group: int
    start: int
    stop: int
    remote: Sequence[BlockId]
    local: Sequence[BlockId]
    whole: bool = False


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


def provides(source: RankInfo, target: RankInfo) -> bool:
    """Return whether a prefill engine's rank has KV that a decode engine's rank gets from it.

    Not if they are stages without a layer in common, if other ranks with the same heads serve the
    target, or if they keep other tokens.
    """
    divisions = {
        (its.all_heads, its.shards, wanted.shards) for its, wanted in shared_regions(source, target)
    }
    return any(
        owner.rank == source.rank
        for heads, shards, shards_here in divisions
        for owner in head_sources(
            heads, source.ranks, target.ranks, target.rank, shards=shards, shards_here=shards_here
        )
    )


def needed_ranks(ours: RankInfo, theirs: Sequence[RankInfo]) -> tuple[RankInfo, ...]:
    """Return the ranks of a prefill engine that our rank, of a decode engine, reads from.

    Raises :exc:`~pdrelay_connector.errors.IncompatiblePeer` if they do not have all of our layers,
    heads and tokens.
    """
    owners = {(layer, info.rank): info for info in theirs for layer in _by_layer(info)}
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
    their_regions = _by_layer(theirs)
    return [
        pair
        for layer, our_regions in _by_layer(ours).items()
        for pair in zip(our_regions, their_regions.get(layer, ()), strict=False)
    ]


def _by_layer(info: RankInfo) -> dict[str, list[Region]]:
    by_layer: dict[str, list[Region]] = {}
    for region in info.regions:
        by_layer.setdefault(region.layer, []).append(region)
    return by_layer


def check_layers(ours: Sequence[RankInfo], theirs: Sequence[RankInfo]) -> None:
    """Raise :exc:`~pdrelay_connector.errors.IncompatiblePeer` unless both have the same layers."""
    our_layers, their_layers = (
        {region.layer for info in infos for region in info.regions} for infos in (ours, theirs)
    )
    if our_layers != their_layers:
        odd = min(our_layers ^ their_layers)
        having, lacking = ("we have", "it lacks") if odd in our_layers else ("it has", "we lack")
        raise IncompatiblePeer(f"{having} the layer {odd}, which {lacking}")


def check_shapes(ours: RankInfo, theirs: RankInfo) -> None:
    """Raise :exc:`~pdrelay_connector.errors.IncompatiblePeer` unless two ranks can exchange KV.

    Check every pair of ranks before a :class:`Route` is built for it.
    """
    if (ours.staged or theirs.staged) and max(ours.stages, theirs.stages) > 1:
        raise IncompatiblePeer(
            "an engine with pipeline stages exchanges no KV with one that has host staging"
        )
    their_regions = _by_layer(theirs)
    for layer, regions in _by_layer(ours).items():
        if layer in their_regions and len(regions) != len(their_regions[layer]):
            raise IncompatiblePeer(
                f"its cache has {len(their_regions[layer])} regions of {layer or 'all layers'}, "
                f"ours has {len(regions)}; they must be equal"
            )
    for number, (our, their) in enumerate(shared_regions(ours, theirs)):
        fault = next(_faults(ours, our, theirs, their), None)
        if fault is not None:
            raise IncompatiblePeer(f"region {number}: {fault}")


def _faults(ours: RankInfo, our: Region, theirs: RankInfo, their: Region) -> Iterator[str]:
    """Yield the reasons against a transfer between two regions.

    Each test relies on those before it.
    """
    yield from _state_faults(ours, our, theirs, their)
    for text, our_value, their_value in (
        ("entries in {} parts", our.parts, their.parts),
        ("entries of {} bytes", our.width, their.width),
        ("{} KV heads on all ranks", our.all_heads, their.all_heads),
        ("KV cache group {}", our.group, their.group),
        ("entries of {} tokens", our.covers, their.covers),
    ):
        if our_value != their_value:
            yield f"it has {text.format(their_value)}, ours {our_value}; they must be equal"
    for text, our_value, their_value in (
        ("its blocks have", our.block_size, their.block_size),
        ("its kernel's blocks have", our.tokens * our.covers, their.tokens * their.covers),
    ):
        if max(our_value, their_value) % min(our_value, their_value):
            yield (
                f"{text} {their_value} tokens, ours {our_value}; one must be a multiple of the "
                f"other"
            )
    yield from _division_faults(ours, our, theirs, their)
    if our.opaque or their.opaque:
        yield from _differences(ours, our, theirs, their)
    for whose, info, region in (("our", ours, our), ("its", theirs, their)):
        first, last = heads_of(region.all_heads, info.ranks, info.rank)
        if region.heads != last - first:
            yield (
                f"{whose} rank {info.rank} of {info.ranks} keeps {region.heads} KV heads, not "
                f"{last - first}"
            )
        if (end := _end(region)) > HIGHEST_END:
            yield f"{whose} memory would end at address {end}; the highest is {HIGHEST_END}"
    smallest = _smallest_run(ours, our, theirs, their)
    if smallest < SMALLEST_RUN:
        yield (
            f"KV would move in runs of {smallest} bytes; the least is {SMALLEST_RUN}: use the same "
            f"KV cache layout"
        )


def _state_faults(ours: RankInfo, our: Region, theirs: RankInfo, their: Region) -> Iterator[str]:
    """Yield the reasons against a transfer of a state: the kernel decides how ranks divide it."""
    if our.state != their.state:
        yield (
            f"it keeps {'a state' if their.state else 'KV'}, ours "
            f"{'a state' if our.state else 'KV'}"
        )
    if our.state and ours.ranks != theirs.ranks:
        yield (
            f"it keeps a state on {theirs.ranks} tensor-parallel ranks, ours on {ours.ranks}; they "
            f"must be equal"
        )
    if our.state and (our.head_stride, our.token_stride) != (their.head_stride, their.token_stride):
        yield (
            f"the heads and tokens of its state are {their.head_stride} and {their.token_stride} "
            f"bytes apart, of ours "
            f"{our.head_stride} and {our.token_stride}; they must be equal: use the same KV cache "
            f"layout"
        )


def _division_faults(ours: RankInfo, our: Region, theirs: RankInfo, their: Region) -> Iterator[str]:
    """Yield the reasons against a transfer between ranks that divide contexts among them.

    That one number of ranks divides the other is vLLM's rule, too
    (``_validate_remote_agent_handshake`` in ``kv_connector/v1/nixl/base_worker.py``, 0.32).
    """
    for whose, info, region in (("our", ours, our), ("its", theirs, their)):
        alike, odd = divmod(info.ranks, region.all_heads)
        if region.shards > 1 and (odd or alike % region.shards):
            yield (
                f"{whose} {region.shards} ranks with parts of one context do not all keep the same heads: "
                f"there are {info.ranks} ranks and {region.all_heads} KV heads"
            )
        if region.shards > 1 and region.kept_tokens % region.interleave:
            yield (
                f"{whose} ranks keep {region.interleave} tokens in turn, and {region.kept_tokens} "
                f"of a block, which is no multiple of it"
            )
    sizes = our.shards, their.shards
    if max(sizes) % min(sizes):
        yield (
            f"{their.shards} of its ranks divide a context among them, {our.shards} of ours; one must "
            f"be a multiple of the other (decode_context_parallel_size)"
        )
    if min(sizes) > 1 and our.interleave != their.interleave:
        yield (
            f"its ranks keep {their.interleave} tokens in turn, ours {our.interleave}; they must be "
            f"equal (cp_kv_cache_interleave_size)"
        )
    has_state = any(region.state for info in (ours, theirs) for region in info.regions)
    if our.shards != their.shards and (has_state or our.covers > 1):
        what = "a model that keeps a state" if has_state else "compressed vectors"
        yield (
            f"{their.shards} of its ranks divide a context among them, {our.shards} of ours; with "
            f"{what} they must be equal (decode_context_parallel_size)"
        )


def _differences(ours: RankInfo, our: Region, theirs: RankInfo, their: Region) -> Iterator[str]:
    """Yield the differences that an unknown order within the kernel's blocks does not allow.

    If the layer has one head over all ranks, each rank has the same rows, and the numbers of ranks
    may differ.
    """
    ranks = (ours.ranks, theirs.ranks) if our.all_heads > 1 else (1, 1)
    strides = (our.head_stride, their.head_stride) if max(our.heads, their.heads) > 1 else (0, 0)
    for text, our_value, their_value in (
        ("its blocks have {} tokens", our.kept_tokens, their.kept_tokens),
        (
            "its kernel's blocks have {} tokens",
            our.tokens * our.covers,
            their.tokens * their.covers,
        ),
        ("it has {} tensor-parallel ranks", *ranks),
        ("its heads are {} bytes apart", *strides),
        ("its tokens are {} bytes apart", our.token_stride, their.token_stride),
    ):
        if our_value != their_value:
            yield f"{text.format(their_value)}, ours {our_value}; they {_UNKNOWN_ORDER}"
    cuts_rows = any(
        region.shards > 1 and region.interleave % (region.tokens * region.covers)
        for region in (our, their)
    )
    if our.shards != their.shards and cuts_rows:
        yield (
            f"{their.shards} of its ranks divide a context among them, {our.shards} of ours, and "
            f"less than a kernel's block in turn; they {_UNKNOWN_ORDER} (decode_context_parallel_size)"
        )


def _end(region: Region) -> int:
    """Return the address after the region's last byte."""
    steps = (
        (region.count, region.row_stride),
        (region.heads, region.head_stride),
        (region.tokens, region.token_stride),
        (region.parts, region.part_stride),
    )
    return region.base + sum((number - 1) * stride for number, stride in steps) + region.width


def _smallest_run(ours: RankInfo, our: Region, theirs: RankInfo, their: Region) -> int:
    """Return the bytes of the shortest run of the heads that both regions keep."""
    first, last = heads_of(our.all_heads, ours.ranks, ours.rank)
    first_there, last_there = heads_of(their.all_heads, theirs.ranks, theirs.rank)
    shared = min(last, last_there) - max(first, first_there)
    if shared <= 0:
        return SMALLEST_RUN
    its_geometry = _geometry("its", their, shard_of(theirs.rank, their))
    our_geometry = _geometry("our", our, shard_of(ours.rank, our))
    return int(_pattern(its_geometry, our_geometry, shared)[:, 2].min())


class _BlockGeometry(NamedTuple):
    """The division of one side's regions into blocks, heads and tokens, without addresses."""

    whose: str
    blocks: int
    rows: int
    tokens: int
    width: int
    row_stride: int
    head_stride: int
    token_stride: int
    parts: int
    part_stride: int
    covers: int
    shard: Shard

    @property
    def kept(self) -> int:
        """Tokens of a block that are on this rank."""
        return self.rows * self.tokens * self.covers

    @property
    def size(self) -> int:
        """Tokens of a block on all ranks that divide a context."""
        return self.kept * self.shard.ranks

    def whole(self, token_range: TokenRange) -> tuple[int, int]:
        """Return the first token of the range's blocks and the one after their last."""
        start, stop = token_range.start, token_range.stop
        return start // self.size * self.size, -(-stop // self.size) * self.size

    def block_ids(self, token_range: TokenRange, blocks: Sequence[BlockId]) -> Integers:
        """Return the blocks of the tokens; raises ``ProtocolViolation``: missing or null blocks."""
        size = self.size
        what = f"tokens {token_range.start} to {token_range.stop} of group {token_range.group}"
        count = -(-token_range.stop // size) - token_range.start // size
        if len(blocks) < count:
            raise ProtocolViolation(
                f"{what} need {count} of {self.whose} blocks of {size} tokens; {len(blocks)} named"
            )
        try:
            ids = np.asarray(blocks[:count], dtype=np.int64)
        except OverflowError as exc:
            raise ProtocolViolation(
                f"a block for {what} is beyond {self.whose} {self.blocks} blocks"
            ) from exc
        for wrong in (int(ids.min()), int(ids.max())):
            if not 0 <= wrong < self.blocks:
                raise ProtocolViolation(
                    f"block {wrong}, for {what}, is not one of {self.whose} {self.blocks} blocks"
                )
        if not ids.all():
            raise ProtocolViolation(
                f"{what} are not held: one of {self.whose} blocks is 0, the null block"
            )
        return ids

    def offsets(
        self, token_range: TokenRange, ids: Integers, places: Integers, unit: int
    ) -> Integers:
        """Return the offset (bytes) of head 0 of each unit at ``places`` from a region's base.

        A place counts the tokens on this rank before it; of units beyond these blocks, the nearest
        one is taken.
        """
        row = self.tokens * self.covers
        kept = self.kept
        start, stop = self.whole(token_range)
        first = start // self.size
        places = places.clip(first * kept, stop // self.size * kept - unit)
        rows = ids[places // kept - first] * self.rows + places % kept // row
        return rows * self.row_stride + places % row // self.covers * self.token_stride


class _SameLayout(NamedTuple):
    """Layers of one group with equal geometry: only their base addresses differ."""

    their_blocks: _BlockGeometry
    our_blocks: _BlockGeometry
    pattern: Spans  # runs of the tokens that share a row on both sides
    bases: Spans  # base addresses of each layer; bytes are 0
    is_pulled: bool  # our blocks are the target

    def runs(self, token_range: TokenRange) -> Spans:
        """Return the runs of all layers, merged within each layer."""
        # block_ids checks the range before an array of its size is allocated.
        remote = self.their_blocks.block_ids(token_range, token_range.remote)
        local = self.our_blocks.block_ids(token_range, token_range.local)
        unit = _unit(self.their_blocks, self.our_blocks)
        start, stop = token_range.start, token_range.stop
        if token_range.whole:
            target = self.our_blocks if self.is_pulled else self.their_blocks
            start, stop = target.whole(token_range)
        there, here = shared_places(
            start, stop, unit, self.their_blocks.shard, self.our_blocks.shard
        )
        their_offsets = self.their_blocks.offsets(token_range, remote, there, unit)
        our_offsets = self.our_blocks.offsets(token_range, local, here, unit)
        units = np.stack((their_offsets, our_offsets, np.zeros_like(here)), axis=1)
        layer = merge((units[:, None] + self.pattern).reshape(-1, 3))
        return (self.bases[:, None] + layer).reshape(-1, 3)


class Route:
    """The transfer between one of our ranks and one of the peer's. Built once per pair of ranks."""

    def __init__(
        self, ours: RankInfo, theirs: RankInfo, *, source: RankInfo, target: RankInfo
    ) -> None:
        """``target`` gets KV from ``source``: one is ours. Call :func:`check_shapes` before."""
        alike: dict[
            tuple[int, _BlockGeometry, _BlockGeometry, int], list[tuple[int, int, int]]
        ] = {}
        for our, their in shared_regions(ours, theirs):
            shards = (our.shards, their.shards) if source is ours else (their.shards, our.shards)
            first, last = _shared_heads(our.all_heads, source, target, *shards)
            if first < last:
                key = (
                    our.group,
                    _geometry("the peer's", their, shard_of(theirs.rank, their)),
                    _geometry("our", our, shard_of(ours.rank, our)),
                    last - first,
                )
                base = (_head_address(theirs, their, first), _head_address(ours, our, first), 0)
                alike.setdefault(key, []).append(base)
        self._groups: dict[int, list[_SameLayout]] = {region.group: [] for region in ours.regions}
        for (group, their_blocks, our_blocks, count), bases in alike.items():
            layers = _SameLayout(
                their_blocks,
                our_blocks,
                _pattern(their_blocks, our_blocks, count),
                np.array(sorted(bases), dtype=np.int64),
                is_pulled=target is ours,
            )
            self._groups[group].append(layers)

    def spans(self, token_ranges: Sequence[TokenRange]) -> Spans:
        """Return the runs of these token ranges as int64 of shape (runs, 3).

        They are merged, and ordered by remote address.

        Both ends of a range are rounded outwards to whole rows of the side with the smaller rows.
        They stay within the same blocks. A whole target block that is larger than the
        source's gets its nearest row once more. Two ranges of a group must not share a row. Raises
        :exc:`~pdrelay_connector.errors.ProtocolViolation` for blocks that do not exist, are not
        held, or are too few.
        """
        runs: list[Spans] = [np.empty((0, 3), dtype=np.int64)]
        for token_range in token_ranges:
            if token_range.group not in self._groups:
                raise ProtocolViolation(
                    f"group {token_range.group} of a cache that has the groups "
                    f"{sorted(self._groups)}"
                )
            if not 0 <= token_range.start <= token_range.stop:
                raise ProtocolViolation(
                    f"tokens {token_range.start} to {token_range.stop} of a prompt; they must be "
                    f"in order"
                )
            if token_range.start < token_range.stop:
                runs += [layers.runs(token_range) for layers in self._groups[token_range.group]]
        return merge(np.concatenate(runs))


def pull_route(ours: RankInfo, theirs: RankInfo) -> Route:
    """Return the route from a prefill engine's rank to our decode rank; it may be empty."""
    return Route(ours, theirs, source=theirs, target=ours)


def push_route(ours: RankInfo, theirs: RankInfo) -> Route:
    """Return the route from our prefill rank to a decode engine's rank; it may be empty."""
    return Route(ours, theirs, source=ours, target=theirs)


def runs_per_block(own: RankInfo) -> int:
    """Return the number of runs (descriptors) of a block of the first KV cache group.

    It is 1 where vLLM keeps the layers of a block side by side (its layouts that begin with B).
    """
    region = own.regions[0]
    block = TokenRange(region.group, 0, region.block_size, (BlockId(1),), (BlockId(1),))
    return len(Route(own, own, source=own, target=own).spans([block]))


def row_runs(region: Region) -> list[tuple[int, int]]:
    """Return the runs of a region's row in order, as (offset from its first byte, bytes)."""
    own = _geometry("our", region)
    return [(offset, length) for _, offset, length in _pattern(own, own, region.heads).tolist()]


def merge(runs: Spans) -> Spans:
    """Order runs by remote address, and merge those that are adjacent on both sides."""
    if not runs.size:
        return runs
    remote, local, length = runs[np.lexsort((runs[:, 1], runs[:, 0]))].T
    starts = (remote[1:] != remote[:-1] + length[:-1]) | (local[1:] != local[:-1] + length[:-1])
    first = np.concatenate(([0], np.flatnonzero(starts) + 1))
    return np.stack((remote[first], local[first], np.add.reduceat(length, first)), axis=1)


def _shared_heads(
    all_heads: int, source: RankInfo, target: RankInfo, shards: int, shards_here: int
) -> tuple[int, int]:
    """Return the heads that ``target`` needs from ``source``; ranks keep adjacent heads."""
    for owner in head_sources(
        all_heads,
        source.ranks,
        target.ranks,
        target.rank,
        shards=shards,
        shards_here=shards_here,
    ):
        if owner.rank == source.rank:
            return owner.first, owner.last
    return 0, 0


def _head_address(info: RankInfo, region: Region, head: int) -> int:
    return (
        region.base
        + (head - heads_of(region.all_heads, info.ranks, info.rank)[0]) * region.head_stride
    )


def shard_of(rank: int, region: Region) -> Shard:
    """Return which tokens a rank keeps: consecutive ranks divide a context among them.

    As vLLM makes its groups of ranks (``initialize_model_parallel`` in
    ``distributed/parallel_state.py``).
    """
    if region.shards == 1:
        return UNDIVIDED
    return Shard(rank % region.shards, region.shards, region.interleave)


def _geometry(whose: str, region: Region, shard: Shard = UNDIVIDED) -> _BlockGeometry:
    strides = (region.row_stride, region.head_stride, region.token_stride)
    parts = region.parts, region.part_stride
    sizes = (region.blocks, region.rows, region.tokens, region.width)
    return _BlockGeometry(whose, *sizes, *strides, *parts, region.covers, shard)


def _unit(their_blocks: _BlockGeometry, our_blocks: _BlockGeometry) -> int:
    """Return how many tokens lie side by side, in one row, on both sides."""
    unit = min(their_blocks.tokens, our_blocks.tokens) * our_blocks.covers
    if their_blocks.shard == our_blocks.shard:
        return unit
    divided = (side.shard for side in (their_blocks, our_blocks) if side.shard.ranks > 1)
    return gcd(unit, *(shard.interleave for shard in divided))


def _pattern(their_blocks: _BlockGeometry, our_blocks: _BlockGeometry, heads: int) -> Spans:
    """Return the runs of ``heads`` heads for the tokens that lie side by side on both sides.

    They are relative to the first of these tokens.
    """
    tokens = _unit(their_blocks, our_blocks) // our_blocks.covers
    shape = heads, tokens, our_blocks.parts
    head, token, part = np.indices(shape, dtype=np.int64).reshape(3, -1)
    places = [
        head * side.head_stride + token * side.token_stride + part * side.part_stride
        for side in (their_blocks, our_blocks)
    ]
    return merge(np.stack((*places, np.full_like(token, our_blocks.width)), axis=1))
