"""P's scheduler: leases blocks until they are read, and answers whether a lease outlived a read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.deadlines import Deadlines, earliest
from pdrelay_connector.core.ids import ConnId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEnded, LeaseEvent, LeaseTable
from pdrelay_connector.core.messages import (
    MAX_RANKS,
    DropLeases,
    FenceResult,
    LeasesLost,
    Message,
    RankSums,
    ReadDone,
    ReadsStarted,
    RenewLeases,
    by_message,
    printable,
)
from pdrelay_connector.core.ports import ConnectionLost, Link, LinkEvent, MessageReceived
from pdrelay_connector.core.results import PeerObjects
from pdrelay_connector.core.timeline import TimelineStep

_COUNTER = {
    LeaseEvent.DONE: "leases_done",
    LeaseEvent.DROPPED: "leases_dropped",
    LeaseEvent.PEER_LOST: "leases_peer_lost",
    LeaseEvent.EXPIRED: "leases_expired",
    LeaseEvent.REVOKED: "leases_revoked",
}


class RevocableLease(NamedTuple):
    """A lease that may be revoked, and how many blocks are free if all leases up to it are."""

    request: RequestId
    blocks: int


# ranks that wait for the checksums of one lease; beyond it they are answered without any
MAX_WAITING = MAX_RANKS


@dataclass(slots=True)
class _SampledLease:
    """The checksums of a lease's blocks, and the readers that have come before them."""

    sums: Mapping[int, RankSums] | None = None  # by worker; None: our workers still compute them
    # By reader and rank, which may repeat themselves; the connection is absent once it has closed.
    waiting: dict[tuple[RequestId, int], tuple[ConnId | None, ReadDone]] = field(
        default_factory=dict[tuple[RequestId, int], tuple[ConnId | None, ReadDone]]
    )

    def waits(self, conn: ConnId, done: ReadDone) -> bool:
        """Have a reader wait; false if the checksums are there, or too many wait already."""
        key = done.reader, done.rank
        if self.sums is not None or (key not in self.waiting and len(self.waiting) >= MAX_WAITING):
            return False
        self.waiting[key] = conn, done
        return True

    def lose(self, conn: ConnId) -> None:
        """Remember of the readers behind a closed connection only what they have read."""
        for key, (its, done) in self.waiting.items():
            if its == conn:
                self.waiting[key] = None, done

    def sums_of(self, rank: int) -> RankSums | None:
        """Return the checksums of the reader's counterpart, or of any worker if there is none.

        The reader notices the other shape, and counts that.
        """
        sums = self.sums or {}
        return sums.get(rank, next(iter(sums.values()), None))


class LeaseManager:
    """Runs on the control thread, which answers decode engines; the engine takes ended leases."""

    def __init__(
        self, link: Link, leases: LeaseTable, counters: Counters, *, sums_timeout: float = 5.0
    ) -> None:
        """``sums_timeout``: the most seconds that a fence result waits for checksums."""
        self._link = link
        self.leases = leases
        self._counters = counters
        # hears of each connection that has closed, or that one of the cores has closed
        self.on_lost: Callable[[ConnId], None] = lambda _: None
        self._released: list[LeaseEnded] = []
        self._objections: list[PeerObjects] = []
        self._sampled: dict[RequestId, _SampledLease] = {}
        self._sums_timeout = sums_timeout
        # of sampled leases for whose checksums readers wait
        self._sums_due: Deadlines[RequestId] = Deadlines()

    def grant(self, request: RequestId, *, now: float, sampled: bool = False) -> None:
        """Lease a finished request's blocks; if ``sampled``, fence results wait for `add_sums`."""
        self.leases.grant(request, now=now)
        if sampled:
            self._sampled[request] = _SampledLease()
        self._counters.count("leases_granted")
        self._counters.note(request, TimelineStep.LEASE_GRANTED, now)

    def add_sums(self, request: RequestId, sums: Sequence[RankSums], *, now: float) -> None:
        """Add the checksums of all workers, and answer the readers that wait for them."""
        self.advance(now=now)
        if (sampled := self._sampled.get(request)) is None:
            return  # its lease has ended, or its readers have timed out
        self._sums_due.discard(request)
        sampled.sums = {rank_sums.worker: rank_sums for rank_sums in sums}
        self._answer(sampled, now)

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Handle an event of a decode engine's connection."""
        self.advance(now=now)  # first, so that nothing below sees a lease that is over
        match event:
            case MessageReceived(conn, message):
                self._on_message(conn, message, now)
            case ConnectionLost(conn):
                self.on_connection_lost(conn)
            case _:
                pass  # connections that we opened belong to the lease renewer

    def advance(self, *, now: float) -> float | None:
        """End leases that are due; return when to be called again at the latest."""
        self._release(self.leases.expire(now=now))
        for request in self._sums_due.take_due(now=now):
            self._give_up_sums(request, now)
        return earliest(self.leases.next_expiry(), self._sums_due.next())

    def objected(self, conn: ConnId, reason: str) -> None:
        """A decode engine will load no KV of this engine."""
        self._counters.count("objections")
        self._objections.append(PeerObjects(self._link.engine_of(conn), printable(reason)))

    def take_objections(self) -> list[PeerObjects]:
        """Return the decode engines that have objected since the last call."""
        objections = self._objections
        self._objections = []
        return objections

    def holds(self, request: RequestId) -> bool:
        """Whether a lease is running."""
        return request in self.leases

    def renew(self, conn: ConnId, requests: Iterable[RequestId], *, now: float) -> list[RequestId]:
        """Apply a heartbeat; return those that have no lease."""
        names = list(requests)
        lost = [request for request in names if not self.leases.renew(request, conn, now=now)]
        self._counters.count("leases_renewed", len(names) - len(lost))
        if self._counters.keeps_events:
            for request in set(names).difference(lost):
                self._counters.note(request, TimelineStep.LEASE_RENEWED, now)
        self._counters.count("foreign_messages", sum(request in self.leases for request in lost))
        return lost

    def refuses(self, request: RequestId, conn: ConnId) -> bool:
        """Whether a lease is another engine's than the one behind a connection; counted."""
        is_foreign = not self.leases.may_end(request, conn)
        self._counters.count("foreign_messages", int(is_foreign))
        return is_foreign

    def drop(self, requests: Iterable[RequestId], conn: ConnId | None = None) -> list[RequestId]:
        """End leases for the decode engine behind ``conn``; return the requests without a lease.

        Leases of other engines stay. Without ``conn`` we end them ourselves.
        """
        unknown: list[RequestId] = []
        for request in dict.fromkeys(requests):
            if request not in self.leases:
                unknown.append(request)
                self.leases.late_read_ended(request)
            elif conn is None or not self.refuses(request, conn):
                self._release([self.leases.end(request, LeaseEvent.DROPPED)])
        return unknown

    def read(self, conn: ConnId, request: RequestId, *, now: float) -> None:
        """Protect a lease from revocation for a while: the engine behind ``conn`` reads blocks."""
        if request not in self.leases:
            self._counters.count("unknown_transfer_messages")
        elif not self.refuses(request, conn):
            self.leases.read(request, now=now)

    def revoke(
        self,
        candidates: Sequence[RevocableLease],
        blocks: int,
        *,
        now: float,
        is_busy: Callable[[RequestId], bool] = lambda _: False,
    ) -> None:
        """Revoke unread leases in this order until so many blocks are free; notify their holders.

        A decode engine may have begun to read, with its message still under way. Then the blocks
        are overwritten, and the fence discards the read: the lease ends before its ReadDone.
        """
        chosen: list[RequestId] = []
        for request, gain in candidates:
            if blocks <= 0:
                break
            if (
                request in self.leases
                and not self.leases.is_read(request, now=now)
                and not is_busy(request)
            ):
                chosen.append(request)
                blocks -= gain
        self._revoke(chosen)

    def revoke_all(self) -> None:
        """Revoke all leases, also those that are being read or written: their KV is void."""
        self._revoke(self.leases.requests)

    def _revoke(self, requests: Iterable[RequestId]) -> None:
        lost: dict[ConnId, list[RequestId]] = {}
        for request in requests:
            if (holder := self.leases.holder(request)) is not None:
                lost.setdefault(holder, []).append(request)
            self._release([self.leases.end(request, LeaseEvent.REVOKED)])
        for holder, theirs in lost.items():
            self.send_leases_lost(holder, theirs)

    def finish(self, request: RequestId) -> None:
        """End a lease because all blocks are written to all engines that asked."""
        if request in self.leases:
            self._release([self.leases.end(request, LeaseEvent.DONE)])

    def on_connection_lost(self, conn: ConnId) -> None:
        """End the leases of a closed connection; its waiting readers get no answer."""
        for sampled in self._sampled.values():
            sampled.lose(conn)
        self._release(self.leases.lose(conn))
        self.on_lost(conn)

    def take_released(self) -> list[LeaseEnded]:
        """Return the leases that ended since the last call, in order."""
        released = self._released
        self._released = []
        return released

    def _on_message(self, conn: ConnId, message: Message, now: float) -> None:
        match message:
            case RenewLeases(requests):
                lost = self.renew(conn, requests, now=now)
                self._counters.count(
                    "unknown_transfer_messages", sum(request not in self.leases for request in lost)
                )
                self.send_leases_lost(conn, lost)
            case ReadsStarted(requests):
                for request in requests:
                    self.read(conn, request, now=now)
            case ReadDone():
                self._on_read_done(conn, message, now)
            case DropLeases(requests):
                self._counters.count("unknown_transfer_messages", len(self.drop(requests, conn)))
            case _:
                self._link.close(conn)  # not something a decode engine says after its Hello
                self.on_connection_lost(conn)

    def send_leases_lost(self, conn: ConnId, lost: Iterable[RequestId]) -> None:
        """Notify a decode engine that it has no lease of these requests."""
        for names in by_message(lost):
            self._link.send(conn, LeasesLost(names))

    def _on_read_done(self, conn: ConnId, done: ReadDone, now: float) -> None:
        if done.request not in self.leases:
            self.leases.late_read_ended(done.request, done.rank, done.ranks)
            self._counters.count("unknown_transfer_messages")
            self._link.send(conn, FenceResult(done.reader, held=False))
            return
        if self.refuses(done.request, conn):
            self._link.send(conn, FenceResult(done.reader, held=False))
            return
        sampled = self._sampled.get(done.request)
        is_first = sampled is not None and not sampled.waiting
        # the lease is kept: its blocks are not summed yet
        if sampled is not None and sampled.waits(conn, done):
            self.leases.read(done.request, now=now)
            if is_first:
                self._sums_due.set(done.request, now + self._sums_timeout)
            return
        self._link.send(
            conn,
            FenceResult(
                done.reader, held=True, sums=sampled.sums_of(done.rank) if sampled else None
            ),
        )
        self._note_read(done, now)

    def _note_read(self, done: ReadDone, now: float) -> None:
        if done.request not in self.leases:
            return  # another reader's last rank has ended it
        if released := self.leases.done(done.request, done.reader, done.rank, done.ranks):
            self._release([released])
        else:
            self.leases.read(done.request, now=now)  # its other ranks do

    def _give_up_sums(self, request: RequestId, now: float) -> None:
        """Answer without checksums.

        A reader that waits longer takes us for hung, and fails all it loads from us.
        """
        self._counters.count("sums_late")
        self._answer(self._sampled.pop(request), now)

    def _answer(self, sampled: _SampledLease, now: float) -> None:
        """Confirm the reads that have waited: the lease has held until now.

        They were allowed when they came.
        """
        waiting = list(sampled.waiting.values())
        sampled.waiting = {}
        for conn, done in waiting:
            if conn is not None:
                self._link.send(
                    conn, FenceResult(done.reader, held=True, sums=sampled.sums_of(done.rank))
                )
        for _, done in waiting:
            self._note_read(done, now)

    def _release(self, released: list[LeaseEnded]) -> None:
        for lease in released:
            self._counters.count(_COUNTER[lease.reason])
            self._sums_due.discard(lease.request)
            sampled = self._sampled.pop(lease.request, None)
            for conn, done in sampled.waiting.values() if sampled is not None else ():
                if conn is not None:
                    self._link.send(conn, FenceResult(done.reader, held=False))
        self._released += released
