"""The prefill engine's half: lend blocks until they have been read, and say whether a read counts."""

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
        """Take in what happened on a decode engine's connection."""
        self._expire(now)  # first, so that nothing below sees a lease that is over
        match event:
            case Received(conn, message):
                self._answer(conn, message, now)
            case Lost(conn):
                self._release(self._leases.lose(conn))
            case _:
                pass  # connections we open are a borrower's

    def advance(self, *, now: float) -> float | None:
        """End what is due; return when to be called again at the latest."""
        self._expire(now)
        return self._leases.next_expiry()

    def take_released(self) -> list[Released]:
        """Return the leases that ended since the last call, in order."""
        released, self._released = self._released, []
        return released

    def _answer(self, conn: ConnId, message: Message, now: float) -> None:
        match message:
            case Renew(requests):
                self._renew(conn, requests, now)
            case Done():
                self._fence(conn, message)
            case Drop(requests):
                held = [request for request in requests if request in self._leases]
                self._tally.count("late_notifications", len(requests) - len(held))
                self._release([self._leases.drop(request) for request in dict.fromkeys(held)])
            case _:
                self._link.close(conn)  # not something a decode engine says after its Hello
                self._release(self._leases.lose(conn))

    def _renew(self, conn: ConnId, requests: tuple[RequestId, ...], now: float) -> None:
        lapsed = [request for request in requests if not self._leases.renew(request, conn, now=now)]
        self._tally.count("leases_renewed", len(requests) - len(lapsed))
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

    def _expire(self, now: float) -> None:
        self._release(self._leases.expire(now=now))

    def _release(self, released: list[Released]) -> None:
        for lease in released:
            self._tally.count(_COUNTER[lease.why])
        self._released += released
