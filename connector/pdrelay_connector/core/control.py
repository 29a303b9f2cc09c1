"""The control thread of a scheduler process: each event of its link goes to one object."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol, TypeAlias

from pdrelay_connector.core.cached_prefix.decode_scheduler import PrefixLender, PrefixLookup
from pdrelay_connector.core.cached_prefix.prefill_scheduler import PrefixFinder, SearchEnded
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.deadlines import earliest
from pdrelay_connector.core.ids import ConnId, RequestId
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.lease_table import LeaseEnded
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager, RevocableLease
from pdrelay_connector.core.messages import (
    FindPrefix,
    Objection,
    PrefixFound,
    Reachable,
    ReadDone,
    ReadsStarted,
)
from pdrelay_connector.core.ports import LinkEvent, MessageReceived
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from pdrelay_connector.core.results import (
    BlocksReleased,
    FellAsleep,
    HandshakeEnded,
    LeaseLost,
    LoadResult,
    NumbersDue,
    PeerLost,
)
from pdrelay_connector.core.session.peers import Peer, PeerState, PeerTable
from pdrelay_connector.core.sleep import Sleep, SleepEvent, SleepState
from pdrelay_connector.core.staging.decode_scheduler import StagingReceiver
from pdrelay_connector.core.staging.prefill_scheduler import StagingCoordinator

ControlResult: TypeAlias = (
    LeaseEnded
    | LoadResult
    | BlocksReleased
    | LeaseLost
    | HandshakeEnded
    | PeerLost
    | SearchEnded
    | PrefixLookup
    | NumbersDue
    | FellAsleep
)
PUBLISH_AFTER = 1.0  # s that numbers wait for a step that the engine makes anyway
LOOK_EVERY = 0.02  # s between two looks whether an engine that is to sleep may
ASLEEP = (
    "this engine sleeps: its KV cache is put away, and it hands over and takes in nothing until it "
    "wakes"
)


class _Part(Protocol):
    def advance(self, *, now: float) -> float | None:
        """Do what is due; return when to be called again at the latest, None for never."""
        ...


class ControlPlane:
    """Connections that we opened belong to the decode role, all others to the prefill role.

    Push adds a coordinator to the prefill role and a receiver to the decode role; staging adds one
    object to each.
    """

    def __init__(
        self,
        lease_manager: LeaseManager,
        lease_renewer: LeaseRenewer,
        peers: PeerTable,
        counters: Counters,
        *,
        push_coordinator: PushCoordinator | None = None,
        push_receiver: PushReceiver | None = None,
        staging_coordinator: StagingCoordinator | None = None,
        staging_receiver: StagingReceiver | None = None,
        prefix_finder: PrefixFinder | None = None,
        prefix_lender: PrefixLender | None = None,
        takes_reads: bool = False,
        has_numbers: Callable[[], bool] = lambda: False,
        close_all: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``takes_reads``: other engines may read this one's blocks, although it pushes.

        ``has_numbers``: whether there are counts that no step of the engine has collected yet.
        ``close_all`` closes all connections, and refuses new ones, for a reason.
        """
        self._sleep = Sleep()
        self._close_all = close_all
        self._sleep_by = inf  # when this engine must be asleep, or stays awake
        self._fell_asleep: list[FellAsleep] = []
        self.lease_manager = lease_manager
        lease_manager.on_lost = self._connection_lost
        self.lease_renewer = lease_renewer
        self.counters = counters
        self._push_coordinator = push_coordinator
        self._push_receiver = push_receiver
        self._staging_coordinator = staging_coordinator
        self._staging_receiver = staging_receiver
        self._prefix_finder = prefix_finder
        self._prefix_lender = prefix_lender
        parts = (
            lease_manager,
            lease_renewer,
            push_coordinator,
            staging_coordinator,
            push_receiver,
            prefix_finder,
            prefix_lender,
        )
        self._parts: Sequence[_Part] = [part for part in parts if part is not None]
        self._takes_reads = takes_reads or prefix_lender is not None
        self._peers = peers
        self._has_numbers = has_numbers
        self._publish_at: float | None = None  # absent while there are no numbers
        self._are_numbers_due = False

    @property
    def push_coordinator(self) -> PushCoordinator:
        """The prefill role of push."""
        if self._push_coordinator is None:
            raise RuntimeError("this engine does not push")
        return self._push_coordinator

    @property
    def push_receiver(self) -> PushReceiver:
        """The decode role of push."""
        if self._push_receiver is None:
            raise RuntimeError("no engine pushes to this engine")
        return self._push_receiver

    @property
    def prefix_finder(self) -> PrefixFinder:
        """The finder of an engine that reads KV from others' prefix caches."""
        if self._prefix_finder is None:
            raise RuntimeError("this engine asks no other for cached blocks")
        return self._prefix_finder

    @property
    def prefix_lender(self) -> PrefixLender:
        """The lender of an engine that lends blocks of its prefix cache."""
        if self._prefix_lender is None:
            raise RuntimeError("this engine lends no cached blocks")
        return self._prefix_lender

    def grant(
        self, request: RequestId, *, now: float, sampled: bool = False, pushed: bool = True
    ) -> None:
        """Lease the blocks of a finished prefill; if ``sampled``, checksums follow, in pull.

        ``pushed``: they are written into a decode engine's cache, if this engine pushes; else that
            reads them.
        """
        self.lease_manager.grant(request, now=now, sampled=sampled)
        if self._push_coordinator is not None and pushed:
            self._push_coordinator.granted(request, now=now)

    def abandon(self, requests: Sequence[RequestId]) -> None:
        """End leases whose blocks no engine will read."""
        self.lease_manager.drop(requests)

    def revoke(self, candidates: Sequence[RevocableLease], blocks: int, *, now: float) -> None:
        """Revoke unread leases in the given order until so many blocks are free."""
        self.lease_manager.revoke(candidates, blocks, now=now, is_busy=self._is_busy)

    def fall_asleep(self, *, until: float) -> None:
        """Begin nothing, and end what is under way: the engine's memory is about to go away.

        :class:`~pdrelay_connector.core.results.FellAsleep` follows. If it may go, this control
        plane refuses everybody from then on; another one belongs to the engine that wakes.
        ``until``: when it stays.
        """
        self._sleep.on(SleepEvent.SLEEP_ORDERED)
        self._sleep_by = until
        self.lease_manager.revoke_all()
        self.lease_renewer.give_up()

    def _doze(self, now: float) -> float | None:
        """Close all connections once nothing uses this engine's memory; return when to look."""
        if self._sleep.state is not SleepState.FALLING_ASLEEP:
            return None
        reason = "this engine goes to sleep"
        if self._push_coordinator is not None:
            self._push_coordinator.give_up(reason, now=now)
        if self._push_receiver is not None:
            self._push_receiver.give_up(reason)
        if self._prefix_finder is not None:
            self._prefix_finder.give_up()
        user = self._user_of_memory(now)
        if user and now < self._sleep_by:
            return now + LOOK_EVERY
        self._sleep.on(SleepEvent.OVERDUE if user else SleepEvent.DRAINED)
        self._fell_asleep.append(FellAsleep(user))
        if not user:
            self._close_all(ASLEEP)
        return None

    def _user_of_memory(self, now: float) -> str:
        """Say who may still read this engine's memory, or write into it, or into another's with it;
        "" if nobody.
        """
        if self._push_receiver is not None and len(self._push_receiver):
            return f"{len(self._push_receiver)} pushes of other engines may still be written into its cache"
        if self._push_coordinator is not None and self._push_coordinator.may_write:
            return "its workers still write into another engine's cache"
        if self._staging_coordinator is not None and self._staging_coordinator.is_copying:
            return "its workers still copy parts of its cache into host memory"
        is_read = self.lease_manager.leases.has_late_reads(now=now)
        return "another engine still reads its cache" if is_read else ""

    def _is_busy(self, request: RequestId) -> bool:
        is_written = self._push_coordinator is not None and self._push_coordinator.is_writing(
            request
        )
        return is_written or (
            self._staging_coordinator is not None and self._staging_coordinator.is_reading(request)
        )

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Handle an event."""
        if self._peers.find(event.conn) is not None:
            self._on_ours(event, now)
            return
        if isinstance(event, MessageReceived) and isinstance(event.message, Objection):
            self.lease_manager.objected(event.conn, event.message.reason)
        elif isinstance(event, MessageReceived) and isinstance(
            event.message, Reachable | FindPrefix
        ):
            self._on_prefix_message(event.conn, event.message)
        elif self._push_coordinator is not None and self._takes_reads and _is_about_read(event):
            self.lease_manager.on(event, now=now)
        elif self._staging_receiver is not None and self._staging_receiver.is_from_worker(event):
            self._staging_receiver.on(event)
        elif self._push_coordinator is not None:
            self._push_coordinator.on(event, now=now)
        elif self._staging_coordinator is not None:
            self._staging_coordinator.on(event, now=now)
        else:
            self.lease_manager.on(event, now=now)

    def advance(self, *, now: float) -> float | None:
        """Do what is due; return when to be called again at the latest, None for never."""
        dues = [part.advance(now=now) for part in self._parts]
        return earliest(*dues, self._publish(now), self._doze(now))

    def take_results(self, *, now: float) -> list[ControlResult]:
        """Return the results: ended leases, handshakes, searches, and loads in push.

        Also a NumbersDue, because an idle engine would report its counts with its next request.
        """
        released = self.lease_manager.take_released()
        if self._push_coordinator is not None:
            self._push_coordinator.released(released, now=now)
        if self._staging_coordinator is not None:
            self._staging_coordinator.released(released)
        results = self._push_receiver.take_results() if self._push_receiver is not None else ()
        searches = self._prefix_finder.take_ended() if self._prefix_finder is not None else ()
        lookups = self._prefix_lender.take_lookups() if self._prefix_lender is not None else ()
        renewer = self.lease_renewer
        numbers = [NumbersDue()] * self._are_numbers_due
        self._are_numbers_due = False
        asleep = self._fell_asleep
        self._fell_asleep = []
        # a peer that is met and lost in one iteration ends as lost
        peer_changes = [*renewer.take_handshakes(), *renewer.take_lost_peers()]
        return [
            *released,
            *peer_changes,
            *renewer.take_lost(),
            *results,
            *searches,
            *lookups,
            *numbers,
            *asleep,
        ]

    def _publish(self, now: float) -> float | None:
        """Note if counts have waited long enough for a step; return when to check again."""
        if not self._has_numbers():
            self._publish_at = None
        elif self._publish_at is None:
            self._publish_at = now + PUBLISH_AFTER
        elif now >= self._publish_at:
            self._publish_at = now + PUBLISH_AFTER
            self._are_numbers_due = True
        return self._publish_at

    def _on_ours(self, event: LinkEvent, now: float) -> None:
        changed: Peer | None = None
        match event:
            case MessageReceived(conn, PrefixFound() as answer) if self._prefix_finder is not None:
                self._prefix_finder.answered(conn, answer)
            case MessageReceived(conn, message) if self._push_receiver is not None:
                if not self._push_receiver.on(conn, message):
                    changed = self.lease_renewer.on(event, now=now)
            case _:
                changed = self.lease_renewer.on(event, now=now)
        if changed is not None:
            self._peer_changed(changed, now)

    def _peer_changed(self, peer: Peer, now: float) -> None:
        if self._push_receiver is not None:
            self._push_receiver.peer_changed(peer, now=now)
        if self._prefix_finder is not None:
            self._prefix_finder.peer_changed(peer)
        if self._prefix_lender is not None and peer.state is PeerState.CONNECTED:
            self._prefix_lender.introduce(peer.conn)

    def _on_prefix_message(self, conn: ConnId, message: Reachable | FindPrefix) -> None:
        """Handle a message of an engine with ``return_kv``, whether this one has it or not."""
        if isinstance(message, Reachable):
            if self._prefix_finder is not None:
                self._prefix_finder.learn_address(conn, message)
        elif self._prefix_lender is not None:
            self._prefix_lender.receive_question(conn, message)
        else:
            self.counters.count("unknown_transfer_messages")  # we have not said that we lend

    def _connection_lost(self, conn: ConnId) -> None:
        if self._prefix_finder is not None:
            self._prefix_finder.lost(conn)
        if self._prefix_lender is not None:
            self._prefix_lender.lost(conn)


def _is_about_read(event: LinkEvent) -> bool:
    return isinstance(event, MessageReceived) and isinstance(event.message, ReadsStarted | ReadDone)
