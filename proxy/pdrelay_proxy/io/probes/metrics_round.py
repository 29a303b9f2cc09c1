"""Has many engines looked at in one round: some at a time, and not all in one moment.

A look holds a place while it lasts, but not for long: one at an engine that does not answer goes on
without a place, so that a zone that is gone costs a round one timeout, and not one for each of its
engines.
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
# Of the time between two rounds: the others of a large fleet begin evenly over so much of it. A
# look costs the router a connection and the reading of some hundred kB, and in between it serves
# requests.
_SPREAD: Final = 1 / 3
_SLOW: Final = 1 / 15  # of the time between two rounds a look holds its place, at most
_SLOW_MOST_S: Final = 1.0


async def read_all(
    engines: Sequence[Seen], read: Callable[[Seen], Awaitable[T]], every_s: float
) -> Sequence[T]:
    """Look at each once; return what was found, in their order.

    ``every_s``: seconds between two rounds.

    A look must end by itself. Its error is raised at the end of the round, in an ExceptionGroup;
    not by the TaskGroup, which forgets that it is cancelled if a task of it fails at that moment
    (python/cpython#116720, up to Python 3.12).
    """
    loop = asyncio.get_running_loop()
    count = min(_MOST_PLACES, max(_LEAST_PLACES, math.ceil(len(engines) / _ENGINES_A_PLACE)))
    places = asyncio.Semaphore(count)
    latest = -math.inf
    gap_s = every_s * _SPREAD / max(1, len(engines))
    slow_s = min(_SLOW_MOST_S, every_s * _SLOW)

    results = dict[int, T]()
    errors = list[Exception]()

    async def placed(number: int, engine: Seen) -> None:
        held = [places]

        def leave() -> None:
            while held:
                held.pop().release()

        slow = loop.call_later(slow_s, leave)
        try:
            results[number] = await read(engine)
        except Exception as error:  # noqa: BLE001 -- raised below
            errors.append(error)
        finally:
            slow.cancel()
            leave()

    async with asyncio.TaskGroup() as group:
        for number, engine in enumerate(engines):
            await places.acquire()
            early_s = latest + gap_s - loop.time()
            if number >= count and early_s > 0.0:
                await asyncio.sleep(early_s)
            latest = loop.time()
            group.create_task(placed(number, engine))
    if errors:
        raise ExceptionGroup("some looks failed", errors)
    return [results[number] for number in range(len(engines))]
