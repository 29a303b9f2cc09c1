"""Adds the engines' rows of ``pdrelay why`` to the traces of finished requests.

If a busy router traces every request, it must not query two engines for each: only some requests a
second get rows, and the others are counted.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence, Set
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

from pdrelay_proxy.core.counters import Key
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.features.why.request_timeline import Row, Timeline, legs_of
from pdrelay_proxy.io.background import meanwhile
from pdrelay_proxy.io.metric_families import Family, counter_family

logger = logging.getLogger(__name__)
# when the request began, in seconds since the epoch; rows
AddRows: TypeAlias = Callable[[float, Sequence[Row]], None]
HearEnd: TypeAlias = Callable[[RequestRecord, AddRows], None]
# after the end of a request: engines publish their events with the next steps
LATER_S: Final = 1.0
_LEAST_S: Final = 0.1  # between the queries of two requests
_MOST_WAITING: Final = 64
_QUIET_S: Final = 60.0  # without queries for an engine that returned no rows


class EngineSpans:
    """Queries the engines of finished requests, in one task. Times are seconds of one clock.

    ``read_timeline`` gets a request, and the engines to leave out.
    """

    def __init__(
        self,
        read_timeline: Callable[
            [RequestRecord, Set[InstanceId]], Awaitable[tuple[float, Timeline]]
        ],
        clock: Callable[[], float],
        *,
        later_s: float = LATER_S,
    ) -> None:
        self._read_timeline = read_timeline
        self._clock = clock
        self._later_s = later_s
        self._over = asyncio.Queue[tuple[float, RequestRecord, AddRows]](_MOST_WAITING)
        # engines that returned no rows, and until when they are left out
        self._quiet = dict[InstanceId, float]()
        # traces by their outcome
        self.outcomes = Counter[Key]({("added",): 0, ("untold",): 0, ("skipped",): 0})

    def offer(self, record: RequestRecord, add: AddRows) -> None:
        """Queue a finished request, unless its engines are quiet or the queue is full."""
        now = self._clock()
        if not any(self._quiet.get(leg.record.instance, now) <= now for leg in legs_of(record)):
            return
        try:
            self._over.put_nowait((now + self._later_s, record, add))
        except asyncio.QueueFull:
            self.outcomes["skipped",] += 1

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        text = "Traces to which the rows of engines were to be added, by what became of that."
        yield from counter_family("pdrelay_trace_timelines", text, ("result",), self.outcomes)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Query while the block lasts."""
        async with meanwhile(self._work()):
            yield

    async def _work(self) -> None:
        while True:
            due, record, add = await self._over.get()
            await asyncio.sleep(max(_LEAST_S, due - self._clock()))
            try:
                quiet = {name for name, until in self._quiet.items() if until > self._clock()}
                began_at, timeline = await self._read_timeline(record, quiet)
                rows = [row for row in timeline.rows if row.leg]
                self._note(
                    [leg.record.instance for leg in legs_of(record)],
                    quiet,
                    {row.leg for row in rows},
                )
                add(began_at, rows)
            except Exception:
                logger.exception(
                    "the rows of engines could not be added to the trace of %s", record.request_id
                )

    def _note(
        self, engines: Sequence[InstanceId], quiet: Set[InstanceId], with_rows: Set[str]
    ) -> None:
        """Count the outcome, and note the engines that returned no rows."""
        self.outcomes["added" if with_rows else "untold",] += 1
        now = self._clock()
        for engine in set(engines) - quiet:
            self._quiet.pop(engine, None)
            if engine not in with_rows:
                self._quiet[engine] = now + _QUIET_S
        self._forget(now)

    def _forget(self, now: float) -> None:
        """Drop expired entries, the oldest first: engines may be removed."""
        for instance, until in list(self._quiet.items()):
            if until > now:
                break
            del self._quiet[instance]
