"""Plans the byte runs of a transfer between two engines that keep the same KV in different shapes.

Engines may differ in tensor, context and pipeline parallelism, block size and layout. A plan is one
table of runs: remote address, local address, bytes. Runs that are adjacent on both sides are
merged, across blocks and layers. Block 0, vLLM's null block (``v1/core/block_pool.py``), is never
transferred, so no run reaches from one layer's tensor into the tensor behind it.
"""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from pdrelay_connector.core.ids import BlockId
from pdrelay_connector.core.layout.shards import UNDIVIDED, Shard, shared_places
from pdrelay_connector.core.layout.source_ranks import heads_of, shared_heads, shared_regions
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.errors import ProtocolViolation

HIGHEST_END = (1 << 63) - 1  # address; runs are signed 64-bit integers

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

    def part(self, start: int, stop: int, *, remote_size: int, local_size: int) -> "TokenRange":
        """Return some of the tokens. Sizes are tokens of a block of each side."""
        remote = _blocks_of(self.remote, self.start, start, stop, remote_size)
        local = _blocks_of(self.local, self.start, start, stop, local_size)
        return self._replace(start=start, stop=stop, remote=remote, local=local)


def _blocks_of(
    blocks: Sequence[BlockId], origin: int, start: int, stop: int, size: int
) -> Sequence[BlockId]:
    """Return the blocks of some tokens; the first of ``blocks`` has token ``origin``."""
    first = origin // size
    return blocks[start // size - first : -(-stop // size) - first]


class Side(NamedTuple):
    """How one side keeps a layer, whichever it is: ``shape`` has no address, and no name."""

    shape: Region
    shard: Shard = UNDIVIDED
    whose: str = "our"  # in errors

    @classmethod
    def of(cls, info: RankInfo, region: Region, whose: str = "our") -> "Side":
        """Return how a rank keeps a layer."""
        return cls(replace(region, base=0, layer=""), shard_of(info.rank, region), whose)

    def whole(self, token_range: TokenRange) -> tuple[int, int]:
        """Return the first token of the range's blocks and the one after their last."""
        size = self.shape.block_size
        return token_range.start // size * size, -(-token_range.stop // size) * size

    def block_ids(self, token_range: TokenRange, blocks: Sequence[BlockId]) -> Integers:
        """Return the blocks of the tokens; raises ``ProtocolViolation``: missing or null blocks."""
        size = self.shape.block_size
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
                f"a block for {what} is beyond {self.whose} {self.shape.blocks} blocks"
            ) from exc
        for wrong in (int(ids.min()), int(ids.max())):
            if not 0 <= wrong < self.shape.blocks:
                raise ProtocolViolation(
                    f"block {wrong}, for {what}, is not one of {self.whose} {self.shape.blocks} blocks"
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
        shape = self.shape
        row = shape.tokens * shape.covers
        kept = shape.kept_tokens
        start, stop = self.whole(token_range)
        first = start // shape.block_size
        places = places.clip(first * kept, stop // shape.block_size * kept - unit)
        rows = ids[places // kept - first] * shape.rows + places % kept // row
        return rows * shape.row_stride + places % row // shape.covers * shape.token_stride


class _SameLayout(NamedTuple):
    """Layers of one group that are alike: only their base addresses differ."""

    theirs: Side
    ours: Side
    pattern: Spans  # runs of the tokens that share a row on both sides
    bases: Spans  # base addresses of each layer; bytes are 0
    target: Side

    def runs(self, token_range: TokenRange) -> Spans:
        """Return the runs of all layers, merged within each layer."""
        # block_ids checks the range before an array of its size is allocated.
        remote = self.theirs.block_ids(token_range, token_range.remote)
        local = self.ours.block_ids(token_range, token_range.local)
        unit = _unit(self.theirs, self.ours)
        start, stop = token_range.start, token_range.stop
        if token_range.whole:
            start, stop = self.target.whole(token_range)
        there, here = shared_places(start, stop, unit, self.theirs.shard, self.ours.shard)
        their_offsets = self.theirs.offsets(token_range, remote, there, unit)
        our_offsets = self.ours.offsets(token_range, local, here, unit)
        units = np.stack((their_offsets, our_offsets, np.zeros_like(here)), axis=1)
        layer = merge((units[:, None] + self.pattern).reshape(-1, 3))
        return (self.bases[:, None] + layer).reshape(-1, 3)


class Route:
    """The transfer between one of our ranks and one of the peer's. Built once per pair of ranks."""

    def __init__(self, ours: RankInfo, theirs: RankInfo, *, is_pull: bool) -> None:
        """``is_pull``: we get KV; else they do. Call ``check_shapes`` before."""
        alike: dict[tuple[Side, Side, int], list[tuple[int, int, int]]] = {}
        for our, their in shared_regions(ours, theirs):
            heads = (
                shared_heads(theirs, their, ours, our)
                if is_pull
                else shared_heads(ours, our, theirs, their)
            )
            if heads:
                sides = Side.of(theirs, their, "the peer's"), Side.of(ours, our)
                bases = alike.setdefault((*sides, len(heads)), [])
                bases.append(
                    (_address(theirs, their, heads.start), _address(ours, our, heads.start), 0)
                )
        self._groups: dict[int, list[_SameLayout]] = {region.group: [] for region in ours.regions}
        for (their_side, our_side, heads_each), bases in alike.items():
            layers = _SameLayout(
                their_side,
                our_side,
                pattern(their_side, our_side, heads_each),
                np.array(sorted(bases), dtype=np.int64),
                our_side if is_pull else their_side,
            )
            self._groups[our_side.shape.group].append(layers)

    def __bool__(self) -> bool:
        """Whether anything goes this way: the two may have no layer, head or token in common."""
        return any(self._groups.values())

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
    return Route(ours, theirs, is_pull=True)


def push_route(ours: RankInfo, theirs: RankInfo) -> Route:
    """Return the route from our prefill rank to a decode engine's rank; it may be empty."""
    return Route(ours, theirs, is_pull=False)


def runs_per_block(own: RankInfo) -> int:
    """Return the number of runs (descriptors) of a block of the first KV cache group.

    It is 1 where vLLM keeps the layers of a block side by side (its layouts that begin with B).
    """
    region = own.regions[0]
    block = TokenRange(region.group, 0, region.block_size, (BlockId(1),), (BlockId(1),))
    return len(pull_route(own, own).spans([block]))


def row_runs(region: Region) -> list[tuple[int, int]]:
    """Return the runs of a region's row in order, as (offset from its first byte, bytes)."""
    side = Side(region)
    return [(offset, length) for _, offset, length in pattern(side, side, region.heads).tolist()]


def merge(runs: Spans) -> Spans:
    """Order runs by remote address, and merge those that are adjacent on both sides."""
    if not runs.size:
        return runs
    remote, local, length = runs[np.lexsort((runs[:, 1], runs[:, 0]))].T
    starts = (remote[1:] != remote[:-1] + length[:-1]) | (local[1:] != local[:-1] + length[:-1])
    first = np.concatenate(([0], np.flatnonzero(starts) + 1))
    return np.stack((remote[first], local[first], np.add.reduceat(length, first)), axis=1)


def _address(info: RankInfo, region: Region, head: int) -> int:
    """Return the address of a head, which is numbered over all ranks, in block 0."""
    first, _ = heads_of(region.all_heads, info.ranks, info.rank)
    return region.base + (head - first) * region.head_stride


def shard_of(rank: int, region: Region) -> Shard:
    """Return which tokens a rank keeps: consecutive ranks divide a context among them.

    As vLLM makes its groups of ranks (``initialize_model_parallel`` in
    ``distributed/parallel_state.py``).
    """
    if region.shards == 1:
        return UNDIVIDED
    return Shard(rank % region.shards, region.shards, region.interleave)


def _unit(theirs: Side, ours: Side) -> int:
    """Return how many tokens lie side by side, in one row, on both sides."""
    unit = min(theirs.shape.tokens, ours.shape.tokens) * ours.shape.covers
    if theirs.shard == ours.shard:
        return unit
    divided = (side.shard for side in (theirs, ours) if side.shard.ranks > 1)
    return gcd(unit, *(shard.interleave for shard in divided))


def pattern(theirs: Side, ours: Side, heads: int) -> Spans:
    """Return the runs of ``heads`` heads for the tokens that lie side by side on both sides.

    They are relative to the first of these tokens.
    """
    tokens = _unit(theirs, ours) // ours.shape.covers
    counts = heads, tokens, ours.shape.parts
    head, token, part = np.indices(counts, dtype=np.int64).reshape(3, -1)
    places = [
        head * side.head_stride + token * side.token_stride + part * side.part_stride
        for side in (theirs.shape, ours.shape)
    ]
    return merge(np.stack((*places, np.full_like(token, ours.shape.width)), axis=1))
