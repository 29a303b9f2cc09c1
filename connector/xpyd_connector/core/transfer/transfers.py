"""How a part of a push leaves for the decode engine: straight from our cache, or through host memory."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple, NewType

from xpyd_connector.core.counters import Sample, Tally
from xpyd_connector.core.ids import BlockId, CopyId, TransferId
from xpyd_connector.core.layout.transfer_plan import Stretch
from xpyd_connector.core.ports import Copied, Ended, Mover, Outcome
from xpyd_connector.core.staging.host_buffer import Staging
from xpyd_connector.core.state_machine import follow
from xpyd_connector.core.transfer.remote_memory import Way
from xpyd_connector.errors import ConnectorError, ProtocolViolation

POLL_INTERVAL = 0.0004  # s between looks at NIXL while something is written
LINGER_INTERVAL = 0.02  # s between looks while only writes that were given up are in flight

ParcelId = NewType("ParcelId", int)


class ParcelState(Enum):
    """Where a part of a push is in its life."""

    READY = auto()
    QUEUED = auto()  # for room in our staging buffer
    COPYING = auto()  # into it
    WRITING = auto()
    CEASING = auto()  # given up; something is still copied or written
    OVER = auto()


class ParcelEvent(Enum):
    """What can happen to it."""

    QUEUED = auto()
    COPYING = auto()
    POSTED = auto()
    CANCELLED = auto()
    ENDED = auto()


TRANSITIONS: Final[Mapping[ParcelState, Mapping[ParcelEvent, ParcelState]]] = {
    ParcelState.READY: {ParcelEvent.QUEUED: ParcelState.QUEUED, ParcelEvent.POSTED: ParcelState.WRITING},
    ParcelState.QUEUED: {ParcelEvent.COPYING: ParcelState.COPYING, ParcelEvent.ENDED: ParcelState.OVER},
    ParcelState.COPYING: {
        ParcelEvent.POSTED: ParcelState.WRITING,
        ParcelEvent.CANCELLED: ParcelState.CEASING,
        ParcelEvent.ENDED: ParcelState.OVER,
    },
    ParcelState.WRITING: {ParcelEvent.CANCELLED: ParcelState.CEASING, ParcelEvent.ENDED: ParcelState.OVER},
    ParcelState.CEASING: {ParcelEvent.ENDED: ParcelState.OVER},
    ParcelState.OVER: {},
}


class Shipped(NamedTuple):
    """A parcel is over; ``failure`` is empty when all of it is in the decode engine's memory."""

    parcel: ParcelId
    failure: str


@dataclass(slots=True)
class _Parcel:
    number: ParcelId
    ways: Sequence[Way]
    stretches: Sequence[Stretch]
    state: ParcelState = ParcelState.READY
    deadline: float = inf  # for what is copied or written
    failure: str = ""
    copy: CopyId | None = None
    flights: set[TransferId] = field(default_factory=set[TransferId])

    def on(self, event: ParcelEvent) -> None:
        self.state = follow(TRANSITIONS, self.state, event, f"parcel {self.number}")


class Shipping:
    """Runs on the transfer thread of a prefill engine's worker."""

    def __init__(self, mover: Mover, tally: Tally, *, timeout: float, staging: Staging[ParcelId] | None = None) -> None:
        self._mover = mover
        self._tally = tally
        self._timeout = timeout
        self._staging = staging
        self._numbers = map(ParcelId, itertools.count(1))
        self._parcels: dict[ParcelId, _Parcel] = {}
        self._by_flight: dict[TransferId, _Parcel] = {}
        self._by_copy: dict[CopyId, _Parcel] = {}
        self._shipped: list[Shipped] = []

    def __len__(self) -> int:
        return len(self._parcels)

    def send(self, ways: Sequence[Way], stretches: Sequence[Stretch], *, now: float) -> ParcelId:
        """Write these stretches to every rank on the other side that takes something of ours.

        Answered by :class:`Shipped`. Raises a ``ConnectorError`` when nothing of it is on its way and nothing will be.
        """
        parcel = _Parcel(next(self._numbers), ways, stretches)
        self._parcels[parcel.number] = parcel
        try:
            if self._staging is None:
                self._post(parcel, stretches, now)
            else:
                self._queue(parcel, self._staging)
        except ConnectorError as exc:
            if not parcel.flights:
                del self._parcels[parcel.number]
                raise
            self._break_off(parcel, str(exc))
        else:
            self._finish_if_over(parcel)
        return parcel.number

    def cancel(self, number: ParcelId, reason: str) -> None:
        """Give a parcel up; :class:`Shipped` follows once nothing of it can reach anybody's memory any more."""
        parcel = self._parcels.get(number)
        if parcel is not None and parcel.state is not ParcelState.CEASING:
            self._break_off(parcel, reason)

    def advance(self, *, now: float) -> list[Shipped]:
        """Look at NIXL and at copies; return the parcels that are over."""
        for ended in self._mover.poll():
            self._ended(ended)
        if self._staging is not None:
            for copied in self._staging.copier.poll():
                self._copied(copied, now)
            self._give_room(self._staging, now)
        shipped, self._shipped = self._shipped, []
        return shipped

    def overdue(self, *, now: float) -> list[ParcelId]:
        """Return the parcels whose copy or write should have ended."""
        return [parcel.number for parcel in self._parcels.values() if now >= parcel.deadline]

    def due(self, *, now: float) -> float | None:
        """Return when to look again; None while nothing is under way."""
        if self._shipped:
            return now
        if any(parcel.state in (ParcelState.COPYING, ParcelState.WRITING) for parcel in self._parcels.values()):
            return now + POLL_INTERVAL
        return now + LINGER_INTERVAL if self._parcels else None

    def _queue(self, parcel: _Parcel, staging: Staging[ParcelId]) -> None:
        counts = [0] * staging.slots.groups
        for stretch in parcel.stretches:
            if 0 in stretch.local:
                raise ProtocolViolation(
                    f"tokens {stretch.start} to {stretch.stop} of group {stretch.group} are not held"
                )
            counts[stretch.group] = len(stretch.local)
        staging.slots.ask(parcel.number, counts)
        parcel.on(ParcelEvent.QUEUED)

    def _give_room(self, staging: Staging[ParcelId], now: float) -> None:
        for number, granted in staging.slots.take_granted():
            parcel = self._parcels[number]
            blocks: list[Sequence[BlockId]] = [()] * staging.slots.groups
            for stretch in parcel.stretches:
                blocks[stretch.group] = stretch.local
            parcel.stretches = [stretch._replace(local=granted[stretch.group]) for stretch in parcel.stretches]
            parcel.on(ParcelEvent.COPYING)
            parcel.copy = staging.copier.out(blocks, granted)
            parcel.deadline = now + self._timeout
            self._by_copy[parcel.copy] = parcel

    def _copied(self, copied: Copied, now: float) -> None:
        parcel = self._by_copy.pop(copied.copy)
        parcel.copy = None
        if parcel.state is not ParcelState.COPYING:
            self._finish_if_over(parcel)
        elif copied.reason:
            self._break_off(parcel, f"it was not copied into host memory: {copied.reason}")
        else:
            self._tally.count("bytes_staged_out", copied.bytes)
            self._post_staged(parcel, now)

    def _post_staged(self, parcel: _Parcel, now: float) -> None:
        try:
            self._post(parcel, parcel.stretches, now)
        except ConnectorError as exc:
            self._break_off(parcel, str(exc))
        else:
            self._finish_if_over(parcel)

    def _post(self, parcel: _Parcel, stretches: Sequence[Stretch], now: float) -> None:
        for way in parcel.ways:
            spans = way.route.spans(stretches)
            if len(spans):
                flight = self._mover.write(way.handle, spans)
                parcel.flights.add(flight)
                self._by_flight[flight] = parcel
        parcel.on(ParcelEvent.POSTED)
        parcel.deadline = now + self._timeout

    def _ended(self, ended: Ended) -> None:
        parcel = self._by_flight.pop(ended.transfer)
        parcel.flights.discard(ended.transfer)
        if ended.outcome is Outcome.MOVED:
            self._tally.moved(Sample(ended.seconds, ended.bytes, ended.descriptors, ended.posting))
        elif parcel.state is ParcelState.WRITING:
            self._break_off(parcel, f"NIXL: {ended.reason}")
            return
        self._finish_if_over(parcel)

    def _break_off(self, parcel: _Parcel, reason: str) -> None:
        parcel.failure = reason
        if parcel.flights or parcel.copy is not None:
            if parcel.state is ParcelState.READY:
                parcel.on(ParcelEvent.POSTED)
            parcel.on(ParcelEvent.CANCELLED)
            parcel.deadline = inf
            for flight in parcel.flights:
                self._mover.cancel(flight)
        self._finish_if_over(parcel, given_up=True)

    def _finish_if_over(self, parcel: _Parcel, *, given_up: bool = False) -> None:
        if parcel.flights or parcel.copy is not None or (parcel.state is ParcelState.QUEUED and not given_up):
            return
        parcel.on(ParcelEvent.ENDED)
        del self._parcels[parcel.number]
        if self._staging is not None:
            self._staging.slots.give_back(parcel.number)
        self._shipped.append(Shipped(parcel.number, parcel.failure))
