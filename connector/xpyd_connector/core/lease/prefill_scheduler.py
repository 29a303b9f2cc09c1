"""The prefill engine's half: lend blocks until they have been read, and say whether a read counts."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.ids import ConnId, RequestId
from xpyd_connector.core.lease.lease_table import LeaseBook, LeaseEvent, Released
from xpyd_connector.core.messages import MAX_IDS, Done, Drop, Fenced, Lapsed, Message, Reads, Renew
from xpyd_connector.core.ports import Link, LinkEvent, Lost, Received

_COUNTER = {
    LeaseEvent.DONE: "leases_done",
    LeaseEvent.DROPPED: "leases_dropped",
    LeaseEvent.PEER_LOST: "leases_peer_lost",
    LeaseEvent.EXPIRED: "leases_expired",
    LeaseEvent.REVOKED: "leases_revoked",
}


class Candidate(NamedTuple):
    """A lease that may be revoked, and how many blocks are free if it and those named before it are."""

    request: RequestId
    blocks: int


class Lender:
    """Answers decode engines. Runs on the control thread; the engine only sees what it released."""

    def __init__(self, link: Link, leases: LeaseBook, tally: Tally) -> None:
        self._link = link
        self._leases = leases
        self._tally = tally
        self._released: list[Released] = []

    def grant(self, request: RequestId, *, now: float) -> None:
        """Promise to keep the blocks of a finished request for a while."""
        self._leases.grant(request, now=now)
        self._tally.count("leases_granted")

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in what happened on the connection of a decode engine that reads."""
        self.advance(now=now)  # first, so that nothing below sees a lease that is over
        match event:
            case Received(conn, message):
                self._answer(conn, message, now)
            case Lost(conn):
                self.lose(conn)
            case _:
                pass  # connections we open are a borrower's

    def advance(self, *, now: float) -> float | None:
        """End what is due; return when to be called again at the latest."""
        self._release(self._leases.expire(now=now))
        return self._leases.next_expiry()

    def holds(self, request: RequestId) -> bool:
        """Whether a lease is running."""
        return request in self._leases

    def renew(self, conn: ConnId, requests: Iterable[RequestId], *, now: float) -> list[RequestId]:
        """Apply a heartbeat; return those that have no lease."""
        names = list(requests)
        lapsed = [request for request in names if not self._leases.renew(request, conn, now=now)]
        self._tally.count("leases_renewed", len(names) - len(lapsed))
        self._tally.count("foreign_messages", sum(request in self._leases for request in lapsed))
        return lapsed

    def holder(self, request: RequestId) -> ConnId | None:
        """Return the connection that renews a lease; None if nobody has claimed it, or it is over."""
        return self._leases.holder(request)

    def is_same(self, holder: ConnId, conn: ConnId) -> bool:
        """Whether a connection may speak for another one."""
        return self._leases.is_same(holder, conn)

    def may_end(self, request: RequestId, conn: ConnId) -> bool:
        """Whether a connection is of the engine that holds a lease, as far as that can be known."""
        return self._leases.may_end(request, conn)

    def refuses(self, request: RequestId, conn: ConnId) -> bool:
        """Whether a lease is another engine's than the one behind a connection; counted."""
        is_foreign = not self.may_end(request, conn)
        self._tally.count("foreign_messages", int(is_foreign))
        return is_foreign

    def drop(self, requests: Iterable[RequestId], conn: ConnId | None = None) -> list[RequestId]:
        """End leases that the decode engine behind ``conn`` does not want; return those that have none.

        Leases of another engine stay. Without ``conn`` it is our own wish.
        """
        unknown: list[RequestId] = []
        for request in dict.fromkeys(requests):
            if request not in self._leases:
                unknown.append(request)
            elif conn is None or not self.refuses(request, conn):
                self._release([self._leases.drop(request)])
        return unknown

    def read(self, conn: ConnId, request: RequestId, *, now: float) -> None:
        """Keep a lease from being revoked for a while, because the engine behind ``conn`` reads its blocks."""
        if request not in self._leases:
            self._tally.count("late_notifications")
        elif not self.refuses(request, conn):
            self._leases.read(request, now=now)

    def revoke(
        self,
        candidates: Sequence[Candidate],
        blocks: int,
        *,
        now: float,
        is_busy: Callable[[RequestId], bool] = lambda _: False,
    ) -> None:
        """End leases that nobody reads, the first named first, until so many blocks are free; tell their holders.

        A decode engine may have begun to read without our knowing: its word may be under way. What it reads is then
        overwritten, and the fence throws it away: the lease is over before its Done comes.
        """
        lapsed: dict[ConnId, list[RequestId]] = {}
        for request, gain in candidates:
            if blocks <= 0:
                break
            if request not in self._leases or self._leases.is_read(request, now=now) or is_busy(request):
                continue
            if (holder := self._leases.holder(request)) is not None:
                lapsed.setdefault(holder, []).append(request)
            self._release([self._leases.revoke(request)])
            blocks -= gain
        for holder, requests in lapsed.items():
            self.tell_lapsed(holder, requests)

    def finish(self, request: RequestId) -> None:
        """End a lease because everything was written to everybody who asked."""
        if request in self._leases:
            self._release([self._leases.finish(request)])

    def lose(self, conn: ConnId) -> None:
        """End every lease claimed over a connection that closed."""
        self._release(self._leases.lose(conn))

    def take_released(self) -> list[Released]:
        """Return the leases that ended since the last call, in order."""
        released, self._released = self._released, []
        return released

    def _answer(self, conn: ConnId, message: Message, now: float) -> None:
        match message:
            case Renew(requests):
                lapsed = self.renew(conn, requests, now=now)
                self._tally.count("late_notifications", sum(request not in self._leases for request in lapsed))
                self.tell_lapsed(conn, lapsed)
            case Reads(requests):
                for request in requests:
                    self.read(conn, request, now=now)
            case Done():
                self._fence(conn, message, now)
            case Drop(requests):
                self._tally.count("late_notifications", len(self.drop(requests, conn)))
            case _:
                self._link.close(conn)  # not something a decode engine says after its Hello
                self.lose(conn)

    def tell_lapsed(self, conn: ConnId, lapsed: Sequence[RequestId]) -> None:
        """Tell a decode engine that it has no lease of these requests."""
        for start in range(0, len(lapsed), MAX_IDS):
            self._link.send(conn, Lapsed(tuple(lapsed[start : start + MAX_IDS])))

    def _fence(self, conn: ConnId, done: Done, now: float) -> None:
        if done.request not in self._leases:
            self._tally.count("late_notifications")
            self._link.send(conn, Fenced(done.reader, held=False))
            return
        if self.refuses(done.request, conn):
            self._link.send(conn, Fenced(done.reader, held=False))
            return
        self._link.send(conn, Fenced(done.reader, held=True))
        if released := self._leases.done(done.request, done.reader, done.rank, done.ranks):
            self._release([released])
        else:
            self._leases.read(done.request, now=now)  # its other ranks do

    def _release(self, released: list[Released]) -> None:
        for lease in released:
            self._tally.count(_COUNTER[lease.why])
        self._released += released
