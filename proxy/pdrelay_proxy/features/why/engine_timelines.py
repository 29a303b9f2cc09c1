"""Reads the engines' events of a request, and merges them with the router's record."""

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.errors import UnknownInstance
from pdrelay_proxy.features.why.request_timeline import (
    EngineEvent,
    Leg,
    Timeline,
    engine_rows,
    legs_of,
    router_timeline,
)
from pdrelay_proxy.io.probes.checks import HttpChecks, ProbeFailed

MOST_EVENTS: Final = 1024  # of one leg; an engine keeps fewer
_WALL_CLOCK: Final = time.time  # noqa: TID251 -- the only clock that the router and its engines share
_NONE: Final = "it keeps no timelines: add pdrelay_timelines to its VLLM_PLUGINS (docs/why.md)"


class _NotedEvent(msgspec.Struct):
    step: str
    at: Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # infinity, for one, is no JSON
    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    note: Annotated[str, msgspec.Meta(max_length=32, pattern="^[a-z_]*$")] = ""


class _NotedRequest(msgspec.Struct):
    id: str
    events: list[_NotedEvent]


class _NotedTimelines(msgspec.Struct):
    requests: list[_NotedRequest]


@dataclass(frozen=True, slots=True)
class Timelines:
    """Builds timelines of requests."""

    registry: Registry
    checks: HttpChecks
    clock: Callable[[], float]  # seconds, of the records
    wall_clock: Callable[[], float] = _WALL_CLOCK  # seconds since the epoch

    async def for_request(
        self,
        record: RequestRecord,
        *,
        is_over: bool,
        asks_engines: bool,
        without: Set[InstanceId] = frozenset(),
    ) -> tuple[float, Timeline]:
        """Return when a request began, in seconds since the epoch, and its timeline.

        ``without``: engines that are not queried.
        """
        elapsed_s = record.duration_s if is_over else self.clock() - record.began_at
        began_at = self.wall_clock() - (self.clock() - record.began_at)
        timeline = router_timeline(record, elapsed_s)
        legs = legs_of(record) if asks_engines else []
        if record.prefill is not None and record.decode is not None:
            pair = record.prefill.instance, record.decode.instance
            if (trouble := self.registry.troubles.get(pair)) is not None:
                timeline.notes.append(
                    f"{pair[1]} loads no KV of {pair[0]} ({trouble.reason}): {trouble.why}"
                )
        legs = [leg for leg in legs if leg.record.instance not in without]
        answers = await asyncio.gather(*[self._read_engine(leg) for leg in legs])
        for leg, (events, trouble_text) in zip(legs, answers, strict=True):
            if trouble_text:
                timeline.notes.append(f"{leg.record.instance}: {trouble_text}")
            engine_rows(leg, events, timeline, began_at)
        return began_at, timeline

    async def _read_engine(self, leg: Leg) -> tuple[Sequence[EngineEvent], str]:
        """Return the events of a leg at its engine; if there are none, why."""
        try:
            instance = self.registry.member(leg.record.instance).instance
        except UnknownInstance:
            return (), "it is no engine of this router any more"
        events: list[EngineEvent] = []
        try:
            for name in filter(None, (leg.name, leg.transfer)):
                body = await self.checks.timeline(instance, name)
                if body is None:
                    return (), _NONE
                requests = decode(body, _NotedTimelines).requests
                leg_events = [
                    EngineEvent(event.step, event.at, event.count, request.id, event.note)
                    for request in requests
                    for event in request.events
                ]
                events += leg_events[:MOST_EVENTS]
        except ProbeFailed as exc:
            return (), f"it {exc}"
        except NotJson:
            return (), "it answers something else than a timeline"
        return events, "" if events else "it knows nothing of the request, or no more"
