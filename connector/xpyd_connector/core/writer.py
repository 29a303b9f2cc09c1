"""The prefill worker's half of push: write blocks into decode engines as far as they are computed.

What is computed comes from the engine, step by step; who wants it comes from the scheduler process, over a connection
of our own, so that neither waits for an engine step. Whichever comes first waits for the other here.

Only blocks that nobody can change any more are written: a step that follows has the later ones. A prefill that is
preempted starts again as another ``attempt``; what the first one wrote is written over, once it is out of the way.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from xpyd_connector.core.ids import Address, BlockId, ConnId, RequestId, TransferId
from xpyd_connector.core.lives import follow
from xpyd_connector.core.messages import (
    MAX_REASON,
    Arrived,
    Assign,
    Attend,
    Cease,
    Ceased,
    Departed,
    Message,
    RankInfo,
    Register,
    Stalled,
    Written,
)
from xpyd_connector.core.plan import check_regions, describe
from xpyd_connector.core.ports import Ended, Failed, Link, LinkEvent, Lost, Met, Mover, Outcome, Received
from xpyd_connector.core.tally import Sample, Tally
from xpyd_connector.errors import ConnectorError

POLL_INTERVAL = 0.0004  # s between looks at NIXL while something is written
LINGER_INTERVAL = 0.02  # s between looks while only writes that were given up are in flight
HOME_RETRY = 0.2  # s before our own scheduler, which starts to listen after us, is called again


class Piece(NamedTuple):
    """Blocks of a prompt that a step of the engine has completed, in token order after those of earlier pieces."""

    request: RequestId  # the transfer's name
    prompt: str | None  # its digest
    attempt: int  # grows when the prefill starts again: what came before is void
    blocks: Sequence[BlockId]
    last: bool  # the prompt is complete


class Gone(NamedTuple):
    """A transfer is over, or its prefill was: its blocks are not to be read any more, and its name may come again.

    It comes with the engine's steps, as the pieces do, and so never before them.
    """

    request: RequestId


class WritingState(Enum):
    """Where a push to one reader is in its life, on one worker."""

    OPEN = auto()
    CEASING = auto()  # nothing more is written; waits for what is in flight
    OVER = auto()


class WritingEvent(Enum):
    """What can happen to it."""

    COMPLETED = auto()
    STOPPED = auto()
    QUIET = auto()  # nothing is in flight any more


TRANSITIONS: Final[Mapping[WritingState, Mapping[WritingEvent, WritingState]]] = {
    WritingState.OPEN: {
        WritingEvent.COMPLETED: WritingState.OVER,
        WritingEvent.STOPPED: WritingState.CEASING,
    },
    WritingState.CEASING: {WritingEvent.QUIET: WritingState.OVER},
    WritingState.OVER: {},
}


@dataclass(slots=True)
class _Source:
    """One prompt, as far as it is computed here."""

    prompt: str | None
    attempt: int
    blocks: list[BlockId] = field(default_factory=list[BlockId])
    complete: bool = False


@dataclass(slots=True)
class _Writing:
    guest: ConnId
    order: Register
    state: WritingState = WritingState.OPEN
    attempt: int = 0
    sent: int = 0  # number of the prompt's first block that is not written yet
    flights: dict[TransferId, float] = field(default_factory=dict[TransferId, float])  # -> when it must have ended
    reason: str = ""  # why it ceases
    mute: bool = False  # the guest is gone: nobody to tell

    def on(self, event: WritingEvent) -> None:
        self.state = follow(TRANSITIONS, self.state, event, f"the push to {self.order.reader}")


@dataclass(slots=True)
class _Guest:
    """A decode engine's rank we write to; without a handle, its memory cannot be used."""

    handle: str
    rank: RankInfo
    objection: str = ""


class Writer:
    """Runs on the transfer thread, which owns every NIXL call."""

    def __init__(
        self, link: Link, mover: Mover, tally: Tally, own: RankInfo, *, home: Address, token: bytes, timeout: float
    ) -> None:
        self._link = link
        self._mover = mover
        self._tally = tally
        self._own = own
        self._home = home
        self._token = token
        self._timeout = timeout
        self._call_at: float | None = 0.0  # when to call our scheduler; absent while we are connected, or connecting
        self._conn: ConnId | None = None
        self._sources: dict[RequestId, _Source] = {}
        self._guests: dict[ConnId, _Guest] = {}
        self._writings: dict[tuple[ConnId, RequestId], _Writing] = {}
        self._by_request: dict[RequestId, list[_Writing]] = {}  # the same, by the name of the transfer
        self._by_flight: dict[TransferId, _Writing] = {}
        self._unready: deque[tuple[Piece | Gone, Callable[[], bool]]] = deque()

    def __len__(self) -> int:
        return len(self._sources) + len(self._writings) + len(self._guests)

    def offer(self, news: Piece | Gone, *, now: float, ready: Callable[[], bool] | None = None) -> None:
        """Hear what the engine has completed; ``ready`` tells when its device has really written it."""
        if ready is None and not self._unready:
            self._accept(news, now)
        else:
            self._unready.append((news, ready or (lambda: True)))

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in what our scheduler says."""
        match event:
            case Met(conn, _):
                self._conn = conn
                self._link.send(conn, Attend(self._own.rank, self._token))
            case Failed():
                self._call_at = now + HOME_RETRY
            case Lost():
                self._orphaned(now)
            case Received(_, message):
                self._told(message, now)

    def advance(self, *, now: float) -> float | None:
        """Look at NIXL and at the clock; return when to be called again at the latest."""
        if self._call_at is not None and now >= self._call_at:
            self._call_at = None
            self._link.meet(self._home)
        while self._unready and self._unready[0][1]():
            self._accept(self._unready.popleft()[0], now)
        for ended in self._mover.poll():
            self._ended(ended, now)
        for writing in self._overdue(now):
            self._stall(writing)
        return min((due for due in self._dues(now) if due is not None), default=None)

    def _overdue(self, now: float) -> list[_Writing]:
        """Return what has a flight that should have ended; many more may wait for their prefill, and have none."""
        return [writing for flight, writing in self._by_flight.items() if now >= writing.flights[flight]]

    def _dues(self, now: float) -> list[float | None]:
        is_busy = self._unready or any(writing.state is WritingState.OPEN for writing in self._by_flight.values())
        return [
            self._call_at,
            now + POLL_INTERVAL if is_busy else None,
            now + LINGER_INTERVAL if self._by_flight else None,
        ]

    def _orphaned(self, now: float) -> None:
        """Our scheduler is gone, and the engine with it, or it comes back: then it tells us again whom to write to."""
        self._tally.count("peers_lost")
        self._conn, self._call_at = None, now + HOME_RETRY
        for guest in list(self._guests):
            self._depart(guest)

    def _told(self, message: Message, now: float) -> None:
        match message:
            case Arrived(guest, rank):
                self._guests[guest] = self._attach(rank)
            case Assign(guest, order) if guest in self._guests and (guest, order.reader) not in self._writings:
                writing = self._writings[guest, order.reader] = _Writing(guest, order, sent=order.first)
                self._by_request.setdefault(order.request, []).append(writing)
                self._pump(writing, now)
            case Assign(guest, order) if (guest, order.reader) in self._writings:
                self._writings[guest, order.reader].mute = False  # our scheduler is back and waits for its end
            case Cease(guest, reader) if (guest, reader) in self._writings:
                self._stop(self._writings[guest, reader], "")
            case Departed(guest) if guest in self._guests:
                self._depart(guest)
            case _:
                self._tally.count("late_notifications")

    def _attach(self, theirs: RankInfo) -> _Guest:
        try:
            check_regions(self._own.regions, theirs.regions)
            return _Guest(self._mover.attach(theirs), theirs)
        except ConnectorError as exc:
            self._tally.count("handshakes_failed")
            return _Guest("", theirs, str(exc))

    def _accept(self, news: Piece | Gone, now: float) -> None:
        match news:
            case Piece():
                self._add(news, now)
            case Gone(request):
                self._sources.pop(request, None)
                for writing in list(self._by_request.get(request, ())):
                    if writing.sent > writing.order.first or writing.flights:  # else it waits for the name's next use
                        self._stop(writing, "the prefill engine does not hold the blocks any more")

    def _add(self, piece: Piece, now: float) -> None:
        source = self._sources.get(piece.request)
        if source is None or source.attempt != piece.attempt:
            source = self._sources[piece.request] = _Source(piece.prompt, piece.attempt)
        source.blocks += piece.blocks
        source.complete = piece.last
        for writing in list(self._by_request.get(piece.request, ())):
            self._pump(writing, now)

    def _depart(self, guest: ConnId) -> None:
        for writing in [w for w in self._writings.values() if w.guest == guest]:
            writing.mute = True
            self._stop(writing, "the decode engine is gone")
        if handle := self._guests.pop(guest).handle:
            self._mover.detach(handle)

    def _pump(self, writing: _Writing, now: float) -> None:
        """Write what is computed and not written; tell when that was all.

        A push is complete only when its prefill is: until then the prefill may be preempted, and its blocks another's.
        """
        source = self._sources.get(writing.order.request)
        if writing.state is not WritingState.OPEN or source is None:
            return
        if reason := self._objection(writing, source):
            self._stop(writing, reason)
            return
        if writing.attempt != source.attempt:
            if writing.flights:
                return  # what the attempt before has sent must not arrive after what this one sends
            writing.attempt, writing.sent = source.attempt, writing.order.first
        end = writing.order.first + len(writing.order.blocks)
        computed = min(len(source.blocks), end)
        if writing.sent < computed:
            self._post(writing, source, computed, now)
        elif source.complete and writing.sent == end and not writing.flights:
            writing.on(WritingEvent.COMPLETED)
            self._tally.count("pushes")
            self._end(writing, Written(writing.guest, writing.order.reader))

    def _objection(self, writing: _Writing, source: _Source) -> str:
        order = writing.order
        if self._guests[writing.guest].objection:
            return self._guests[writing.guest].objection
        if order.prompt is not None and source.prompt is not None and order.prompt != source.prompt:
            return f"transfer {order.request} belongs to another prompt"
        if source.complete and len(source.blocks) < order.first + len(order.blocks):
            return (
                f"transfer {order.request} has {len(source.blocks)} blocks, "
                f"{order.first + len(order.blocks)} are wanted"
            )
        return ""

    def _post(self, writing: _Writing, source: _Source, until: int, now: float) -> None:
        guest, first = self._guests[writing.guest], writing.order.first
        try:
            local = describe(self._own.regions, source.blocks[writing.sent : until])
            remote = describe(guest.rank.regions, writing.order.blocks[writing.sent - first : until - first])
            flight = self._mover.write(guest.handle, remote, local)
        except ConnectorError as exc:
            self._stop(writing, str(exc))
        else:
            writing.flights[flight] = now + self._timeout
            writing.sent = until
            self._by_flight[flight] = writing

    def _ended(self, ended: Ended, now: float) -> None:
        writing = self._by_flight.pop(ended.transfer)
        del writing.flights[ended.transfer]
        if ended.outcome is Outcome.MOVED:
            self._tally.moved(Sample(ended.seconds, ended.bytes, ended.descriptors))
        if writing.state is WritingState.CEASING:
            self._cease_if_quiet(writing)
        elif ended.outcome is Outcome.FAILED:
            self._stop(writing, f"NIXL: {ended.reason}")
        else:
            self._pump(writing, now)

    def _stall(self, writing: _Writing) -> None:
        if writing.state is not WritingState.OPEN:
            return
        reason = f"a write did not end within {self._timeout:g} s"
        if not writing.mute:
            self._say(Stalled(writing.guest, writing.order.reader, reason))
        self._stop(writing, reason)

    def _stop(self, writing: _Writing, reason: str) -> None:
        if writing.state is WritingState.CEASING:
            self._cease_if_quiet(writing)
            return
        writing.on(WritingEvent.STOPPED)
        writing.reason = reason
        for flight in writing.flights:
            self._mover.cancel(flight)
        self._cease_if_quiet(writing)

    def _cease_if_quiet(self, writing: _Writing) -> None:
        if writing.flights:
            return
        writing.on(WritingEvent.QUIET)
        self._tally.count("pushes_ceased")
        self._end(writing, Ceased(writing.guest, writing.order.reader, writing.reason[:MAX_REASON]))

    def _end(self, writing: _Writing, news: Written | Ceased) -> None:
        del self._writings[writing.guest, writing.order.reader]
        self._by_request[writing.order.request].remove(writing)
        if not self._by_request[writing.order.request]:
            del self._by_request[writing.order.request]
        if not writing.mute:
            self._say(news)

    def _say(self, message: Message) -> None:
        if self._conn is not None:
            self._link.send(self._conn, message)
