"""Whether KV can be moved between the shapes of two engines; if not, a sentence says why.

A peer's description is checked here before anything is computed from its numbers.
"""

from collections.abc import Iterator, Sequence

from pdrelay_connector.core.layout.source_ranks import by_layer, heads_of, shared_regions
from pdrelay_connector.core.layout.transfer_plan import HIGHEST_END, Side, pattern
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.errors import IncompatiblePeer

SMALLEST_RUN = 16  # bytes; for shorter runs the NIXL descriptors would outweigh the KV
_UNKNOWN_ORDER = "must be equal, because the order within its attention kernel's blocks is unknown"


def difference(ours: Sequence[RankInfo], theirs: Sequence[RankInfo]) -> str | None:
    """Return why two engines cannot exchange KV; None: they can, by their shapes."""
    try:
        check_layers(ours, theirs)
        for our_rank in ours:
            for their_rank in theirs:
                check_shapes(our_rank, their_rank)
    except IncompatiblePeer as exc:
        return str(exc)
    return None


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

    Check every pair of ranks before a
    :class:`~pdrelay_connector.core.layout.transfer_plan.Route` is built for it.
    """
    if (ours.staged or theirs.staged) and max(ours.stages, theirs.stages) > 1:
        raise IncompatiblePeer(
            "an engine with pipeline stages exchanges no KV with one that has host staging"
        )
    their_regions = by_layer(theirs)
    for layer, regions in by_layer(ours).items():
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
            f"bytes apart, of ours {our.head_stride} and {our.token_stride}; they must be equal: "
            "use the same KV cache layout"
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
    if our.shards == their.shards:
        return
    has_state = any(region.state for info in (ours, theirs) for region in info.regions)
    if has_state or our.covers > 1:
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
    runs = pattern(Side.of(theirs, their, "its"), Side.of(ours, our), shared)
    return int(runs[:, 2].min())
