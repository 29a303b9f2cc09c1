"""Which descriptors a request's blocks are: pure arithmetic on block ids."""

from collections.abc import Sequence

import numpy as np

from xpyd_connector.core.ids import BlockId
from xpyd_connector.core.messages import Region
from xpyd_connector.core.ports import Indices
from xpyd_connector.errors import IncompatiblePeer, ProtocolViolation

MAX_DESCRIPTORS = (1 << 31) - 1  # NIXL's indices are 32 bits wide


def describe(regions: Sequence[Region], blocks: Sequence[BlockId]) -> Indices:
    """Return the descriptor of every block in every region, region by region.

    A rank's descriptors are numbered region after region, block after block, as NIXL numbers a strided list.
    Raises :exc:`~xpyd_connector.errors.ProtocolViolation` for a block that a region does not have.
    """
    ids = np.asarray(blocks, dtype=np.int64)
    smallest = min(region.count for region in regions)
    if ids.size and not (ids.min() >= 0 and ids.max() < smallest):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ProtocolViolation(f"block {wrong} of an engine that has {smallest} blocks")
    first = np.cumsum([0, *(region.count for region in regions[:-1])], dtype=np.int64)
    return (first[:, None] + ids[None, :]).ravel().astype(np.int32)


def check_regions(ours: Sequence[Region], theirs: Sequence[Region]) -> None:
    """Raise :exc:`~xpyd_connector.errors.IncompatiblePeer` unless blocks have the same bytes on both sides."""
    if len(ours) != len(theirs):
        raise IncompatiblePeer(f"its cache has {len(theirs)} regions, ours has {len(ours)}; they must be equal")
    if sum(region.count for region in theirs) > MAX_DESCRIPTORS:
        raise IncompatiblePeer(f"its cache has more than {MAX_DESCRIPTORS} pieces, NIXL cannot number them")
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our.length != their.length:
            raise IncompatiblePeer(
                f"a block in its region {number} has {their.length} bytes, in ours {our.length}; they must be equal"
            )


def missing_range(prompt_tokens: int, external_tokens: int, block_size: int) -> tuple[int, int]:
    """Return the number of the first block that is missing and of the one after the last (:func:`missing_blocks`)."""
    return (prompt_tokens - 1 - external_tokens) // block_size, -(-(prompt_tokens - 1) // block_size)


def missing_blocks(
    prompt_tokens: int, external_tokens: int, block_size: int, remote: Sequence[BlockId], local: Sequence[BlockId]
) -> tuple[list[BlockId], list[BlockId]]:
    """Return the blocks to read and where they go.

    The last ``external_tokens`` of the first ``prompt_tokens - 1`` tokens are missing here: vLLM always computes the
    last prompt token itself, because it needs its logits. ``remote`` and ``local`` are a request's blocks in token
    order; what precedes the missing tokens is whole blocks (vLLM's prefix cache has no smaller unit).
    """
    first, last = missing_range(prompt_tokens, external_tokens, block_size)
    if len(remote) < last or len(local) < last:
        raise ProtocolViolation(
            f"{prompt_tokens} prompt tokens need {last} blocks; {len(remote)} are offered, {len(local)} are here"
        )
    return list(remote[first:last]), list(local[first:last])
