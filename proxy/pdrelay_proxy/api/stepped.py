"""Long answers that are made in steps: requests of clients are served between some of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")
# bytes that are sent at a time: each sending costs as much as several steps
_PIECE: Final = 64 * 1024
# seconds of steps after which others have their turn; a turn of a busy event loop takes longer
_TURN_S: Final = 0.0015
# Of the time that others take for a turn, if that is more: on a loop that is busy without end, an
# answer takes eleven times its own work, and not as many turns as it has thousandths of a second.
# Prometheus gives up after ten seconds.
_SHARE: Final = 0.1


class _Turns:
    """Says when others have their turn, and gives it to them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._length_s = _TURN_S
        self._began = clock()

    @property
    def is_over(self) -> bool:
        """Whether the event loop was held for long enough."""
        return self._clock() - self._began >= self._length_s

    async def give_up(self) -> None:
        """Let others have theirs; the longer it takes, the longer is the next one here."""
        left = self._clock()
        await asyncio.sleep(0)
        self._began = self._clock()
        self._length_s = max(_TURN_S, (self._began - left) * _SHARE)


async def in_steps(
    pieces: Iterable[bytes], clock: Callable[[], float] = time.perf_counter
) -> AsyncIterator[bytes]:
    """Yield larger pieces for a StreamingResponse, which waits for a client that reads slowly; each
    was a step.

    The event loop is held for a turn and the rest of a step. Giving it up after each step would
    have a scrape of thousands of steps wait for as many turns, each as long as what the others do
    in it.
    """
    held = list[bytes]()
    size = 0
    turns = _Turns(clock)
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _PIECE:
            yield b"".join(held)
            held = []
            size = 0
        if turns.is_over:
            await turns.give_up()
    if size:
        yield b"".join(held)


async def in_turns(
    steps: Generator[None, None, T], clock: Callable[[], float] = time.perf_counter
) -> T:
    """Return what steps lead to; the event loop is held for a turn and the rest of a step."""
    turns = _Turns(clock)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        if turns.is_over:
            await turns.give_up()
