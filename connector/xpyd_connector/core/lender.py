"""The prefill engine's half: lend blocks until they have been read, and say whether a read counts."""

from collections.abc import Iterable

from xpyd_connector.core.ids import ConnId, RequestId
from xpyd_connector.core.leases import LeaseBook, LeaseEvent, Released
from xpyd_connector.core.messages import MAX_IDS, Done, Drop, Fenced, Lapsed, Message, Renew
from xpyd_connector.core.ports import Link, LinkEvent, Lost, Received
from xpyd_connector.core.tally import Tally

_COUNTER = {
    LeaseEvent.DONE: "leases_done",
    LeaseEvent.DROPPED: "leases_dropped",
    LeaseEvent.PEER_LOST: "leases_peer_lost",
    LeaseEvent.EXPIRED: "leases_expired",
}


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
        return lapsed

    def drop(self, requests: Iterable[RequestId]) -> list[RequestId]:
        """End leases that the decode engine does not want; return those that have none."""
        unknown: list[RequestId] = []
        for request in dict.fromkeys(requests):
            if request in self._leases:
                self._release([self._leases.drop(request)])
            else:
                unknown.append(request)
        return unknown

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
                self._tell_lapsed(conn, self.renew(conn, requests, now=now))
            case Done():
                self._fence(conn, message)
            case Drop(requests):
                self._tally.count("late_notifications", len(self.drop(requests)))
            case _:
                self._link.close(conn)  # not something a decode engine says after its Hello
                self.lose(conn)

    def _tell_lapsed(self, conn: ConnId, lapsed: list[RequestId]) -> None:
        self._tally.count("late_notifications", len(lapsed))
        for start in range(0, len(lapsed), MAX_IDS):
            self._link.send(conn, Lapsed(tuple(lapsed[start : start + MAX_IDS])))

    def _fence(self, conn: ConnId, done: Done) -> None:
        held = done.request in self._leases
        self._link.send(conn, Fenced(done.reader, held))
        if not held:
            self._tally.count("late_notifications")
        elif released := self._leases.done(done.request, done.reader, done.rank, done.ranks):
            self._release([released])

    def _release(self, released: list[Released]) -> None:
        for lease in released:
            self._tally.count(_COUNTER[lease.why])
        self._released += released
