"""How fast KV moves between two engines, as one of them shows it (``vllm:pdrelay_peer_bytes_total``
and the seconds).

In pull the decode engine reads and counts, in push the prefill engine writes and counts. Transfers
at the same time count their seconds each, so this is what one of them got, and what a link can
carry may be more.
"""

from collections.abc import Mapping
from typing import Final

from pdrelay_proxy.core.fleet.peer_metrics import Moved
from pdrelay_proxy.core.model import InstanceId

_LEAST_S: Final = 1e-6  # of transfers, from which on there is a rate


class PeerRates:
    """Compares the looks at each engine."""

    def __init__(self) -> None:
        self._last: dict[InstanceId, Moved] = {}

    def rates_of(self, engine: InstanceId, moved: Moved) -> Mapping[str, float]:
        """Return the bytes a second of what has moved since the last look, by the other engine's
        id.
        """
        last = self._last.get(engine, {})
        self._last[engine] = moved
        rates = dict[str, float]()
        for peer, (count, seconds) in moved.items():
            before = last.get(peer, (0.0, 0.0))
            if before[0] > count or before[1] > seconds:
                before = (0.0, 0.0)  # it was restarted
            more = count - before[0]
            took_s = seconds - before[1]
            if more > 0 and took_s >= _LEAST_S:
                rates[peer] = more / took_s
        return rates

    def keep(self, engines: frozenset[InstanceId]) -> None:
        """Forget the engines that are no longer known."""
        for gone in self._last.keys() - engines:
            del self._last[gone]
