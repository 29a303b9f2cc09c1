"""What the control thread of a scheduler process runs: the lender and the borrower on one link."""

from xpyd_connector.core.borrower import Borrower
from xpyd_connector.core.lender import Lender
from xpyd_connector.core.peers import PeerBook
from xpyd_connector.core.ports import LinkEvent
from xpyd_connector.core.tally import Tally


class Control:
    """Events of connections we opened are the borrower's, all others the lender's."""

    def __init__(self, lender: Lender, borrower: Borrower, peers: PeerBook, tally: Tally) -> None:
        self.lender = lender
        self.borrower = borrower
        self.tally = tally
        self._peers = peers

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in an event."""
        if self._peers.find(event.conn) is not None:
            self.borrower.on(event, now=now)
        else:
            self.lender.on(event, now=now)

    def advance(self, *, now: float) -> float | None:
        """Do what is due; return when to be called again at the latest, None for never."""
        dues = [self.lender.advance(now=now), self.borrower.advance(now=now)]
        return min((due for due in dues if due is not None), default=None)
