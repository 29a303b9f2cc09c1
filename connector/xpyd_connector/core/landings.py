"""The decode scheduler's half of push: lend blocks to a prefill engine until it has written them, or never will.

A landing ends with P's word: Landed, or Stopped. When we give one up before that (aborted, too late, P silent), the
request is told at once, but its blocks must not be used: P may still write into them. They are ours again when P says
Stopped; or, when its connection closed, after what it had sent on its way must have arrived (:data:`QUARANTINE`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from xpyd_connector.core.borrower import Borrower
from xpyd_connector.core.ids import Address, BlockId, ConnId, EngineId, RequestId
from xpyd_connector.core.lives import follow
from xpyd_connector.core.messages import Landed, Memory, Message, RankInfo, Register, Stop, Stopped, Stuck
from xpyd_connector.core.peers import Peer, PeerBook, PeerState
from xpyd_connector.core.ports import Link
from xpyd_connector.core.reader import LetGo, Result
from xpyd_connector.core.tally import Tally
from xpyd_connector.errors import IllegalTransition

# How long blocks stay out of reach after P's connection closed: (s between looks, looks). Looks, not a span of time: a
# process that was stopped meanwhile must run for a while before what lies in its sockets has been taken in.
QUARANTINE: Final = 0.1, 50  # P's scheduler is dead, its workers follow, and what is left is in our sockets
LONG_QUARANTINE: Final = 10.0, 110  # cut off: TCP sends again for 15 minutes (Linux, tcp_retries2) once the cut mends


class LandingState(Enum):
    """Where a landing is in its life."""

    WAITING = auto()  # for P to be met
    REGISTERED = auto()  # P may write
    STOPPING = auto()  # given up and told so; P may still write until it says Stopped
    QUARANTINED = auto()  # given up, and P is gone: what it sent may still arrive
    OVER = auto()


class LandingEvent(Enum):
    """What can happen to a landing."""

    REGISTERED = auto()
    LANDED = auto()
    FAILED = auto()  # and P does not write
    GIVEN_UP = auto()
    PEER_LOST = auto()
    LET_GO = auto()


TRANSITIONS: Final[Mapping[LandingState, Mapping[LandingEvent, LandingState]]] = {
    LandingState.WAITING: {
        LandingEvent.REGISTERED: LandingState.REGISTERED,
        LandingEvent.FAILED: LandingState.OVER,
    },
    LandingState.REGISTERED: {
        LandingEvent.LANDED: LandingState.OVER,
        LandingEvent.FAILED: LandingState.OVER,
        LandingEvent.GIVEN_UP: LandingState.STOPPING,
        LandingEvent.PEER_LOST: LandingState.QUARANTINED,
    },
    LandingState.STOPPING: {
        LandingEvent.LET_GO: LandingState.OVER,
        LandingEvent.PEER_LOST: LandingState.QUARANTINED,
    },
    LandingState.QUARANTINED: {LandingEvent.LET_GO: LandingState.OVER},
    LandingState.OVER: {},
}


class Ticket(NamedTuple):
    """What the scheduler asks for: ``into`` takes the prompt's blocks from number ``first`` on, in token order."""

    request: RequestId  # ours
    remote_request: RequestId  # the transfer's name
    engine: EngineId
    address: Address
    prompt: str | None  # its digest
    first: int
    into: Sequence[BlockId]


@dataclass(slots=True)
class _Landing:
    ticket: Ticket
    deadline: float
    state: LandingState = LandingState.WAITING
    look_every: float = 0.0  # s; these three only while QUARANTINED
    looks: int = 0
    look_at: float = 0.0

    def on(self, event: LandingEvent) -> None:
        self.state = follow(TRANSITIONS, self.state, event, f"landing of {self.ticket.request}")


class Landings:
    """Runs on the control thread."""

    def __init__(
        self,
        link: Link,
        peers: PeerBook,
        borrower: Borrower,
        tally: Tally,
        ranks: Sequence[RankInfo],
        *,
        timeout: float,
        patience: float,
    ) -> None:
        self._link = link
        self._peers = peers
        self._borrower = borrower
        self._tally = tally
        self._ranks = ranks
        self._timeout = timeout  # s from registering to the KV being there
        self._patience = patience  # s that P may leave a heartbeat unanswered
        self._landings: dict[RequestId, _Landing] = {}
        self._results: list[Result | LetGo] = []

    def __len__(self) -> int:
        return len(self._landings)

    def expect(self, ticket: Ticket, *, now: float) -> None:
        """Lend blocks to P. What comes of it comes out of :meth:`take_results`."""
        if ticket.request in self._landings:
            raise IllegalTransition(f"request {ticket.request} is registered twice")
        landing = self._landings[ticket.request] = _Landing(ticket, now + self._timeout)
        peer = self._peers.approach(ticket.engine, ticket.address, now=now)
        if peer.state is PeerState.MET:
            self._register(landing, peer)
        elif peer.state is PeerState.REFUSED:
            self._fail(landing, "loads_failed_handshake", f"{peer.address} was not met: {peer.reason}")

    def stop(self, request: RequestId) -> None:
        """The request is aborted."""
        if (landing := self._landings.get(request)) is not None:
            self._give_up(landing, "loads_aborted", "the request was aborted")

    def on(self, conn: ConnId, message: Message) -> bool:
        """Take in what P says; false if that is not for us."""
        match message:
            case Landed(reader, held):
                self._landed(conn, reader, held=held)
            case Stopped():
                self._stopped(conn, message)
            case Stuck(reader, reason):
                if (landing := self._found(conn, reader)) is not None:
                    self._give_up(landing, "loads_failed_timeout", reason)
            case _:
                return False
        return True

    def peer_changed(self, peer: Peer, *, now: float) -> None:
        """A prefill engine was met, could not be, or is gone."""
        if peer.state is PeerState.MET:
            for rank in self._ranks:
                self._link.send(peer.conn, Memory(rank))
        for landing in [each for each in self._landings.values() if each.ticket.engine == peer.engine]:
            if landing.state is LandingState.QUARANTINED:
                continue
            if peer.state is PeerState.MET and landing.state is LandingState.WAITING:
                self._register(landing, peer)
            elif peer.state is PeerState.REFUSED and landing.state is LandingState.WAITING:
                self._fail(landing, "loads_failed_handshake", f"{peer.address} was not met: {peer.reason}")
            elif peer.state is PeerState.GONE:
                self._lose(landing, peer, now)

    def advance(self, *, now: float) -> float | None:
        """Look at the clock; return when to be called again at the latest."""
        for landing in list(self._landings.values()):
            if landing.state is LandingState.QUARANTINED:
                self._look(landing, now)
            elif landing.state is not LandingState.STOPPING:
                self._check(landing, now)
        return min((self._due(landing) for landing in self._landings.values()), default=None)

    def take_results(self) -> list[Result | LetGo]:
        """Return what ended since the last call, in order."""
        results, self._results = self._results, []
        return results

    def _due(self, landing: _Landing) -> float:
        if landing.state is LandingState.QUARANTINED:
            return landing.look_at
        if landing.state is LandingState.STOPPING:
            return float("inf")
        peer = self._peers.get(landing.ticket.engine)
        asked_at = peer.asked_at if peer is not None else None
        return landing.deadline if asked_at is None else min(landing.deadline, asked_at + self._patience)

    def _check(self, landing: _Landing, now: float) -> None:
        peer = self._peers.get(landing.ticket.engine)
        if now >= landing.deadline:
            self._give_up(landing, "loads_failed_timeout", f"nothing was written within {self._timeout:g} s")
        elif peer is not None and landing.state is LandingState.REGISTERED and self._is_hung(peer, now):
            self._give_up(landing, "loads_failed_timeout", f"{peer.address} does not answer")

    def _is_hung(self, peer: Peer, now: float) -> bool:
        return peer.asked_at is not None and now >= peer.asked_at + self._patience

    def _look(self, landing: _Landing, now: float) -> None:
        if now < landing.look_at:
            return
        landing.looks -= 1
        landing.look_at = now + landing.look_every
        if not landing.looks:
            self._let_go(landing)

    def _register(self, landing: _Landing, peer: Peer) -> None:
        landing.on(LandingEvent.REGISTERED)
        ticket = landing.ticket
        self._tally.count("registrations_sent")
        self._link.send(
            peer.conn,
            Register(ticket.request, ticket.remote_request, ticket.prompt, ticket.first, tuple(ticket.into)),
        )

    def _found(self, conn: ConnId, reader: RequestId) -> _Landing | None:
        """Return the landing that P speaks of; another peer's, or one that is over, is none of its business."""
        landing, peer = self._landings.get(reader), self._peers.find(conn)
        if landing is None or peer is None or peer.engine != landing.ticket.engine:
            self._tally.count("late_notifications")
            return None
        return landing

    def _landed(self, conn: ConnId, reader: RequestId, *, held: bool) -> None:
        landing = self._found(conn, reader)
        if landing is None:
            return
        if landing.state is LandingState.STOPPING:
            self._let_go(landing)  # it had written everything when it heard that we do not want it
        elif landing.state is LandingState.REGISTERED and held:
            landing.on(LandingEvent.LANDED)
            self._tally.count("loads")
            self._end(landing, "")
        elif landing.state is LandingState.REGISTERED:
            self._tally.count("reads_unfenced")
            self._fail(landing, "loads_failed_lease", "its lease was over before everything was written")

    def _stopped(self, conn: ConnId, news: Stopped) -> None:
        landing = self._found(conn, news.reader)
        if landing is None:
            return
        if landing.state is LandingState.STOPPING:
            self._let_go(landing)
        elif landing.state is LandingState.REGISTERED:
            counter = "loads_failed_lease" if news.lapsed else "loads_failed_transfer"
            self._fail(landing, counter, f"P stopped: {news.reason}")

    def _lose(self, landing: _Landing, peer: Peer, now: float) -> None:
        if landing.state is LandingState.WAITING:
            self._fail(landing, "loads_failed_peer", f"{peer.address} is gone: {peer.reason}")
            return
        if landing.state is LandingState.REGISTERED:
            self._tally.count("loads_failed_peer")
            self._borrower.settle(landing.ticket.request, landing.ticket.engine)
            self._results.append(Result(landing.ticket.request, f"{peer.address} is gone: {peer.reason}", lingers=True))
        landing.on(LandingEvent.PEER_LOST)
        landing.look_every, landing.looks = LONG_QUARANTINE if peer.is_silent else QUARANTINE
        landing.look_at = now + landing.look_every

    def _give_up(self, landing: _Landing, counter: str, why: str) -> None:
        """End a landing for our own reasons; P hears that nobody wants the blocks."""
        ticket, was = landing.ticket, landing.state
        if was not in (LandingState.WAITING, LandingState.REGISTERED):
            return
        self._tally.count(counter)
        self._borrower.give_back(ticket.request, ticket.engine)
        if was is LandingState.WAITING:
            landing.on(LandingEvent.FAILED)
            del self._landings[ticket.request]
        else:
            landing.on(LandingEvent.GIVEN_UP)
            if (peer := self._peers.get(ticket.engine)) is not None and peer.state is PeerState.MET:
                self._link.send(peer.conn, Stop((ticket.request,)))
        self._results.append(Result(ticket.request, why, lingers=was is LandingState.REGISTERED))

    def _let_go(self, landing: _Landing) -> None:
        landing.on(LandingEvent.LET_GO)
        del self._landings[landing.ticket.request]
        self._results.append(LetGo(landing.ticket.request))

    def _fail(self, landing: _Landing, counter: str, why: str) -> None:
        landing.on(LandingEvent.FAILED)
        self._tally.count(counter)
        self._end(landing, why)

    def _end(self, landing: _Landing, failure: str) -> None:
        ticket = landing.ticket
        del self._landings[ticket.request]
        self._borrower.settle(ticket.request, ticket.engine)
        self._results.append(Result(ticket.request, failure))
