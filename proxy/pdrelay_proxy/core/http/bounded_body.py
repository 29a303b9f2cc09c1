"""Reads a body to its end, up to a bound."""

from collections.abc import AsyncIterable
from typing import Final

ANSWER_MOST: Final = 64 * 1024 * 1024  # bytes of an engine's answer that is no stream


async def read_bounded(pieces: AsyncIterable[bytes], limit: int, too_long: Exception) -> bytes:
    """Return all pieces as one; raises ``too_long`` as soon as they exceed ``limit`` bytes."""
    pieces_read = list[bytes]()
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > limit:
            raise too_long
        pieces_read.append(piece)
    return b"".join(pieces_read)
