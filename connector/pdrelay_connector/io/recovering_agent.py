"""A transfer agent whose broken connections and broken backends are replaced while its engine goes
on.

Whoever uses it sees one agent: handles and numbers stay. A replacement concerns this side alone.
Peers hear nothing of it, leases are kept, and the fence decides as ever whether what was read
counts.

No backend is ended while a transfer of it is in flight, for ``io/nixl.py`` says what that does. It
is kept until NIXL has reported the end of the last one, and what it may still write into stays
quarantined until then.
"""

import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import XferId
from pdrelay_connector.core.layout.transfer_plan import Spans
from pdrelay_connector.core.messages import RankInfo
from pdrelay_connector.core.ports import TransferAgent, XferEnded, XferOutcome
from pdrelay_connector.core.transfer.backend import (
    MAX_REBUILDS,
    PAUSE,
    PERIOD,
    BackendEvent,
    BackendHealth,
    BackendState,
    Remedy,
)
from pdrelay_connector.errors import BackendError, TransferError

logger = logging.getLogger("vllm.pdrelay")


class OpenBackend(NamedTuple):
    """A transfer agent with a NIXL backend of its own, and what ends it."""

    agent: TransferAgent
    close: Callable[[], None]


@dataclass(slots=True)
class _Peer:
    """A rank that is attached."""

    info: RankInfo
    handle: str  # the backend's own
    backend: OpenBackend | None  # in which it is attached; None: in none
    connection: int = 0  # how often it was connected again
    is_broken: bool = False
    opens_at: float = 0.0  # when it may be connected again


@dataclass(slots=True)
class _Transfer:
    """A read or a write, through all of its tries."""

    number: XferId
    handle: str
    spans: Spans
    is_read: bool
    begun_at: float
    backend: OpenBackend | None = None  # where it is in flight; None: it waits for its next try
    xfer: XferId | None = None  # there
    posted_at: float = 0.0
    connection: int = 0  # over which it was posted
    failure: str = ""  # of the latest try
    failed_at: float = 0.0  # of the first one
    remedy: Remedy | None = None  # the latest that it has got
    is_cancelled: bool = False
    is_overdue: bool = False


class RecoveringAgent:
    """Implements :class:`~pdrelay_connector.core.ports.TransferAgent`; one thread owns it.

    ``first``: the backend to begin with, which is never closed here: peers may reach this engine's
    memory through it. ``build``: another one; it raises ``TransferError``. ``timeout``: seconds
    after which a transfer does not end.
    """

    def __init__(
        self,
        first: TransferAgent,
        build: Callable[[], OpenBackend],
        counters: Counters,
        *,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._present = OpenBackend(first, lambda: None)
        self._kept: list[OpenBackend] = []  # earlier ones, with transfers in flight
        self._build = build
        self._counters = counters
        self._timeout = timeout
        self._clock = clock
        self._health = BackendHealth()
        self._peers: dict[str, _Peer] = {}
        self._numbers = map(XferId, itertools.count(1))
        self._transfers: dict[XferId, _Transfer] = {}
        self._rebuild_for = ""  # why another backend is wanted, if so

    @property
    def backends(self) -> int:
        """How many backends there are: the present one, and those that something still uses."""
        return 1 + len(self._kept)

    def attach(self, peer: RankInfo) -> str:
        """Make a remote rank's memory reachable."""
        handle = self._present.agent.attach(peer)
        before = self._peers.get(handle)
        if before is not None and before.backend is not self._present:  # else it would have raised
            self._present.agent.detach(handle)
            raise TransferError(
                f"NIXL agent {handle} is attached already, to another engine or with other memory"
            )
        self._peers[handle] = _Peer(peer, handle, self._present)
        return handle

    def detach(self, handle: str) -> None:
        """Forget a remote rank, as soon as nothing of it can reach our memory any more."""
        if (peer := self._peers.pop(handle, None)) is not None and peer.backend is not None:
            peer.backend.agent.detach(peer.handle)

    def read(self, handle: str, spans: Spans) -> XferId:
        """Post a read."""
        return self._begin(handle, spans, is_read=True)

    def write(self, handle: str, spans: Spans) -> XferId:
        """Post a write."""
        return self._begin(handle, spans, is_read=False)

    def cancel(self, xfer: XferId) -> None:
        """Give a transfer up: it is not tried again, and ends when its backend says so."""
        if (transfer := self._transfers.get(xfer)) is not None:
            transfer.is_cancelled = True
            if transfer.backend is not None and transfer.xfer is not None:
                transfer.backend.agent.cancel(transfer.xfer)

    def poll(self) -> Sequence[XferEnded]:
        """Return what has ended for good, and try again what has not."""
        now = self._clock()
        ended = [*self._poll_backends(now)]
        self._mark_overdue(now)
        self._close_broken(now)
        if self._rebuild_for:
            self._rebuild(now)
        ended.extend(self._try_again(now))
        for backend in [backend for backend in self._kept if not self._is_used(backend)]:
            self._kept.remove(backend)
            backend.close()
        return ended

    # ---- one try

    def _begin(self, handle: str, spans: Spans, *, is_read: bool) -> XferId:
        now = self._clock()
        transfer = _Transfer(next(self._numbers), handle, spans, is_read, now)
        if self._is_stalled(self._peers[handle]):
            self._want_rebuild(f"transfers with {handle} do not end, and it answers", now)
        if not self._rebuild_for and not self._peers[handle].is_broken:
            try:
                self._post(transfer, now)
            except BackendError as exc:
                if self._is_final(transfer, self._present, str(exc), now):
                    raise
        self._transfers[transfer.number] = transfer
        return transfer.number

    def _post(self, transfer: _Transfer, now: float) -> None:
        """Post a transfer to the present backend; raises ``TransferError``."""
        peer = self._peers[transfer.handle]
        agent = self._present.agent
        if peer.backend is not self._present:
            peer.handle = agent.attach(peer.info)
            peer.backend = self._present
        transfer.connection = peer.connection
        post = agent.read if transfer.is_read else agent.write
        transfer.xfer = post(peer.handle, transfer.spans)
        transfer.backend = self._present
        transfer.posted_at = now

    def _poll_backends(self, now: float) -> Iterator[XferEnded]:
        for backend in (self._present, *self._kept):
            ends = backend.agent.poll()
            if not ends:
                continue
            in_flight = {
                transfer.xfer: transfer
                for transfer in self._transfers.values()
                if transfer.backend is backend
            }
            for end in ends:
                transfer = in_flight[end.xfer]
                transfer.backend = None
                if end.outcome is XferOutcome.DONE:
                    self._health.worked(begun_at=transfer.posted_at)
                elif not (
                    transfer.is_cancelled or self._is_final(transfer, backend, end.reason, now)
                ):
                    continue
                del self._transfers[transfer.number]
                yield end._replace(xfer=transfer.number)

    # ---- after a failure

    def _is_final(self, transfer: _Transfer, backend: OpenBackend, reason: str, now: float) -> bool:
        """Take in that a try with a backend has failed; say whether it was the last one."""
        transfer.failure = reason
        if transfer.remedy is None:
            transfer.failed_at = now
        peer = self._peers.get(transfer.handle)
        if peer is None:  # it is gone
            return True
        if backend is not self._present and transfer.remedy is not Remedy.REBUILD:
            transfer.remedy = Remedy.REBUILD  # there is another one already
            return False
        self._health.troubled(now=now)
        with self._watched():
            transfer.remedy = self._health.remedy(
                transfer.remedy, since=transfer.failed_at, now=now, kept=len(self._kept)
            )
        if transfer.remedy is Remedy.NONE:
            return True
        if transfer.remedy is Remedy.REBUILD:
            self._rebuild_for = self._rebuild_for or reason
        elif transfer.connection == peer.connection:
            peer.is_broken = True
        return False

    def _close_broken(self, now: float) -> None:
        """Close broken connections over which nothing is in flight any more."""
        for handle, peer in self._peers.items():
            if not peer.is_broken or peer.backend is None or self._in_flight(handle, peer.backend):
                continue
            peer.backend.agent.detach(peer.handle)
            peer.backend = None
            peer.connection += 1
            peer.opens_at = now + PAUSE
            self._counters.count("connections_replaced")
            logger.warning(
                "pdrelay: NIXL's connection to %s is broken: it is opened again", peer.handle
            )

    def _try_again(self, now: float) -> Iterator[XferEnded]:
        for transfer in [each for each in self._transfers.values() if each.backend is None]:
            peer = self._peers.get(transfer.handle)
            is_over = transfer.is_cancelled or peer is None
            if peer is not None and not is_over:
                if peer.is_broken and peer.backend is None and now >= peer.opens_at:
                    peer.is_broken = False
                if peer.is_broken or self._rebuild_for:
                    continue
                is_over = not self._posts(transfer, now)
            if is_over:
                del self._transfers[transfer.number]
                reason = transfer.failure or "cancelled"
                seconds = now - transfer.begun_at
                yield XferEnded(transfer.number, XferOutcome.FAILED, 0, 0, seconds, reason)

    def _posts(self, transfer: _Transfer, now: float) -> bool:
        """Post a transfer again; say whether it is in flight, or has yet another try."""
        try:
            self._post(transfer, now)
        except BackendError as exc:
            return not self._is_final(transfer, self._present, str(exc), now)
        except TransferError as exc:
            transfer.failure = str(exc)
            return False
        if transfer.remedy is not None:
            self._counters.count("transfers_retried")
        return True

    # ---- another backend

    def _is_stalled(self, peer: _Peer) -> bool:
        """Whether a transfer with this rank does not end, in the present backend.

        It is asked when another is to begin: then the peer has been met since, or has asked for it.
        """
        return any(
            transfer.is_overdue and transfer.backend is self._present
            for transfer in self._transfers.values()
            if transfer.handle == peer.handle
        )

    def _mark_overdue(self, now: float) -> None:
        for transfer in self._transfers.values():
            if transfer.backend is not None and now >= transfer.posted_at + self._timeout:
                transfer.is_overdue = True

    def _want_rebuild(self, reason: str, now: float) -> None:
        self._health.troubled(now=now)
        with self._watched():
            if self._health.may_rebuild(now=now, kept=len(self._kept)):
                self._rebuild_for = reason

    @contextmanager
    def _watched(self) -> Generator[None]:
        """Say so if the backend counts as failed from now on."""
        before = self._health.state
        yield
        if self._health.state is BackendState.FAILED is not before:
            self._counters.count("backends_given_up")
            logger.warning(
                "pdrelay: NIXL's backend has failed: %d others in %.0f s did not help, so transfers "
                "fail until one works or another may be built",
                MAX_REBUILDS, PERIOD,
            )  # fmt: skip

    def _rebuild(self, now: float) -> None:
        """Go on with another backend; the one before is kept while something of it is in flight."""
        reason = self._rebuild_for
        self._rebuild_for = ""
        self._health.rebuild_begun(now=now)
        try:
            backend = self._build()
        except TransferError as exc:
            self._health.on(BackendEvent.NOT_REBUILT)
            self._counters.count("backends_not_rebuilt")
            logger.warning(
                "pdrelay: NIXL's backend is broken (%s) and could not be built again: %s",
                reason, exc,
            )  # fmt: skip
            return
        self._health.on(BackendEvent.REBUILT)
        self._counters.count("backends_rebuilt")
        logger.warning(
            "pdrelay: NIXL's backend was built again, at most %d times in %.0f s, because of: %s",
            MAX_REBUILDS, PERIOD, reason,
        )  # fmt: skip
        for peer in self._peers.values():
            if peer.backend is not None:
                peer.backend.agent.detach(peer.handle)
            peer.backend = None
            peer.connection += 1
            peer.is_broken = False
        self._kept.append(self._present)
        self._present = backend

    def _in_flight(self, handle: str, backend: OpenBackend) -> bool:
        return any(
            transfer.backend is backend and transfer.handle == handle
            for transfer in self._transfers.values()
        )

    def _is_used(self, backend: OpenBackend) -> bool:
        return any(transfer.backend is backend for transfer in self._transfers.values())
