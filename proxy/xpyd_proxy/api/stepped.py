"""Long answers that are made in steps: requests of clients are served between some of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")
_PIECE: Final = 64 * 1024  # bytes that are sent at a time: each sending costs as much as several steps
_TURN_S: Final = 0.0015  # seconds of steps after which others have their turn; a turn of a busy event loop takes longer


async def in_steps(pieces: Iterable[bytes], clock: Callable[[], float] = time.perf_counter) -> AsyncIterator[bytes]:
    """Yield larger pieces for a StreamingResponse, which waits for a client that reads slowly; each was a step.

    The event loop is held for ``_TURN_S`` and the rest of a step. Giving it up after each step would have a scrape of
    thousands of steps wait for as many turns, each as long as what the others do in it.
    """
    held, size, began = list[bytes](), 0, clock()
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _PIECE:
            yield b"".join(held)
            held, size = [], 0
        if clock() - began >= _TURN_S:
            await asyncio.sleep(0)
            began = clock()
    if size:
        yield b"".join(held)


async def in_turns(steps: Generator[None, None, T], clock: Callable[[], float] = time.perf_counter) -> T:
    """Return what steps lead to; the event loop is held for ``_TURN_S`` and the rest of a step."""
    began = clock()
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        if clock() - began >= _TURN_S:
            await asyncio.sleep(0)
            began = clock()
