"""Which bytes of which rank go where, when two engines keep the same KV in different shapes: pure arithmetic.

Engines may differ in tensor parallelism, block size and layout. Everything is reduced to one table of runs: addresses
there, addresses here, bytes. Runs that continue each other on both sides are one run, whatever blocks or layers they
are. Block 0 is never moved (vLLM's null block), so no run passes from one layer's tensor into one that lies behind it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from xpyd_connector.core.ids import BlockId
from xpyd_connector.core.messages import RankInfo, Region
from xpyd_connector.errors import IncompatiblePeer, ProtocolViolation

SMALLEST_RUN = 16  # bytes; a transfer of smaller ones would move more descriptors than KV
HIGHEST_END = (1 << 63) - 1  # of a memory: runs are signed 64-bit integers

Integers: TypeAlias = npt.NDArray[np.int64]
Spans: TypeAlias = npt.NDArray[np.int64]  # one row for each run: address there, address here, bytes


class TokenRange(NamedTuple):
    """The tokens from ``start`` to ``stop`` of one KV cache group, and the blocks they are in on either side.

    The first block of each list is the one that token ``start`` is in; both lists reach at least to ``stop``.
    """

    group: int
    start: int
    stop: int
    remote: Sequence[BlockId]
    local: Sequence[BlockId]


class HeadSource(NamedTuple):
    """The rank of another engine from which heads ``first`` to ``last`` (not included) of a layer are taken."""

    rank: int
    first: int
    last: int


def heads_of(all_heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the first head a rank keeps and the one after the last, as vLLM shards them.

    With fewer heads than ranks, consecutive ranks keep the same one. Raises
    :exc:`~xpyd_connector.errors.IncompatiblePeer` where neither number is a multiple of the other.
    """
    if not 0 <= rank < ranks:
        raise IncompatiblePeer(f"rank {rank} of an engine of {ranks} ranks; they are numbered from 0")
    if max(all_heads, ranks) % min(all_heads, ranks):
        raise IncompatiblePeer(
            f"{all_heads} KV heads on {ranks} tensor-parallel ranks; one must be a multiple of the other"
        )
    first = rank * all_heads // ranks
    return first, first + max(all_heads // ranks, 1)


def head_sources(all_heads: int, ranks: int, ranks_here: int, rank_here: int) -> tuple[HeadSource, ...]:
    """Return from which of ``ranks`` ranks a rank of an engine of ``ranks_here`` takes its heads, each head once.

    Where several ranks there keep a head, those that keep it here spread over them, and equal engines pair up.
    Raises :exc:`~xpyd_connector.errors.IncompatiblePeer` like :func:`heads_of`.
    """
    first, last = heads_of(all_heads, ranks_here, rank_here)
    _, each = heads_of(all_heads, ranks, 0)
    copies, copies_here = max(ranks // all_heads, 1), max(ranks_here // all_heads, 1)
    copy = rank_here % copies_here * copies // copies_here
    if copies > 1:
        return tuple(HeadSource(head * copies + copy, head, head + 1) for head in range(first, last))
    cuts = [first, *range((first // each + 1) * each, last, each), last]
    return tuple(HeadSource(begin // each, begin, end) for begin, end in pairwise(cuts))


def needed_ranks(ours: RankInfo, ranks_there: int) -> tuple[int, ...]:
    """Return the ranks of a prefill engine of ``ranks_there`` that our rank, of a decode engine, takes KV from."""
    layers = {region.all_heads for region in ours.regions}
    found = {owner.rank for heads in layers for owner in head_sources(heads, ranks_there, ours.ranks, ours.rank)}
    return tuple(sorted(found))


def served_ranks(ours: RankInfo, ranks_there: int) -> tuple[int, ...]:
    """Return the ranks of a decode engine of ``ranks_there`` that take KV from our rank, of a prefill engine.

    None do where other ranks keep the same heads as we do, and are nearer.
    """
    layers = {region.all_heads for region in ours.regions}

    def serves(rank: int) -> bool:
        return any(
            owner.rank == ours.rank for heads in layers for owner in head_sources(heads, ours.ranks, ranks_there, rank)
        )

    return tuple(rank for rank in range(ranks_there) if serves(rank))


def check_shapes(ours: RankInfo, theirs: RankInfo) -> None:
    """Raise :exc:`~xpyd_connector.errors.IncompatiblePeer`, naming both values, unless KV can be moved between them.

    Every pair of ranks is to be checked before a route is built for it.
    """
    if len(ours.regions) != len(theirs.regions):
        raise IncompatiblePeer(
            f"its cache has {len(theirs.regions)} regions, ours has {len(ours.regions)}; they must be equal"
        )
    for number, (our, their) in enumerate(zip(ours.regions, theirs.regions, strict=True)):
        fault = next(_faults(ours, our, theirs, their), None)
        if fault is not None:
            raise IncompatiblePeer(f"region {number}: {fault}")


def _faults(ours: RankInfo, our: Region, theirs: RankInfo, their: Region) -> Iterator[str]:
    """Name what forbids to move KV between two regions; each test relies on those before it."""
    for what, here, there in (
        ("entries in {} parts", our.parts, their.parts),
        ("entries of {} bytes", our.width, their.width),
        ("{} KV heads on all ranks", our.all_heads, their.all_heads),
        ("KV cache group {}", our.group, their.group),
    ):
        if here != there:
            yield f"it has {what.format(there)}, ours {here}; they must be equal"
    for what, here, there in (
        ("its blocks have", our.block_size, their.block_size),
        ("its kernel's blocks have", our.tokens, their.tokens),
    ):
        if max(here, there) % min(here, there):
            yield f"{what} {there} tokens, ours {here}; one must be a multiple of the other"
    if our.opaque or their.opaque:
        yield from _differences(ours, our, theirs, their)
    for whose, info, region in (("our", ours, our), ("its", theirs, their)):
        first, last = heads_of(region.all_heads, info.ranks, info.rank)
        if region.heads != last - first:
            yield f"{whose} rank {info.rank} of {info.ranks} keeps {region.heads} KV heads, not {last - first}"
        if (end := _end(region)) > HIGHEST_END:
            yield f"{whose} memory would end at address {end}; the highest is {HIGHEST_END}"
    smallest = _smallest_run(ours, our, theirs, their)
    if smallest < SMALLEST_RUN:
        yield f"KV would move in pieces of {smallest} bytes; the least is {SMALLEST_RUN}: use the same KV cache layout"


def _differences(ours: RankInfo, our: Region, theirs: RankInfo, their: Region) -> Iterator[str]:
    """Name what may only be equal where the attention kernel keeps a block in an order of its own."""
    for what, here, there in (
        ("its blocks have {} tokens", our.block_size, their.block_size),
        ("its kernel's blocks have {} tokens", our.tokens, their.tokens),
        ("it has {} tensor-parallel ranks", ours.ranks, theirs.ranks),
        ("its heads are {} bytes apart", our.head_stride, their.head_stride),
        ("its tokens are {} bytes apart", our.token_stride, their.token_stride),
    ):
        if here != there:
            kept = "must be equal, because its attention kernel keeps blocks in an order of its own"
            yield f"{what.format(there)}, ours {here}; they {kept}"


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
    """Return how many bytes the shortest run of the heads that both regions keep has."""
    first, last = heads_of(our.all_heads, ours.ranks, ours.rank)
    first_there, last_there = heads_of(their.all_heads, theirs.ranks, theirs.rank)
    shared = min(last, last_there) - max(first, first_there)
    if shared <= 0:
        return SMALLEST_RUN
    return int(_pattern(_cut("its", their), _cut("our", our), shared)[:, 2].min())


class _BlockGeometry(NamedTuple):
    """How regions of one side are cut into blocks, heads and tokens, wherever they lie."""

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

    def held(self, token_range: TokenRange, blocks: Sequence[BlockId]) -> Integers:
        """Return the blocks of the tokens, all of which exist and are held."""
        size = self.rows * self.tokens
        what = f"tokens {token_range.start} to {token_range.stop} of group {token_range.group}"
        count = -(-token_range.stop // size) - token_range.start // size
        if len(blocks) < count:
            raise ProtocolViolation(f"{what} need {count} of {self.whose} blocks of {size} tokens; {len(blocks)} named")
        try:
            ids = np.asarray(blocks[:count], dtype=np.int64)
        except OverflowError as exc:
            raise ProtocolViolation(f"a block for {what} is beyond {self.whose} {self.blocks} blocks") from exc
        for wrong in (int(ids.min()), int(ids.max())):
            if not 0 <= wrong < self.blocks:
                raise ProtocolViolation(f"block {wrong}, for {what}, is not one of {self.whose} {self.blocks} blocks")
        if not ids.all():
            raise ProtocolViolation(f"{what} are not held: one of {self.whose} blocks is 0, the null block")
        return ids

    def offsets(self, token_range: TokenRange, ids: Integers, tokens: Integers) -> Integers:
        """Return how many bytes behind a region's base head 0 of each of these ``tokens`` of the stretch is."""
        size = self.rows * self.tokens
        rows = ids[tokens // size - token_range.start // size] * self.rows + tokens % size // self.tokens
        return rows * self.row_stride + tokens % self.tokens * self.token_stride


class _SameLayout(NamedTuple):
    """Layers of one group that are cut in the same way: they share one computation, and differ by their bases."""

    there: _BlockGeometry
    here: _BlockGeometry
    pattern: Spans  # of the tokens that are in one row on both sides
    bases: Spans  # of each layer, with no bytes

    def runs(self, token_range: TokenRange) -> Spans:
        """Return the runs of every layer, merged within each."""
        remote = self.there.held(token_range, token_range.remote)  # checked before anything grows with the stretch
        local = self.here.held(token_range, token_range.local)
        unit = min(self.there.tokens, self.here.tokens)
        tokens = np.arange(token_range.start // unit * unit, token_range.stop, unit, dtype=np.int64)
        there = self.there.offsets(token_range, remote, tokens)
        here = self.here.offsets(token_range, local, tokens)
        units = np.stack((there, here, np.zeros_like(tokens)), axis=1)
        layer = merge((units[:, None] + self.pattern).reshape(-1, 3))
        return (self.bases[:, None] + layer).reshape(-1, 3)


class Route:
    """How KV travels between one of our ranks and one of theirs. Built once for each pair that meets."""

    def __init__(self, ours: RankInfo, theirs: RankInfo, heads: Sequence[tuple[int, int]]) -> None:
        """Move heads ``first`` to ``last`` (not included) of each region; :func:`check_shapes` has passed the pair."""
        alike: dict[tuple[int, _BlockGeometry, _BlockGeometry, int], list[tuple[int, int, int]]] = {}
        for our, their, (first, last) in zip(ours.regions, theirs.regions, heads, strict=True):
            if first < last:
                key = (our.group, _cut("the peer's", their), _cut("our", our), last - first)
                base = (_head_address(theirs, their, first), _head_address(ours, our, first), 0)
                alike.setdefault(key, []).append(base)
        self._groups: dict[int, list[_SameLayout]] = {region.group: [] for region in ours.regions}
        for (group, there, here, count), bases in alike.items():
            layers = _SameLayout(there, here, _pattern(there, here, count), np.array(sorted(bases), dtype=np.int64))
            self._groups[group].append(layers)

    def spans(self, token_ranges: Sequence[TokenRange]) -> Spans:
        """Return the runs of these token ranges, merged and in order of address there, as int64 of shape (runs, 3).

        Both ends are rounded outwards to whole rows of the side with the smaller ones, which leaves them in the same
        blocks; ranges of one group must not meet within such a row. Raises
        :exc:`~xpyd_connector.errors.ProtocolViolation` for blocks that an engine does not have or hold, or too few.
        """
        runs: list[Spans] = [np.empty((0, 3), dtype=np.int64)]
        for token_range in token_ranges:
            if token_range.group not in self._groups:
                raise ProtocolViolation(
                    f"group {token_range.group} of a cache that has the groups {sorted(self._groups)}"
                )
            if not 0 <= token_range.start <= token_range.stop:
                raise ProtocolViolation(
                    f"tokens {token_range.start} to {token_range.stop} of a prompt; they must be in order"
                )
            if token_range.start < token_range.stop:
                runs += [layers.runs(token_range) for layers in self._groups[token_range.group]]
        return merge(np.concatenate(runs))


def pull_route(ours: RankInfo, theirs: RankInfo) -> Route:
    """Return what our rank, of a decode engine, takes from one of the prefill engine's; maybe nothing."""
    return Route(ours, theirs, [_taken(region, theirs, ours) for region in ours.regions])


def push_route(ours: RankInfo, theirs: RankInfo) -> Route:
    """Return what our rank, of a prefill engine, writes to one of the decode engine's; maybe nothing."""
    return Route(ours, theirs, [_taken(region, ours, theirs) for region in ours.regions])


def merge(runs: Spans) -> Spans:
    """Return the runs in order of address there, those that continue each other on both sides as one."""
    if not runs.size:
        return runs
    there, here, length = runs[np.lexsort((runs[:, 1], runs[:, 0]))].T
    broken = (there[1:] != there[:-1] + length[:-1]) | (here[1:] != here[:-1] + length[:-1])
    first = np.concatenate(([0], np.flatnonzero(broken) + 1))
    return np.stack((there[first], here[first], np.add.reduceat(length, first)), axis=1)


def _taken(region: Region, source: RankInfo, target: RankInfo) -> tuple[int, int]:
    """Return the heads that ``target`` takes from ``source``: adjacent ones, because both keep adjacent ones."""
    for owner in head_sources(region.all_heads, source.ranks, target.ranks, target.rank):
        if owner.rank == source.rank:
            return owner.first, owner.last
    return 0, 0


def _head_address(info: RankInfo, region: Region, head: int) -> int:
    return region.base + (head - heads_of(region.all_heads, info.ranks, info.rank)[0]) * region.head_stride


def _cut(whose: str, region: Region) -> _BlockGeometry:
    strides = (region.row_stride, region.head_stride, region.token_stride)
    parts = region.parts, region.part_stride
    return _BlockGeometry(whose, region.blocks, region.rows, region.tokens, region.width, *strides, *parts)


def _pattern(there: _BlockGeometry, here: _BlockGeometry, heads: int) -> Spans:
    """Return the runs of ``heads`` heads of the tokens that share a row on both sides, relative to the first."""
    shape = heads, min(there.tokens, here.tokens), here.parts
    head, token, part = np.indices(shape, dtype=np.int64).reshape(3, -1)
    places = [head * side.head_stride + token * side.token_stride + part * side.part_stride for side in (there, here)]
    return merge(np.stack((*places, np.full_like(token, here.width)), axis=1))
