"""Long answers that are made in steps: requests of clients are served between two of them."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final

_PIECE: Final = 64 * 1024  # bytes that are sent at a time: each sending costs as much as several steps


async def in_steps(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield larger pieces for a StreamingResponse, which waits for a client that reads slowly; each was a step."""
    held, size = list[bytes](), 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _PIECE:
            yield b"".join(held)
            held, size = [], 0
        await asyncio.sleep(0)
    if size:
        yield b"".join(held)
