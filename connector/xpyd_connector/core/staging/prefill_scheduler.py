"""The prefill scheduler's half of staging: keep the parts of a request in host memory that a decode engine reads now.

A part is staged when every rank of the decode engine has asked for it: then whoever has slots here waits for nothing
else, and always gives them back. They are free again when every rank has gone on (to the next part, or Done), or when
the lease is over, which the fence then tells: bytes read after that do not count. What a worker still copies keeps its
slots until the copy has ended.
"""

import itertools
from collections.abc import Hashable, Iterable
from math import inf
from typing import TypeVar

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.deadlines import Deadlines
from xpyd_connector.core.ids import ConnId, PartId, RequestId
from xpyd_connector.core.lease.lease_table import Released
from xpyd_connector.core.lease.prefill_scheduler import Lender
from xpyd_connector.core.messages import (
    MAX_REASON,
    Attend,
    CopyEnded,
    CopyOut,
    Done,
    Drop,
    Message,
    Reads,
    Renew,
    Stage,
    Staged,
    Unstaged,
)
from xpyd_connector.core.ports import Link, LinkEvent, Lost, Received
from xpyd_connector.core.session.worker_links import Crew
from xpyd_connector.core.staging.slots import Slots
from xpyd_connector.core.staging.staged_read import Part, PartEvent, PartState, Reading, ReadingId
from xpyd_connector.errors import NoRoom

NameT = TypeVar("NameT", bound=Hashable)

MAX_PARTS = 65536  # parts that are asked for or staged; beyond it they are refused


class Stagings:
    """Runs on the control thread, around the lender: connections of decode engines and of our own workers end here."""

    def __init__(
        self,
        link: Link,
        lender: Lender,
        tally: Tally,
        crew: Crew,
        slots: Slots[PartId],
        *,
        blocks: int,
        patience: float,
    ) -> None:
        self._link = link
        self._lender = lender
        self._tally = tally
        self._crew = crew
        self._slots = slots
        self._blocks = blocks  # of our cache
        self._patience = patience  # s for a decode engine to read a part: longer than its own patience
        self._numbers = map(PartId, itertools.count(1))
        self._readings: dict[ReadingId, Reading] = {}
        self._by_request: dict[RequestId, dict[ReadingId, None]] = {}  # dicts, because they keep their order
        self._by_conn: dict[ConnId, dict[ReadingId, None]] = {}  # those that may have a rank there
        self._parts: dict[PartId, Part] = {}  # all that are not over
        self._deadlines: Deadlines[PartId] = Deadlines()

    def __len__(self) -> int:
        return len(self._readings) + len(self._parts)

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in what happened on a connection that somebody opened to us."""
        self._lender.advance(now=now)  # first, so that nothing below sees a lease that is over
        match event:
            case Received(conn, message):
                self._told(conn, message, now)
            case Lost(conn):
                self._lost(conn)
            case _:
                pass
        self._give_room()

    def released(self, ended: Iterable[Released]) -> None:
        """These leases are over: what is staged of them is not to be read any more."""
        for released in ended:
            why = f"its lease is over ({released.why.name.lower().replace('_', ' ')})"
            for key in list(self._by_request.get(released.request, ())):
                for part in list(self._readings[key].parts.values()):
                    self._end(part, why)
                self._forget(key)
        self._give_room()

    def advance(self, *, now: float) -> float | None:
        """End what takes too long: others wait for its slots. Return when to be called again at the latest."""
        for part in [self._parts[number] for number in self._deadlines.take_due(now=now)]:
            if part.state is PartState.GATHERING:
                self._end(part, f"only {len(part.ranks)} of {part.order.ranks} ranks asked for it in time")
            else:
                part.until = inf
                self._lender.drop([part.order.request])  # so that the fence tells what became of its slots
        self._give_room()
        return self._deadlines.next()

    def is_reading(self, request: RequestId) -> bool:
        """Whether somebody reads parts of a request, or asks for them."""
        return request in self._by_request

    def _give(self, part: Part, until: float) -> None:
        """Give a part so much time."""
        part.until = until
        self._deadlines.set(part.number, until)

    def _told(self, conn: ConnId, message: Message, now: float) -> None:
        match message:
            case Stage():
                self._stage(conn, message, now)
            case Done(request, reader, rank):
                self._lender.on(Received(conn, message), now=now)
                self._has_read(conn, ReadingId(request, reader), rank)
            case Renew() | Drop() | Reads():
                self._lender.on(Received(conn, message), now=now)
            case Attend() if self._crew.admit(conn, message):
                self._catch_up(message.rank)
            case CopyEnded(number, reason) if (worker := self._crew.rank_of(conn)) is not None:
                self._copied(number, worker, reason, now)
            case _:
                self._link.close(conn)  # nothing that a decode engine or a worker says
                self._lost(conn)

    def _lost(self, conn: ConnId) -> None:
        self._lender.lose(conn)
        self._crew.leave(conn)
        for key in list(self._by_conn.get(conn, ())):
            reading = self._readings.get(key)
            for rank in [rank for rank, its in reading.ranks.items() if its == conn] if reading is not None else ():
                self._leave(key, rank, f"the connection of its rank {rank} is lost")

    # ---- decode engines

    def _has_read(self, conn: ConnId, key: ReadingId, rank: int) -> None:
        """Believe it only over the rank's own connection: another's word would free slots that the rank still reads."""
        reading = self._readings.get(key)
        if reading is None:
            return
        its = reading.ranks.get(rank)
        if its == conn or (its is None and self._lender.may_end(key.request, conn)):
            self._leave(key, rank, f"its rank {rank} has read everything")
        else:
            self._tally.count("foreign_messages")

    def _stage(self, conn: ConnId, order: Stage, now: float) -> None:
        key = ReadingId(order.request, order.reader)
        reading = self._readings.get(key, Reading())
        if reason := self._objection(conn, order, reading):
            self._link.send(conn, Unstaged(order.reader, order.part, reason))
            if reading.broken and reading.ranks.get(order.rank) == conn:
                self._leave(key, order.rank, reading.broken)  # it has read what it had
            return
        self._readings[key] = reading
        self._by_request.setdefault(key.request, {})[key] = None
        self._by_conn.setdefault(conn, {})[key] = None
        reading.ranks[order.rank] = conn
        for earlier in list(reading.parts.values()):
            self._go_on(earlier, order.rank)
        part = reading.parts.get(order.part) or self._open(order, reading, now)
        part.ranks[order.rank] = conn
        if len(part.ranks) == order.ranks:
            part.on(PartEvent.COMPLETE)
            self._give(part, inf)
            self._slots.ask(part.number, [len(blocks) for blocks in order.groups])

    def _open(self, order: Stage, reading: Reading, now: float) -> Part:
        part = Part(next(self._numbers), order, now + self._patience)
        reading.parts[order.part] = self._parts[part.number] = part
        self._give(part, part.until)
        return part

    def _objection(self, conn: ConnId, order: Stage, reading: Reading) -> str:
        """Say why a part is not staged, or nothing."""
        if not self._lender.holds(order.request):
            return f"no lease is held for request {order.request}"
        if self._lender.refuses(order.request, conn):
            return f"the lease of request {order.request} is another decode engine's"
        if len(self._parts) >= MAX_PARTS:
            return f"{MAX_PARTS} parts are asked for"
        return self._objection_to_blocks(order) or reading.objection(conn, order)

    def _objection_to_blocks(self, order: Stage) -> str:
        try:
            self._slots.check([len(blocks) for blocks in order.groups])
        except NoRoom as exc:
            return str(exc)
        # A device that is told to copy what it does not have may never copy anything again.
        wrong = [block for blocks in order.groups for block in blocks if not 0 < block < self._blocks]
        return f"block {wrong[0]} is asked for; there are 1 to {self._blocks - 1}" if wrong else ""

    def _go_on(self, part: Part, rank: int) -> None:
        """A rank has read a part, or never will."""
        part.ranks.pop(rank, None)
        if part.state is PartState.STAGED and not part.ranks:
            self._end(part, "")

    def _leave(self, key: ReadingId, rank: int, why: str) -> None:
        """A rank asks for nothing more, so the others will get nothing more; what is staged they may read."""
        if (reading := self._readings.get(key)) is None:
            return
        reading.broken = why
        for part in list(reading.parts.values()):
            if part.state is PartState.STAGED:
                self._go_on(part, rank)
            else:
                self._end(part, why)
        conn = reading.ranks.pop(rank, None)
        if conn is not None and conn not in reading.ranks.values():
            _remove(self._by_conn, conn, key)
        if not reading.ranks:
            self._forget(key)

    def _forget(self, key: ReadingId) -> None:
        reading = self._readings.pop(key)
        _remove(self._by_request, key.request, key)
        for conn in set(reading.ranks.values()):
            _remove(self._by_conn, conn, key)

    def _end(self, part: Part, why: str) -> None:
        """Nobody is to read a part any more; who still waits for it is told ``why``."""
        order = part.order
        if part.state is not PartState.STAGED:
            for conn in part.ranks.values():
                self._link.send(conn, Unstaged(order.reader, order.part, why[:MAX_REASON]))
        part.on(PartEvent.ENDED)
        self._give(part, inf)
        del self._readings[part.reading].parts[order.part]
        self._free_if_quiet(part)

    def _free_if_quiet(self, part: Part) -> None:
        if part.copying:
            return
        if part.state is PartState.ENDING:
            part.on(PartEvent.QUIET)
        self._slots.give_back(part.number)
        del self._parts[part.number]

    # ---- our workers

    def _give_room(self) -> None:
        for number, slots in self._slots.take_granted():
            part = self._parts[number]
            part.on(PartEvent.GRANTED)
            part.slots, part.copying = slots, set(self._crew.ranks)
            for rank in self._crew.ranks:
                self._have_copied(part, rank)

    def _catch_up(self, rank: int) -> None:
        """A worker attends, perhaps again: a copy it has ended unheard is made once more, into slots still kept."""
        for part in self._parts.values():
            if rank in part.copying:
                self._have_copied(part, rank)

    def _have_copied(self, part: Part, rank: int) -> None:
        self._crew.tell(rank, CopyOut(part.number, part.order.groups, part.slots))

    def _copied(self, number: PartId, worker: int, reason: str, now: float) -> None:
        part = self._parts.get(number)
        if part is None or worker not in part.copying:
            self._tally.count("late_notifications")
            return
        part.copying.discard(worker)
        if part.state is PartState.ENDING:
            self._free_if_quiet(part)
        elif reason:
            self._end(part, f"rank {worker} could not copy it: {reason}")
        elif not part.copying:
            part.on(PartEvent.COPIED)
            self._give(part, now + self._patience)
            for conn in part.ranks.values():
                self._link.send(conn, Staged(part.order.reader, part.order.part, part.slots))


def _remove(index: dict[NameT, dict[ReadingId, None]], name: NameT, key: ReadingId) -> None:
    """Take a key out of an index, and leave nothing empty behind."""
    index[name].pop(key, None)
    if not index[name]:
        del index[name]
