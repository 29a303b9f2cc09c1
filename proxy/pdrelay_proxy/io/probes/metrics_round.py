"""Has many engines looked at in one round: some at a time, and not all in one moment.

A look holds a place while it lasts, but not for long: one at an engine that does not answer goes on without a place, so
that a zone that is gone costs a round one timeout, and not one for each of its engines.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

Seen = TypeVar("Seen", bound=object)
T = TypeVar("T")
_LEAST_PLACES: Final = 16  # so many begin at once
_MOST_PLACES: Final = 256
_ENGINES_A_PLACE: Final = 60
# Of the time between two rounds: the others of a large fleet begin evenly over so much of it. A look costs the router
# a connection and the reading of some hundred kB, and in between it serves requests.
_SPREAD: Final = 1 / 3
_SLOW: Final = 1 / 15  # of the time between two rounds a look holds its place, at most
_SLOW_MOST_S: Final = 1.0


async def look_at_all(engines: Sequence[Seen], look: Callable[[Seen], Awaitable[T]], every_s: float) -> Sequence[T]:
    """Look at each once; return what was found, in their order. ``every_s``: seconds between two rounds.

    A look must end by itself. An error of one ends the round, and is raised in an ExceptionGroup.
    """
    loop = asyncio.get_running_loop()
    count = min(_MOST_PLACES, max(_LEAST_PLACES, math.ceil(len(engines) / _ENGINES_A_PLACE)))
    places, latest = asyncio.Semaphore(count), -math.inf
    gap_s, slow_s = every_s * _SPREAD / max(1, len(engines)), min(_SLOW_MOST_S, every_s * _SLOW)

    async def placed(engine: Seen) -> T:
        held = [places]

        def leave() -> None:
            while held:
                held.pop().release()

        slow = loop.call_later(slow_s, leave)
        try:
            return await look(engine)
        finally:
            slow.cancel()
            leave()

    async with asyncio.TaskGroup() as group:
        looks = list[asyncio.Task[T]]()
        for number, engine in enumerate(engines):
            await places.acquire()
            early_s = latest + gap_s - loop.time()
            if number >= count and early_s > 0.0:
                await asyncio.sleep(early_s)
            latest = loop.time()
            looks.append(group.create_task(placed(engine)))
    return [one.result() for one in looks]
