"""The decode worker's half: read the blocks, and hand them over only if the lease held until the read ended.

A load waits for its peer, reads, asks P whether the read counts, and ends. Its deadline runs from the first moment;
when it passes, the load fails at once, but its blocks must not be used before NIXL has let go of them: a hung peer may
write into them much later.

Where either engine keeps its KV out of NIXL's reach, the load goes through host memory, part by part: room in our own
buffer first, then P stages the part in its own (who has that needs nothing else any more, so nobody waits in a circle),
then it is read, and copied into our cache.
"""

from collections import deque
from collections.abc import Sequence
from math import inf

from xpyd_connector.core.counters import Sample, Tally
from xpyd_connector.core.ids import BlockId, ConnId, CopyId, RequestId, TransferId
from xpyd_connector.core.layout.parts import cut, most_blocks
from xpyd_connector.core.layout.transfer_plan import Stretch
from xpyd_connector.core.messages import Done, Drop, Fenced, RankInfo, Stage, Staged, Unstaged
from xpyd_connector.core.ports import Copied, Ended, Link, LinkEvent, Lost, Mover, Outcome, Received
from xpyd_connector.core.pull.load import UNDER_WAY, Load, LoadEvent, LoadState, Order
from xpyd_connector.core.results import LetGo, Result
from xpyd_connector.core.session.peers import Peer, PeerBook, PeerState
from xpyd_connector.core.staging.host_buffer import Staging
from xpyd_connector.core.staging.slots import Slots
from xpyd_connector.core.transfer.remote_memory import Reach
from xpyd_connector.errors import ConnectorError, IllegalTransition

POLL_INTERVAL = 0.0004  # s between looks at NIXL while something is read
STAGING_PATIENCE = 4  # times the timeout: P stages for others first, and for all of our ranks at once
LINGER_INTERVAL = 0.02  # s between looks while only reads that were given up are in flight: a hung peer may take long


class Reader:
    """Runs on the transfer thread, which owns every NIXL call."""

    def __init__(
        self,
        link: Link,
        mover: Mover,
        peers: PeerBook,
        tally: Tally,
        own: RankInfo,
        *,
        timeout: float,
        staging: Staging[RequestId] | None = None,
    ) -> None:
        self._link = link
        self._mover = mover
        self._peers = peers
        self._tally = tally
        self._own = own
        self._timeout = timeout
        self._staging = staging
        self._groups = 1 + max(region.group for region in own.regions)
        self._reach = Reach(mover, own)
        self._loads: dict[RequestId, Load] = {}
        self._by_flight: dict[TransferId, Load] = {}
        self._by_copy: dict[CopyId, Load] = {}
        self._results: list[Result | LetGo] = []

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, order: Order, *, now: float) -> None:
        """Start a load; its end comes out of :meth:`take_results`.

        All of it takes at most ``timeout``; of one that goes through host memory each step does, but for waiting for
        room there, which others free.
        """
        if order.request in self._loads:
            raise IllegalTransition(f"request {order.request} is loaded twice")
        load = self._loads[order.request] = Load(order, deadline=now + self._timeout)
        self._peers.approach(order.engine, order.address, now=now)
        if self._staging is None:
            self._meet(load, now)
            return
        load.state, load.deadline = LoadState.QUEUED, inf
        try:
            self._staging.slots.ask(order.request, most_blocks(order.stretches, self._own))
        except ConnectorError as exc:
            self._break_off(load, "loads_failed_staging", str(exc))
        else:
            self._give_room(self._staging.slots, now)

    def _give_room(self, slots: Slots[RequestId], now: float) -> None:
        """Let those go on whose turn has come.

        They keep their slots to their end: with several ranks, each with a buffer of its own, loads that gave them back
        and asked again could have each other's.
        """
        while turns := slots.take_granted():  # who fails at once makes room for the next
            for request, granted in turns:
                load = self._loads[request]
                load.on(LoadEvent.ROOM)
                load.slots, load.deadline = granted, now + self._timeout
                self._meet(load, now)

    def _meet(self, load: Load, now: float) -> None:
        """Begin, if the peer has been met; else its answer decides."""
        peer = self._peers.approach(load.order.engine, load.order.address, now=now)
        if peer.state is PeerState.MET:
            self._begin(load, now)
        elif peer.state is PeerState.REFUSED:
            self._fail(load, "loads_failed_handshake", f"{peer.address} was not met: {peer.reason}")

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in what happened on a connection we opened."""
        match event:
            case Received(conn, Fenced(reader, held)):
                self._judge(conn, reader, held=held)
            case Received(conn, Staged(reader, part, groups)):
                if (load := self._asking(conn, reader, part)) is not None:
                    self._read(load, _from_slots(load.parts[0], groups), now)
            case Received(conn, Unstaged(reader, part, reason)):
                if (load := self._asking(conn, reader, part)) is not None:
                    self._tell_dropped(load)
                    self._fail(load, "loads_failed_staging", f"it was not staged: {reason}")
            case Received(conn, _):
                self._link.close(conn)
                self._peer_changed(self._peers.on(Lost(conn, "it broke the protocol"), now=now), now)
            case _:
                self._peer_changed(self._peers.on(event, now=now), now)

    def advance(self, *, now: float) -> float | None:
        """Look at NIXL, at copies and at the deadlines; return when to be called again at the latest."""
        for ended in self._mover.poll():
            self._ended(ended, now)
        if self._staging is not None:
            for copied in self._staging.copier.poll():
                self._copied(copied, now)
        for load in [load for load in self._loads.values() if now >= load.deadline]:
            if load.state is not LoadState.OVER:  # the one before it may have taken it along, with their peer
                self._time_out(load, now)
        if self._staging is not None:
            self._give_room(self._staging.slots, now)  # last: whatever ended above has made room, and nobody wakes us
        self._peers.forget_refused(self._reach, now=now)
        return min((self._due(load, now) for load in self._loads.values()), default=None)

    def take_results(self) -> list[Result | LetGo]:
        """Return what ended since the last call, in order."""
        results, self._results = self._results, []
        return results

    def _due(self, load: Load, now: float) -> float:
        if load.state in UNDER_WAY:
            return now + POLL_INTERVAL
        return now + LINGER_INTERVAL if load.state is LoadState.GIVING_UP else load.deadline

    # ---- the peer

    def _peer_changed(self, peer: Peer | None, now: float) -> None:
        if peer is None:
            return
        loads = [load for load in self._loads.values() if load.order.engine == peer.engine]
        # Those still being given up have met the peer before: NIXL decides when they end, not this meeting.
        waiting = [load for load in loads if load.state is LoadState.WAITING]
        if peer.state is PeerState.MET:
            self._attach(peer, now)
        if peer.state is PeerState.MET:
            for load in waiting:
                self._begin(load, now)
        elif peer.state is PeerState.REFUSED:
            for load in waiting:
                self._fail(load, "loads_failed_handshake", f"{peer.address} was not met: {peer.reason}")
        elif peer.state is PeerState.GONE:
            for load in loads:
                self._give_up(load, "loads_failed_peer", f"{peer.address} is gone: {peer.reason}")
            self._reach.detach(peer.engine)

    def _attach(self, peer: Peer, now: float) -> None:
        """Make a peer's memory readable; a peer whose memory we cannot use is refused."""
        try:
            self._reach.attach(peer.engine, peer.welcome.ranks if peer.welcome is not None else ())
        except ConnectorError as exc:
            self._link.close(peer.conn)
            self._peers.refuse(peer, str(exc), now=now)

    # ---- a part

    def _begin(self, load: Load, now: float) -> None:
        load.parts = deque(cut(load.order.stretches, self._own, self._reach[load.order.engine].theirs))
        self._go_on(load, now)

    def _go_on(self, load: Load, now: float) -> None:
        """Have the next part read; after the last one, ask P whether it all counts."""
        if load.parts:
            self._fetch(load, now)
            return
        load.on(LoadEvent.READ)
        self._extend(load, now)
        order = load.order
        self._tell(load, Done(order.remote_request, order.request, self._own.rank, self._own.ranks))

    def _extend(self, load: Load, now: float) -> None:
        """Give the next step its time; a load that goes from cache to cache has all of it from the start."""
        if self._staging is not None or self._reach[load.order.engine].theirs.staged:
            load.deadline = now + self._timeout

    def _fetch(self, load: Load, now: float) -> None:
        """Have P stage the next part if it must, else read it from P's cache."""
        order, part = load.order, load.parts[0]
        if not self._reach[order.engine].theirs.staged:
            self._read(load, part, now)
            return
        load.on(LoadEvent.ASKED)
        load.deadline = now + STAGING_PATIENCE * self._timeout
        groups: list[tuple[BlockId, ...]] = [()] * self._groups
        for stretch in part:
            groups[stretch.group] = tuple(stretch.remote)
        own = self._own
        self._tell(load, Stage(order.remote_request, order.request, own.rank, own.ranks, load.number, tuple(groups)))

    def _asking(self, conn: ConnId, request: RequestId, part: int) -> Load | None:
        """Return the load that P answers; one that was given up meanwhile, or is another peer's, does not care."""
        load = self._of(conn, request)
        return load if load is not None and load.state is LoadState.ASKING and load.number == part else None

    def _read(self, load: Load, part: Sequence[Stretch], now: float) -> None:
        if self._staging is not None:
            part = [each._replace(local=load.slots[each.group][: len(each.local)]) for each in part]
        try:
            for handle, spans in self._reach[load.order.engine].spans(part):
                flight = self._mover.read(handle, spans)
                load.flights.add(flight)
                self._by_flight[flight] = load
        except ConnectorError as exc:
            self._break_off(load, "loads_failed_transfer", str(exc), LoadEvent.STARTED)
        else:
            load.on(LoadEvent.STARTED)
            self._extend(load, now)

    def _ended(self, ended: Ended, now: float) -> None:
        load = self._by_flight.pop(ended.transfer)
        load.flights.discard(ended.transfer)
        if ended.outcome is Outcome.MOVED:
            self._tally.moved(Sample(ended.seconds, ended.bytes, ended.descriptors, ended.posting))
        if load.state is LoadState.GIVING_UP:
            self._let_go_if_over(load)
        elif ended.outcome is Outcome.FAILED:
            self._break_off(load, "loads_failed_transfer", f"NIXL: {ended.reason}")
        elif not load.flights:
            self._landed(load, now)

    def _landed(self, load: Load, now: float) -> None:
        """A part is here; from our staging buffer it is copied to where it belongs."""
        if self._staging is None:
            self._part_over(load, now)
            return
        load.on(LoadEvent.LANDED)
        blocks: list[Sequence[BlockId]] = [()] * self._groups
        for stretch in load.parts[0]:
            blocks[stretch.group] = stretch.local
        slots = [its[: len(each)] for its, each in zip(load.slots, blocks, strict=True)]
        load.copy = self._staging.copier.into(slots, blocks)
        self._by_copy[load.copy] = load
        load.deadline = now + self._timeout

    def _copied(self, copied: Copied, now: float) -> None:
        load = self._by_copy.pop(copied.copy)
        load.copy = None
        if load.state is LoadState.GIVING_UP:
            self._let_go_if_over(load)
        elif copied.reason:
            self._break_off(load, "loads_failed_staging", f"it was not copied out of host memory: {copied.reason}")
        else:
            self._tally.count("bytes_staged_in", copied.bytes)
            self._part_over(load, now)

    def _part_over(self, load: Load, now: float) -> None:
        load.parts.popleft()
        load.number += 1
        self._go_on(load, now)

    # ---- the end

    def _judge(self, conn: ConnId, request: RequestId, *, held: bool) -> None:
        """Apply P's verdict on one read; a load that was given up meanwhile, or is another peer's, does not care."""
        load = self._of(conn, request)
        if load is None or load.state is not LoadState.CONFIRMING:
            return
        if held:
            load.on(LoadEvent.CONFIRMED)
            self._tally.count("loads")
            self._end(load, "")
        else:
            self._tally.count("reads_unfenced")
            self._fail(load, "loads_failed_lease", "its lease was over before the read ended")

    def _of(self, conn: ConnId, request: RequestId) -> Load | None:
        load, peer = self._loads.get(request), self._peers.find(conn)
        return load if load is not None and peer is not None and peer.engine == load.order.engine else None

    def _time_out(self, load: Load, now: float) -> None:
        """Give up a load, and with it a peer that let a read or a question time out: it does not answer."""
        peer = self._peers.get(load.order.engine)
        hung = load.state in (LoadState.READING, LoadState.CONFIRMING)
        self._give_up(load, "loads_failed_timeout", f"not loaded within {self._timeout:g} s")
        if hung and peer is not None and peer.state is PeerState.MET:
            self._peers.leave(peer, "it does not answer")
            self._peer_changed(peer, now)

    def _give_up(self, load: Load, counter: str, why: str) -> None:
        if load.state is not LoadState.GIVING_UP:
            self._break_off(load, counter, why)

    def _break_off(self, load: Load, counter: str, why: str, before: LoadEvent | None = None) -> None:
        """Fail a load, at once if nothing is written into our memory any more; ``before``: what else happened first."""
        self._tell_dropped(load)
        if not load.is_touched:
            self._fail(load, counter, why)
            return
        if before is not None:
            load.on(before)
        load.on(LoadEvent.CANCELLED)
        load.deadline = inf
        for flight in load.flights:
            self._mover.cancel(flight)
        self._tally.count(counter)
        self._results.append(Result(load.order.request, why, lingers=True))

    def _let_go_if_over(self, load: Load) -> None:
        if load.is_touched:
            return
        load.on(LoadEvent.LET_GO)
        del self._loads[load.order.request]
        self._give_slots_back(load)
        self._results.append(LetGo(load.order.request))

    def _fail(self, load: Load, counter: str, why: str) -> None:
        load.on(LoadEvent.FAILED)
        self._tally.count(counter)
        self._end(load, why)

    def _end(self, load: Load, failure: str) -> None:
        del self._loads[load.order.request]
        self._give_slots_back(load)
        self._results.append(Result(load.order.request, failure))

    def _give_slots_back(self, load: Load) -> None:
        if self._staging is not None:
            self._staging.slots.give_back(load.order.request)

    def _tell_dropped(self, load: Load) -> None:
        self._tell(load, Drop((load.order.remote_request,)))

    def _tell(self, load: Load, message: Stage | Done | Drop) -> None:
        peer = self._peers.get(load.order.engine)
        if peer is not None and peer.state is PeerState.MET:
            self._link.send(peer.conn, message)


def _from_slots(part: Sequence[Stretch], groups: Sequence[Sequence[BlockId]]) -> list[Stretch]:
    """Say that a part's blocks of P are in these slots of P's staging buffer."""
    return [stretch._replace(remote=groups[stretch.group] if stretch.group < len(groups) else ()) for stretch in part]
