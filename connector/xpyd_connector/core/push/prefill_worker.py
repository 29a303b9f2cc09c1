"""The prefill worker's half of push: write blocks into decode engines as far as they are computed.

What is computed comes from the engine, step by step; who wants it comes from the scheduler process, over a connection
of our own, so that neither waits for an engine step. Whichever comes first waits for the other here.

Only blocks that nobody can change any more are written: a step that follows has the later ones. A prefill that is
preempted starts again as another ``attempt``; what the first one wrote is written over, once it is out of the way.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import lcm

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.ids import BlockId, ConnId, EngineAt, RequestId
from xpyd_connector.core.layout.parts import block_sizes, cut
from xpyd_connector.core.layout.transfer_plan import Stretch, check_shapes, push_route, served_ranks
from xpyd_connector.core.messages import (
    MAX_REASON,
    Arrived,
    Assign,
    Attend,
    Cease,
    Ceased,
    Departed,
    Lent,
    Message,
    RankInfo,
    Stalled,
    Written,
)
from xpyd_connector.core.ports import Link, LinkEvent, Mover, Received
from xpyd_connector.core.push.push_job import Gone, Guest, Piece, Source, Writing, WritingEvent, WritingState
from xpyd_connector.core.session.scheduler_link import Home
from xpyd_connector.core.staging.host_buffer import Staging
from xpyd_connector.core.transfer.remote_memory import Way
from xpyd_connector.core.transfer.transfers import POLL_INTERVAL, ParcelId, Shipped, Shipping
from xpyd_connector.errors import ConnectorError


class Writer:
    """Runs on the transfer thread, which owns every NIXL call."""

    def __init__(
        self,
        link: Link,
        mover: Mover,
        tally: Tally,
        own: RankInfo,
        *,
        home: EngineAt,
        token: bytes,
        timeout: float,
        staging: Staging[ParcelId] | None = None,
    ) -> None:
        self._link = link
        self._mover = mover
        self._tally = tally
        self._own = own
        self._home = Home(link, home, Attend(own.rank, token))
        self._timeout = timeout
        self._shipping = Shipping(mover, tally, timeout=timeout, staging=staging)
        self._sources: dict[RequestId, Source] = {}
        self._guests: dict[ConnId, Guest] = {}
        self._writings: dict[tuple[ConnId, RequestId], Writing] = {}
        self._by_request: dict[RequestId, list[Writing]] = {}  # the same, by the name of the transfer
        self._by_parcel: dict[ParcelId, Writing] = {}
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
            case Received(_, message):
                self._told(message, now)
            case _ if self._home.on(event, now=now):
                self._orphaned()
            case _:
                pass

    def advance(self, *, now: float) -> float | None:
        """Look at NIXL and at the clock; return when to be called again at the latest."""
        call_at = self._home.advance(now=now)
        while self._unready and self._unready[0][1]():
            self._accept(self._unready.popleft()[0], now)
        for shipped in self._shipping.advance(now=now):
            self._shipped(shipped, now)
        for parcel in self._shipping.overdue(now=now):
            self._stall(self._by_parcel[parcel])
        dues = [call_at, now + POLL_INTERVAL if self._unready else None, self._shipping.due(now=now)]
        return min((due for due in dues if due is not None), default=None)

    def _orphaned(self) -> None:
        """Our scheduler is gone, and the engine with it, or it comes back: then it tells us again whom to write to."""
        self._tally.count("peers_lost")
        for guest in list(self._guests):
            self._depart(guest)

    def _told(self, message: Message, now: float) -> None:
        match message:
            case Arrived(guest, rank):
                self._attach(self._guests.setdefault(guest, Guest()), rank)
            case Assign(guest, order) if guest in self._guests and (guest, order.reader) not in self._writings:
                writing = self._writings[guest, order.reader] = Writing(guest, order)
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

    def _attach(self, guest: Guest, theirs: RankInfo) -> None:
        guest.rank = theirs
        try:
            check_shapes(self._own, theirs)
            if theirs.rank not in guest.ways and theirs.rank in served_ranks(self._own, theirs.ranks):
                guest.ways[theirs.rank] = Way(self._mover.attach(theirs), push_route(self._own, theirs))
        except ConnectorError as exc:
            self._tally.count("handshakes_failed")
            guest.objection = str(exc)

    def _accept(self, news: Piece | Gone, now: float) -> None:
        match news:
            case Piece():
                self._add(news, now)
            case Gone(request):
                self._sources.pop(request, None)
                for writing in list(self._by_request.get(request, ())):
                    if writing.sent or writing.parcels:  # else it waits for the name's next use
                        self._stop(writing, "the prefill engine does not hold the blocks any more")

    def _add(self, piece: Piece, now: float) -> None:
        source = self._sources.get(piece.request)
        if source is None or source.attempt != piece.attempt:
            groups: list[list[BlockId]] = [[] for _ in piece.groups]
            source = self._sources[piece.request] = Source(piece.prompt, piece.attempt, groups)
        for known, new in zip(source.groups, piece.groups, strict=True):
            known += new
        source.tokens, source.complete = piece.tokens, piece.last
        for writing in list(self._by_request.get(piece.request, ())):
            self._pump(writing, now)

    def _depart(self, guest: ConnId) -> None:
        for writing in [w for w in self._writings.values() if w.guest == guest]:
            writing.mute = True
            self._stop(writing, "the decode engine is gone")
        for way in self._guests.pop(guest).ways.values():
            self._mover.detach(way.handle)

    def _pump(self, writing: Writing, now: float) -> None:
        """Write what is computed and not written; tell when that was all.

        A push is complete only when its prefill is: until then the prefill may be preempted, and its blocks another's.
        """
        source = self._sources.get(writing.order.request)
        if writing.is_over or source is None:
            return
        if reason := self._objection(writing, source):
            self._stop(writing, reason)
            return
        if writing.attempt != source.attempt:
            if writing.parcels:
                return  # what the attempt before has sent must not arrive after what this one sends
            writing.attempt, writing.sent = source.attempt, 0
        until = self._writable(writing, source)
        if writing.sent < until:
            self._post(writing, source, until, now)
        self._complete_if_written(writing, source)

    def _complete_if_written(self, writing: Writing, source: Source) -> None:
        if writing.is_over or not source.complete or writing.parcels:
            return
        writing.on(WritingEvent.COMPLETED)
        self._tally.count("pushes")
        self._end(writing, Written(writing.guest, writing.order.reader))

    def _writable(self, writing: Writing, source: Source) -> int:
        """Return up to which token the blocks, ours and the guest's, are complete: nothing is written twice."""
        if source.complete:
            return max(lent.stop for lent in writing.order.groups)
        step = lcm(*self._block_sizes(writing))
        return source.tokens // step * step

    def _block_sizes(self, writing: Writing) -> list[int]:
        theirs = self._guests[writing.guest].rank
        ranks = (self._own,) if theirs is None else (self._own, theirs)
        return [size for rank in ranks for size in block_sizes(rank).values()]

    def _objection(self, writing: Writing, source: Source) -> str:
        order, wanted = writing.order, max(lent.stop for lent in writing.order.groups)
        if self._guests[writing.guest].objection:
            return self._guests[writing.guest].objection
        if order.prompt is None and source.prompt is not None:
            return f"transfer {order.request} was registered without its prompt's digest"
        if order.prompt != source.prompt:
            return f"transfer {order.request} belongs to another prompt"
        if len(order.groups) != len(source.groups):
            return f"it registers {len(order.groups)} KV cache groups, there are {len(source.groups)}"
        if source.complete and source.tokens < wanted:
            return f"transfer {order.request} has {source.tokens} tokens, {wanted} are wanted"
        return ""

    def _post(self, writing: Writing, source: Source, until: int, now: float) -> None:
        """Write everything from where we were to ``until``."""
        guest, sent = self._guests[writing.guest], writing.sent
        writing.sent = until
        if guest.rank is None or not guest.ways:
            return  # other ranks of ours keep the same heads
        sizes, theirs = block_sizes(self._own), block_sizes(guest.rank)
        stretches = [
            _stretch(group, lent, (sent, until), source.groups[group], (sizes[group], theirs[group]))
            for group, lent in enumerate(writing.order.groups)
        ]
        try:
            for part in cut([each for each in stretches if each.start < each.stop], self._own, guest.rank):
                parcel = self._shipping.send(tuple(guest.ways.values()), part, now=now)
                writing.parcels.add(parcel)
                self._by_parcel[parcel] = writing
        except ConnectorError as exc:
            self._stop(writing, str(exc))

    def _shipped(self, shipped: Shipped, now: float) -> None:
        writing = self._by_parcel.pop(shipped.parcel)
        writing.parcels.discard(shipped.parcel)
        if writing.state is WritingState.CEASING:
            self._cease_if_quiet(writing)
        elif shipped.failure:
            self._stop(writing, shipped.failure)
        else:
            self._pump(writing, now)

    def _stall(self, writing: Writing) -> None:
        if writing.state is not WritingState.OPEN:
            return
        reason = f"a write did not end within {self._timeout:g} s"
        if not writing.mute:
            self._home.say(Stalled(writing.guest, writing.order.reader, reason))
        self._stop(writing, reason)

    def _stop(self, writing: Writing, reason: str) -> None:
        if writing.state is WritingState.CEASING:
            self._cease_if_quiet(writing)
            return
        writing.on(WritingEvent.STOPPED)
        writing.reason = reason
        for parcel in list(writing.parcels):
            self._shipping.cancel(parcel, reason)
        self._cease_if_quiet(writing)

    def _cease_if_quiet(self, writing: Writing) -> None:
        if writing.parcels:
            return
        writing.on(WritingEvent.QUIET)
        self._tally.count("pushes_ceased")
        self._end(writing, Ceased(writing.guest, writing.order.reader, writing.reason[:MAX_REASON]))

    def _end(self, writing: Writing, news: Written | Ceased) -> None:
        del self._writings[writing.guest, writing.order.reader]
        self._by_request[writing.order.request].remove(writing)
        if not self._by_request[writing.order.request]:
            del self._by_request[writing.order.request]
        if not writing.mute:
            self._home.say(news)


def _stretch(
    group: int, lent: Lent, span: tuple[int, int], blocks: Sequence[BlockId], sizes: tuple[int, int]
) -> Stretch:
    """Return what is to be written of a group between two tokens, and the blocks it is in, of our size and theirs."""
    start, stop = max(lent.start, span[0]), min(lent.stop, span[1])
    ours, theirs = sizes
    first = lent.start // theirs
    remote = lent.blocks[start // theirs - first : -(-stop // theirs) - first]
    return Stretch(group, start, stop, remote, blocks[start // ours : -(-stop // ours)])
