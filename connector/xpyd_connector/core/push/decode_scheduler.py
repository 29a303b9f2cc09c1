"""The decode scheduler's half of push: lend blocks to a prefill engine until it has written them, or never will.

A landing ends with P's word: Landed, or Stopped. When we give one up before that (aborted, too late, P silent), the
request is told at once, but its blocks must not be used: P may still write into them. They are ours again when P says
Stopped; or, when its connection closed, after what it had sent on its way must have arrived (:data:`QUARANTINE`).

So what was registered over a connection that ended cannot be registered again. But P closes connections that are idle:
over one that has been quiet for long, a landing is registered when P has answered a heartbeat; if the connection ends
before, P has not heard of the landing, and is met again.

Where the cache is out of NIXL's reach, slots of a host buffer are lent instead, as soon as there are enough, and what
landed in them is copied before the request is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.deadlines import Deadlines
from xpyd_connector.core.ids import Address, ConnId, EngineId, RequestId
from xpyd_connector.core.lease.decode_scheduler import Borrower
from xpyd_connector.core.messages import Alive, Landed, Lent, Memory, Message, RankInfo, Register, Stop, Stopped, Stuck
from xpyd_connector.core.ports import Link
from xpyd_connector.core.results import LetGo, Result
from xpyd_connector.core.session.peers import Peer, PeerBook, PeerState
from xpyd_connector.core.staging.decode_scheduler import Unpacking
from xpyd_connector.core.state_machine import follow
from xpyd_connector.errors import ConnectorError, IllegalTransition

# How long blocks stay out of reach after P's connection closed: (s between looks, looks). Looks, not a span of time: a
# process that was stopped meanwhile must run for a while before what lies in its sockets has been taken in.
QUARANTINE: Final = 0.1, 50  # P's scheduler is dead, its workers follow, and what is left is in our sockets
LONG_QUARANTINE: Final = 10.0, 110  # cut off: TCP sends again for 15 minutes (Linux, tcp_retries2) once the cut mends


class LandingState(Enum):
    """Where a landing is in its life."""

    QUEUED = auto()  # for room in our staging buffer
    WAITING = auto()  # for P to be met, or to answer over a connection that has been quiet for long
    REGISTERED = auto()  # P may write
    STOPPING = auto()  # given up and told so; P may still write until it says Stopped
    QUARANTINED = auto()  # given up, and P is gone: what it sent may still arrive
    COPYING = auto()  # from our staging buffer into the cache
    CEASING = auto()  # given up while it is copied
    OVER = auto()


class LandingEvent(Enum):
    """What can happen to a landing."""

    ROOM = auto()
    REGISTERED = auto()
    STAGED = auto()  # landed in our staging buffer
    LANDED = auto()  # in the cache
    FAILED = auto()  # and P does not write
    GIVEN_UP = auto()
    PEER_LOST = auto()
    LET_GO = auto()


TRANSITIONS: Final[Mapping[LandingState, Mapping[LandingEvent, LandingState]]] = {
    LandingState.QUEUED: {LandingEvent.ROOM: LandingState.WAITING, LandingEvent.FAILED: LandingState.OVER},
    LandingState.WAITING: {
        LandingEvent.REGISTERED: LandingState.REGISTERED,
        LandingEvent.FAILED: LandingState.OVER,
    },
    LandingState.REGISTERED: {
        LandingEvent.STAGED: LandingState.COPYING,
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
    LandingState.COPYING: {
        LandingEvent.LANDED: LandingState.OVER,
        LandingEvent.FAILED: LandingState.OVER,
        LandingEvent.GIVEN_UP: LandingState.CEASING,
    },
    LandingState.CEASING: {LandingEvent.LET_GO: LandingState.OVER},
    LandingState.OVER: {},
}


# What P says or does makes no difference any more, or not yet.
_OURS: Final = (LandingState.QUEUED, LandingState.QUARANTINED, LandingState.COPYING, LandingState.CEASING)


class Ticket(NamedTuple):
    """What the scheduler asks for: the blocks to lend, of each KV cache group."""

    request: RequestId  # ours
    remote_request: RequestId  # the transfer's name
    engine: EngineId
    address: Address
    prompt: str | None  # its digest
    groups: Sequence[Lent]


@dataclass(slots=True)
class _Landing:
    ticket: Ticket
    state: LandingState = LandingState.WAITING
    lent: Sequence[Lent] = ()  # what P may write into: our blocks, or slots
    look_every: float = 0.0  # s; these two only while QUARANTINED
    looks: int = 0

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
        squeeze: float = inf,
        unpacking: Unpacking | None = None,
    ) -> None:
        self._link = link
        self._peers = peers
        self._borrower = borrower
        self._tally = tally
        self._ranks = ranks
        self._timeout = timeout  # s from registering to the KV being there
        self._patience = patience  # s that P may leave a heartbeat unanswered
        self._squeeze = squeeze  # s that a push may keep others waiting for its slots: they may be what it waits for
        self._unpacking = unpacking  # absent unless our cache is out of NIXL's reach
        self._landings: dict[RequestId, _Landing] = {}
        self._by_engine: dict[EngineId, dict[RequestId, None]] = {}  # dicts, because they keep their order
        self._unheard: dict[EngineId, dict[RequestId, None]] = {}  # WAITING for P to answer, in their order
        self._deadlines: Deadlines[RequestId] = Deadlines()  # of those that P is to write; of the quarantined, looks
        self._squeezes: Deadlines[RequestId] = Deadlines()
        self._results: list[Result | LetGo] = []

    def __len__(self) -> int:
        return len(self._landings)

    def expect(self, ticket: Ticket, *, now: float) -> None:
        """Lend blocks to P. What comes of it comes out of :meth:`take_results`."""
        if ticket.request in self._landings:
            raise IllegalTransition(f"request {ticket.request} is registered twice")
        landing = self._landings[ticket.request] = _Landing(ticket, lent=ticket.groups)
        self._by_engine.setdefault(ticket.engine, {})[ticket.request] = None
        if self._unpacking is None:
            self._deadlines.set(ticket.request, now + self._timeout)
            self._approach(landing, now)
            return
        landing.state = LandingState.QUEUED
        try:
            self._unpacking.slots.ask(ticket.request, [len(lent.blocks) for lent in ticket.groups])
        except ConnectorError as exc:
            self._borrower.give_back(ticket.request, ticket.engine)
            self._fail(landing, "loads_failed_staging", str(exc))
        else:
            self._give_room(self._unpacking, now)

    def _give_room(self, unpacking: Unpacking, now: float) -> None:
        for request, groups in unpacking.slots.take_granted():
            landing = self._landings[request]
            landing.on(LandingEvent.ROOM)
            self._deadlines.set(request, now + self._timeout)
            self._squeezes.set(request, now + self._squeeze)
            landing.lent = [
                Lent(lent.start, lent.stop, slots) for lent, slots in zip(landing.lent, groups, strict=True)
            ]
            self._approach(landing, now)

    def _approach(self, landing: _Landing, now: float) -> None:
        ticket = landing.ticket
        peer = self._peers.approach(ticket.engine, ticket.address, now=now)
        if peer.state is PeerState.MET and peer.is_quiet(now=now):
            self._unheard.setdefault(ticket.engine, {})[ticket.request] = None  # the borrower has asked: its renewal
        elif peer.state is PeerState.MET:
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
            case Alive():
                self._heard(conn)
                return False  # the borrower has asked
            case _:
                return False
        return True

    def _heard(self, conn: ConnId) -> None:
        """Register what waited for P to show that it still listens on this connection."""
        if (peer := self._peers.find(conn)) is not None:
            for request in self._unheard.pop(peer.engine, ()):
                self._register(self._landings[request], peer)

    def peer_changed(self, peer: Peer, *, now: float) -> None:
        """A prefill engine was met, could not be, or is gone."""
        self._unheard.pop(peer.engine, None)
        if peer.state is PeerState.MET:
            for rank in self._ranks:
                self._link.send(peer.conn, Memory(rank))
        for landing in [self._landings[request] for request in self._by_engine.get(peer.engine, ())]:
            if landing.state in _OURS:
                continue
            if peer.state is PeerState.MET and landing.state is LandingState.WAITING:
                self._register(landing, peer)
            elif peer.state is PeerState.REFUSED and landing.state is LandingState.WAITING:
                self._fail(landing, "loads_failed_handshake", f"{peer.address} was not met: {peer.reason}")
            elif peer.state is PeerState.GONE:
                self._lose(landing, peer, now)

    def advance(self, *, now: float) -> float | None:
        """Look at the clock; return when to be called again at the latest."""
        if self._unpacking is not None:
            for request, failure in self._unpacking.take_unpacked():
                self._unpacked(self._landings[request], failure)
            self._give_room(self._unpacking, now)
        for request in self._deadlines.take_due(now=now):
            landing = self._landings[request]
            if landing.state is LandingState.QUARANTINED:
                self._look(landing, now)
            else:
                self._give_up(landing, "loads_failed_timeout", f"nothing was written within {self._timeout:g} s")
        for peer in self._asked():
            if now >= (peer.asked_at or 0.0) + self._patience:
                self._give_up_on(peer)
        for request in self._squeezes.take_due(now=now) if self._is_crowded else ():
            why = f"nothing came for {self._squeeze:g} s, and others wait for its slots of host memory"
            self._give_up(self._landings[request], "loads_failed_staging", why)
        dues = [self._deadlines.next(), self._squeezes.next() if self._is_crowded else None]
        dues += [due for peer in self._asked() if (due := (peer.asked_at or 0.0) + self._patience) > now]
        return min((due for due in dues if due is not None), default=None)

    @property
    def _is_crowded(self) -> bool:
        """Whether somebody waits for slots that others have."""
        return self._unpacking is not None and bool(self._unpacking.slots.waiting)

    def _asked(self) -> list[Peer]:
        """Return the peers that owe us an answer, and write to us."""
        peers = [self._peers.get(engine) for engine in self._by_engine]
        return [peer for peer in peers if peer is not None and peer.asked_at is not None]

    def _give_up_on(self, peer: Peer) -> None:
        for request in list(self._by_engine.get(peer.engine, ())):
            if self._landings[request].state in (LandingState.REGISTERED, LandingState.WAITING):
                self._give_up(self._landings[request], "loads_failed_timeout", f"{peer.address} does not answer")

    def take_results(self) -> list[Result | LetGo]:
        """Return what ended since the last call, in order."""
        results, self._results = self._results, []
        return results

    def _look(self, landing: _Landing, now: float) -> None:
        landing.looks -= 1
        if landing.looks:
            self._deadlines.set(landing.ticket.request, now + landing.look_every)
        else:
            self._let_go(landing)

    def _register(self, landing: _Landing, peer: Peer) -> None:
        landing.on(LandingEvent.REGISTERED)
        ticket = landing.ticket
        self._tally.count("registrations_sent")
        self._link.send(
            peer.conn,
            Register(ticket.request, ticket.remote_request, ticket.prompt, tuple(landing.lent)),
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
        elif landing.state is LandingState.REGISTERED and held and self._unpacking is not None:
            landing.on(LandingEvent.STAGED)
            self._run_out(landing)
            self._borrower.settle(reader, landing.ticket.engine)
            slots, blocks = ([lent.blocks for lent in groups] for groups in (landing.lent, landing.ticket.groups))
            self._unpacking.unpack(reader, slots, blocks)
        elif landing.state is LandingState.REGISTERED and held:
            self._succeed(landing)
        elif landing.state is LandingState.REGISTERED:
            self._tally.count("reads_unfenced")
            self._fail(landing, "loads_failed_lease", "its lease was over before everything was written")

    def _unpacked(self, landing: _Landing, failure: str) -> None:
        if landing.state is LandingState.CEASING:
            self._let_go(landing)
        elif failure:
            self._fail(landing, "loads_failed_staging", f"it was not copied out of host memory: {failure}")
        else:
            self._succeed(landing)

    def _succeed(self, landing: _Landing) -> None:
        landing.on(LandingEvent.LANDED)
        self._tally.count("loads")
        self._end(landing, "")

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
        if landing.state is LandingState.WAITING:  # once: over a new connection it is registered at once
            self._tally.count("registrations_reconnected")
            self._approach(landing, now)
            return
        if landing.state is LandingState.REGISTERED:
            self._tally.count("loads_failed_peer")
            self._borrower.settle(landing.ticket.request, landing.ticket.engine)
            self._report(landing, f"{peer.address} is gone: {peer.reason}")
        landing.on(LandingEvent.PEER_LOST)
        landing.look_every, landing.looks = LONG_QUARANTINE if peer.is_silent else QUARANTINE
        self._deadlines.set(landing.ticket.request, now + landing.look_every)
        self._squeezes.discard(landing.ticket.request)

    def _give_up(self, landing: _Landing, counter: str, why: str) -> None:
        """End a landing for our own reasons; P hears that nobody wants the blocks."""
        ticket, was = landing.ticket, landing.state
        if was in (LandingState.STOPPING, LandingState.QUARANTINED, LandingState.CEASING):
            return
        if was in (LandingState.QUEUED, LandingState.WAITING):
            self._borrower.give_back(ticket.request, ticket.engine)
            self._fail(landing, counter, why)
            return
        self._tally.count(counter)
        landing.on(LandingEvent.GIVEN_UP)
        self._run_out(landing)
        self._report(landing, why)
        self._borrower.give_back(ticket.request, ticket.engine)
        peer = self._peers.get(ticket.engine)
        if was is LandingState.REGISTERED and peer is not None and peer.state is PeerState.MET:
            self._link.send(peer.conn, Stop((ticket.request,)))

    def _report(self, landing: _Landing, failure: str) -> None:
        """Tell that a landing has failed whose memory is still written into: of a staged one, that is no block yet."""
        lingers = self._unpacking is None or landing.state is LandingState.CEASING
        self._results.append(Result(landing.ticket.request, failure, lingers=lingers))

    def _let_go(self, landing: _Landing) -> None:
        if self._unpacking is None or landing.state is LandingState.CEASING:
            self._results.append(LetGo(landing.ticket.request))
        landing.on(LandingEvent.LET_GO)
        self._forget(landing)

    def _forget(self, landing: _Landing) -> None:
        ticket = landing.ticket
        del self._landings[ticket.request], self._by_engine[ticket.engine][ticket.request]
        if not self._by_engine[ticket.engine]:
            del self._by_engine[ticket.engine]
        self._unheard.get(ticket.engine, {}).pop(ticket.request, None)
        self._run_out(landing)
        if self._unpacking is not None:
            self._unpacking.slots.give_back(ticket.request)

    def _run_out(self, landing: _Landing) -> None:
        """Nothing is waited for any more but what P, or a copy, tells."""
        self._deadlines.discard(landing.ticket.request)
        self._squeezes.discard(landing.ticket.request)

    def _fail(self, landing: _Landing, counter: str, why: str) -> None:
        landing.on(LandingEvent.FAILED)
        self._tally.count(counter)
        self._end(landing, why)

    def _end(self, landing: _Landing, failure: str) -> None:
        ticket = landing.ticket
        self._forget(landing)
        self._borrower.settle(ticket.request, ticket.engine)
        self._results.append(Result(ticket.request, failure))
