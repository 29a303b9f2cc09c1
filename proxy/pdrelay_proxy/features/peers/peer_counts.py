"""The numbers of other routers and of datagrams, and their metrics."""

from collections import Counter
from collections.abc import Iterator

from pdrelay_proxy.features.peers.core.datagrams import DatagramFault
from pdrelay_proxy.io.metric_families import Family, counter_family, gauge_family


class PeerCounts:
    """The counts of one router."""

    def __init__(self) -> None:
        self.heard_routers: int | None = None  # other routers; None: the settings name none
        self.expected_routers = 0  # by their addresses
        # sent, send_failed, received, or why one was dropped
        self.datagrams: Counter[str] = Counter()

    def begin(self) -> None:
        """Show all series from the start."""
        self.heard_routers = 0
        self.datagrams.update(dict.fromkeys(("sent", "send_failed", "received", *DatagramFault), 0))

    def families(self) -> Iterator[Family]:
        """Return its metrics."""
        text = (
            "Other routers of the fleet: those that are heard, and those that are known by their "
            "addresses."
        )
        states = (
            []
            if self.heard_routers is None
            else [(("heard",), self.heard_routers), (("known",), self.expected_routers)]
        )
        yield gauge_family("pdrelay_peers", text, ("state",), states)
        text = (
            "Datagrams from other routers, by what became of them, and those sent to them, of which "
            "send_failed did not leave."
        )
        counts = [((result,), count) for result, count in self.datagrams.items()]
        yield from counter_family("pdrelay_peer_datagrams", text, ("result",), counts)
