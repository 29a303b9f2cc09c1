"""What the control thread of a scheduler process runs: everything that is on its link."""

from collections.abc import Sequence

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.ids import RequestId
from xpyd_connector.core.lease.decode_scheduler import Borrower
from xpyd_connector.core.lease.lease_table import Released
from xpyd_connector.core.lease.prefill_scheduler import Candidate, Lender
from xpyd_connector.core.messages import Attend
from xpyd_connector.core.ports import LinkEvent, Received
from xpyd_connector.core.push.decode_scheduler import Landings
from xpyd_connector.core.push.prefill_scheduler import Pushes
from xpyd_connector.core.results import LeaseLost, LetGo, Result
from xpyd_connector.core.session.peers import PeerBook
from xpyd_connector.core.staging.decode_scheduler import Unpacking
from xpyd_connector.core.staging.prefill_scheduler import Stagings


class Control:
    """Events of connections we opened are for our decode half, all others for our prefill half.

    In push each half has a second core: what P writes, and where it lands. Where KV goes through host memory, a third.
    """

    def __init__(
        self,
        lender: Lender,
        borrower: Borrower,
        peers: PeerBook,
        tally: Tally,
        *,
        pushes: Pushes | None = None,
        landings: Landings | None = None,
        stagings: Stagings | None = None,
        unpacking: Unpacking | None = None,
    ) -> None:
        self.lender = lender
        self.borrower = borrower
        self.tally = tally
        self._pushes = pushes
        self._landings = landings
        self._stagings = stagings
        self._unpacking = unpacking
        self._peers = peers

    @property
    def pushes(self) -> Pushes:
        """The prefill half of push."""
        if self._pushes is None:
            raise RuntimeError("this engine does not push")
        return self._pushes

    @property
    def landings(self) -> Landings:
        """The decode half of push."""
        if self._landings is None:
            raise RuntimeError("nobody pushes to this engine")
        return self._landings

    def grant(self, request: RequestId, *, now: float) -> None:
        """Promise to keep the blocks of a finished prefill for a while."""
        self.lender.grant(request, now=now)
        if self._pushes is not None:
            self._pushes.granted(request, now=now)

    def revoke(self, candidates: Sequence[Candidate], blocks: int, *, now: float) -> None:
        """End leases that nobody reads, the first named first, until so many blocks are free."""
        self.lender.revoke(candidates, blocks, now=now, is_busy=self._is_busy)

    def _is_busy(self, request: RequestId) -> bool:
        is_written = self._pushes is not None and self._pushes.is_writing(request)
        return is_written or (self._stagings is not None and self._stagings.is_reading(request))

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in an event."""
        if self._peers.find(event.conn) is not None:
            self._on_ours(event, now)
        elif self._unpacking is not None and self._unpacks(event):
            self._unpacking.on(event)
        elif self._pushes is not None:
            self._pushes.on(event, now=now)
        elif self._stagings is not None:
            self._stagings.on(event, now=now)
        else:
            self.lender.on(event, now=now)

    def _unpacks(self, event: LinkEvent) -> bool:
        says_so = isinstance(event, Received) and isinstance(event.message, Attend) and event.message.unpacks
        return self._unpacking is not None and (says_so or self._unpacking.knows(event.conn))

    def advance(self, *, now: float) -> float | None:
        """Do what is due; return when to be called again at the latest, None for never."""
        dues = [self.lender.advance(now=now), self.borrower.advance(now=now)]
        if self._pushes is not None:
            self._pushes.advance(now=now)
        if self._stagings is not None:
            dues.append(self._stagings.advance(now=now))
        if self._landings is not None:
            dues.append(self._landings.advance(now=now))
        return min((due for due in dues if due is not None), default=None)

    def take_news(self, *, now: float) -> list[Released | Result | LetGo | LeaseLost]:
        """Return what the engine must know: leases that ended here and there, in push the fate of what we wait for."""
        released = self.lender.take_released()
        if self._pushes is not None:
            self._pushes.released(released, now=now)
        if self._stagings is not None:
            self._stagings.released(released)
        results = self._landings.take_results() if self._landings is not None else ()
        return [*released, *self.borrower.take_lost(), *results]

    def _on_ours(self, event: LinkEvent, now: float) -> None:
        if self._landings is None:
            self.borrower.on(event, now=now)
        elif not (isinstance(event, Received) and self._landings.on(event.conn, event.message)):
            changed = self.borrower.on(event, now=now)
            if changed is not None:
                self._landings.peer_changed(changed, now=now)
