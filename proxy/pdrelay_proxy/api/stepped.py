"""Long answers in steps: the event loop serves other requests in between."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")
# bytes sent at a time: each send costs as much as several steps
_PIECE: Final = 64 * 1024
# seconds of steps after which other tasks run; one iteration of a busy event loop takes longer
_SLICE_S: Final = 0.0015
# Share of the other tasks' iteration, if that is more: on a loop that is always busy, an answer
# takes eleven times its own work, and not an iteration for each millisecond of it. Prometheus gives
# up after ten seconds.
_SHARE: Final = 0.1


class _LoopSlices:
    """Decides when other tasks run, and lets them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._length_s = _SLICE_S
        self._began = clock()

    @property
    def is_over(self) -> bool:
        """Whether the event loop was held for long enough."""
        return self._clock() - self._began >= self._length_s

    async def give_up(self) -> None:
        """Let other tasks run; the longer that takes, the longer is the next slice."""
        released_at = self._clock()
        await asyncio.sleep(0)
        self._began = self._clock()
        self._length_s = max(_SLICE_S, (self._began - released_at) * _SHARE)


async def in_steps(
    pieces: Iterable[bytes], clock: Callable[[], float] = time.perf_counter
) -> AsyncIterator[bytes]:
    """Yield larger pieces for a StreamingResponse, which waits for a slow client; each given piece
    was a step.

    The event loop is held for a slice and the rest of a step. Giving it up after each step would
    make a scrape of thousands of steps wait for as many iterations of the other tasks.
    """
    buffer = list[bytes]()
    size = 0
    slices = _LoopSlices(clock)
    for piece in pieces:
        buffer.append(piece)
        size += len(piece)
        if size >= _PIECE:
            yield b"".join(buffer)
            buffer = []
            size = 0
        if slices.is_over:
            await slices.give_up()
    if size:
        yield b"".join(buffer)


async def finish_in_steps(
    steps: Generator[None, None, T], clock: Callable[[], float] = time.perf_counter
) -> T:
    """Return the result of steps; the event loop is held for a slice and the rest of a step."""
    slices = _LoopSlices(clock)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        if slices.is_over:
            await slices.give_up()
