"""P's scheduler in staged pull: copies parts of a request into host memory for decode engines.

A part gets slots when every rank of the decode engine has asked for it. After that it waits for
nothing else, so slots always become free again: when every rank has asked for the next part or sent
ReadDone, or when the lease ends. After the lease's end the fence rejects the read. Slots stay in
use while a worker copies into them.
"""

import itertools
from collections.abc import Hashable, Iterable
from typing import TypeVar

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.deadlines import Deadlines
from pdrelay_connector.core.ids import ConnId, PartId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEnded
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import (
    MAX_REASON,
    CopyEnded,
    CopyOut,
    DropLeases,
    Message,
    PartRefused,
    PartStaged,
    ReadDone,
    ReadsStarted,
    RenewLeases,
    StagePart,
    WorkerHello,
)
from pdrelay_connector.core.ports import ConnectionLost, Link, LinkEvent, MessageReceived
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.slots import Slots
from pdrelay_connector.core.staging.staged_read import (
    PartEvent,
    PartState,
    StagedPart,
    StagedRead,
    StagedReadId,
)
from pdrelay_connector.errors import HostBufferTooSmall

NameT = TypeVar("NameT", bound=Hashable)

MAX_PARTS = 65536  # parts that are asked for or staged; beyond it they are refused


class StagingCoordinator:
    """Runs on the control thread, in front of the lease manager: D and our workers connect here."""

    def __init__(
        self,
        link: Link,
        lease_manager: LeaseManager,
        counters: Counters,
        workers: WorkerLinks,
        slots: Slots[PartId],
        *,
        blocks: int,
        read_timeout: float,
    ) -> None:
        self._link = link
        self._lease_manager = lease_manager
        self._counters = counters
        self._workers = workers
        self._slots = slots
        self._blocks = blocks  # of our cache
        # s for a decode engine to read a part: longer than its own patience
        self._read_timeout = read_timeout
        self._numbers = map(PartId, itertools.count(1))
        self._reads: dict[StagedReadId, StagedRead] = {}
        # dicts, because they keep their order
        self._by_request: dict[RequestId, dict[StagedReadId, None]] = {}
        # those that may have a rank there
        self._by_conn: dict[ConnId, dict[StagedReadId, None]] = {}
        self._parts: dict[PartId, StagedPart] = {}  # all that are not over
        self._deadlines: Deadlines[PartId] = Deadlines()  # of those GATHERING and STAGED

    def __len__(self) -> int:
        return len(self._reads) + len(self._parts)

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Handle an event of a connection that we accepted."""
        # first, so that nothing below sees a lease that is over
        self._lease_manager.advance(now=now)
        match event:
            case MessageReceived(conn, message):
                self._on_message(conn, message, now)
            case ConnectionLost(conn):
                self._lost(conn)
            case _:
                pass

    def released(self, ended: Iterable[LeaseEnded]) -> None:
        """Release the staged parts of leases that are over."""
        for released in ended:
            for key in list(self._by_request.get(released.request, ())):
                for part in list(self._reads[key].parts.values()):
                    self._end(part, released.text)
                self._forget(key)
        self._give_room()

    def advance(self, *, now: float) -> float | None:
        """End parts that take too long: others wait for their slots.

        Return when to be called again at the latest.
        """
        for part in [self._parts[number] for number in self._deadlines.take_due(now=now)]:
            if part.state is PartState.GATHERING:
                self._end(
                    part, f"only {len(part.ranks)} of {part.order.ranks} ranks asked for it in time"
                )
            else:  # so that the fence tells what became of its slots
                self._lease_manager.drop([part.order.request])
        self._give_room()
        return self._deadlines.next()

    @property
    def is_copying(self) -> bool:
        """Whether a worker may still copy out of the cache, also for a request that is over."""
        return any(part.copying for part in self._parts.values())

    def is_reading(self, request: RequestId) -> bool:
        """Whether a decode engine reads parts of a request, or asks for them."""
        return request in self._by_request

    def _on_message(self, conn: ConnId, message: Message, now: float) -> None:
        match message:
            case StagePart():
                self._on_stage_part(conn, message, now)
            case ReadDone(request, reader, rank):
                self._lease_manager.on(MessageReceived(conn, message), now=now)
                self._on_read_done(conn, StagedReadId(request, reader), rank)
            case RenewLeases() | DropLeases() | ReadsStarted():
                self._lease_manager.on(MessageReceived(conn, message), now=now)
            case WorkerHello() if self._workers.add(conn, message):
                self._resend_copies(message.rank)
            case CopyEnded(number, reason) if (worker := self._workers.rank_of(conn)) is not None:
                self._copied(number, worker, reason, now)
            case _:
                self._link.close(conn)  # nothing that a decode engine or a worker says
                self._lost(conn)

    def _lost(self, conn: ConnId) -> None:
        self._lease_manager.on_connection_lost(conn)
        self._workers.remove(conn)
        for key in list(self._by_conn.get(conn, ())):
            ranks = self._reads[key].ranks
            for rank in [rank for rank, its in ranks.items() if its == conn]:
                self._drop_rank(key, rank, f"the connection of its rank {rank} is lost")

    # ---- decode engines

    def _on_read_done(self, conn: ConnId, key: StagedReadId, rank: int) -> None:
        """Accept it only over the rank's own connection: others must not free slots in use."""
        read = self._reads.get(key)
        if read is None:
            return
        its = read.ranks.get(rank)
        if its == conn or (its is None and self._lease_manager.leases.may_end(key.request, conn)):
            self._drop_rank(key, rank, f"its rank {rank} has read everything")
        else:
            self._counters.count("foreign_messages")

    def _on_stage_part(self, conn: ConnId, order: StagePart, now: float) -> None:
        key = StagedReadId(order.request, order.reader)
        read = self._reads.get(key, StagedRead())
        if reason := self._objection(conn, order, read):
            self._link.send(conn, PartRefused(order.reader, order.part, reason))
            if read.broken and read.ranks.get(order.rank) == conn:
                self._drop_rank(key, order.rank, read.broken)  # it has read what it had
            return
        self._reads[key] = read
        self._by_request.setdefault(key.request, {})[key] = None
        self._by_conn.setdefault(conn, {})[key] = None
        read.ranks[order.rank] = conn
        for earlier in list(read.parts.values()):
            self._part_read(earlier, order.rank)
        part = read.parts.get(order.part) or self._open(order, read, now)
        part.ranks[order.rank] = conn
        if len(part.ranks) == order.ranks:
            part.on(PartEvent.COMPLETE)
            self._deadlines.discard(part.number)
            self._slots.enqueue(part.number, [len(blocks) for blocks in order.groups])

    def _open(self, order: StagePart, read: StagedRead, now: float) -> StagedPart:
        part = StagedPart(next(self._numbers), order)
        read.parts[order.part] = self._parts[part.number] = part
        self._deadlines.set(part.number, now + self._read_timeout)
        return part

    def _objection(self, conn: ConnId, order: StagePart, read: StagedRead) -> str:
        """Return why a part is not staged; empty: it is."""
        if not self._lease_manager.holds(order.request):
            return f"no lease is held for request {order.request}"
        if self._lease_manager.refuses(order.request, conn):
            return f"the lease of request {order.request} is another decode engine's"
        if len(self._parts) >= MAX_PARTS:
            return f"{MAX_PARTS} parts are asked for"
        return self._objection_to_blocks(order) or read.objection(conn, order)

    def _objection_to_blocks(self, order: StagePart) -> str:
        try:
            self._slots.check([len(blocks) for blocks in order.groups])
        except HostBufferTooSmall as exc:
            return str(exc)
        # A device that is asked to copy a block it does not have may never copy again.
        wrong = [
            block for blocks in order.groups for block in blocks if not 0 < block < self._blocks
        ]
        return f"block {wrong[0]} is asked for; there are 1 to {self._blocks - 1}" if wrong else ""

    def _part_read(self, part: StagedPart, rank: int) -> None:
        """A rank has read a part, or never will."""
        part.ranks.pop(rank, None)
        if part.state is PartState.STAGED and not part.ranks:
            self._end(part, "")

    def _drop_rank(self, key: StagedReadId, rank: int, reason: str) -> None:
        """A rank has stopped: the others get no further parts, but may read the staged one."""
        read = self._reads[key]
        read.broken = reason
        for part in list(read.parts.values()):
            if part.state is PartState.STAGED:
                self._part_read(part, rank)
            else:
                self._end(part, reason)
        conn = read.ranks.pop(rank, None)
        if conn is not None and conn not in read.ranks.values():
            _remove(self._by_conn, conn, key)
        if not read.ranks:
            self._forget(key)

    def _forget(self, key: StagedReadId) -> None:
        read = self._reads.pop(key)
        _remove(self._by_request, key.request, key)
        for conn in set(read.ranks.values()):
            _remove(self._by_conn, conn, key)

    def _end(self, part: StagedPart, reason: str) -> None:
        """End a part; ranks that still wait for it hear why."""
        order = part.order
        if part.state is not PartState.STAGED:
            for conn in part.ranks.values():
                self._link.send(conn, PartRefused(order.reader, order.part, reason[:MAX_REASON]))
        part.on(PartEvent.ENDED)
        self._deadlines.discard(part.number)
        del self._reads[StagedReadId(order.request, order.reader)].parts[order.part]
        self._free_if_drained(part)

    def _free_if_drained(self, part: StagedPart) -> None:
        if part.copying:
            return
        if part.state is PartState.ENDING:
            part.on(PartEvent.DRAINED)
        self._slots.release(part.number)
        del self._parts[part.number]

    # ---- our workers

    def _give_room(self) -> None:
        for number, slots in self._slots.take_granted():
            part = self._parts[number]
            part.on(PartEvent.GRANTED)
            part.slots = slots
            part.copying = set(self._workers.ranks)
            for rank in self._workers.ranks:
                self._order_copy(part, rank)

    def _resend_copies(self, rank: int) -> None:
        """Handle a worker's (re)connection: a copy whose end was lost is made again."""
        for part in self._parts.values():
            if rank in part.copying:
                self._order_copy(part, rank)

    def _order_copy(self, part: StagedPart, rank: int) -> None:
        self._workers.send(rank, CopyOut(part.number, part.order.groups, part.slots))

    def _copied(self, number: PartId, worker: int, reason: str, now: float) -> None:
        part = self._parts.get(number)
        if part is None or worker not in part.copying:
            self._counters.count("unknown_transfer_messages")
            return
        part.copying.discard(worker)
        if part.state is PartState.ENDING:
            self._free_if_drained(part)
        elif reason:
            self._end(part, f"rank {worker} could not copy it: {reason}")
        elif not part.copying:
            part.on(PartEvent.COPIED)
            self._deadlines.set(part.number, now + self._read_timeout)
            for conn in part.ranks.values():
                self._link.send(conn, PartStaged(part.order.reader, part.order.part, part.slots))


def _remove(index: dict[NameT, dict[StagedReadId, None]], name: NameT, key: StagedReadId) -> None:
    """Take a key out of an index, and leave nothing empty behind."""
    index[name].pop(key, None)
    if not index[name]:
        del index[name]
