"""How fast KV moves between two engines, as one of them shows it (``vllm:pdrelay_peer_bytes_total``
and the seconds).

In pull the decode engine reads and counts, in push the prefill engine writes and counts. Transfers
at the same time count their seconds each, so this is what one of them got, and what a link can
carry may be more.
"""

import re
from collections.abc import Mapping
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet.engine_metrics import labelled_lines
from pdrelay_proxy.core.model import InstanceId

_BYTES: Final = b"vllm:pdrelay_peer_bytes_total{"
_SECONDS: Final = b"vllm:pdrelay_peer_transfer_seconds_total{"
_LINE: Final = re.compile(
    rb"[^{\n]{1,64}\{(?P<labels>[^\n]{0,2000})\} "
    rb"(?P<value>[0-9]{1,18}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?)"
)
_LABEL: Final = re.compile(rb'(?:^|,)(engine|peer)="([0-9A-Za-z_.:-]{1,160})"(?=,|$)')
_MOST: Final = 512  # lines of one engine; the connector shows 64 peers of each rank
_LEAST_S: Final = 1e-6  # of transfers, from which on there is a rate

# by the other engine's id: bytes and seconds since the start
Moved: TypeAlias = Mapping[str, tuple[float, float]]


def read_moved(text: bytes, rank: int | None = None) -> Moved:
    """Read what an engine has moved, or one of its data-parallel ranks; a label of another form is
    left out.
    """
    moved = _values(text, _BYTES, rank)
    seconds = _values(text, _SECONDS, rank)
    return {peer: (count, seconds[peer]) for peer, count in moved.items() if peer in seconds}


def _values(text: bytes, name: bytes, rank: int | None) -> dict[str, float]:
    values = dict[str, float]()
    for line in labelled_lines(text, name, _LINE, _MOST):
        labels = {key: value.decode() for key, value in _LABEL.findall(line["labels"])}
        peer = labels.get(b"peer")
        engine = labels.get(b"engine")
        if peer is not None and (rank is None or engine is None or engine == str(rank)):
            values[peer] = values.get(peer, 0.0) + float(line["value"])
    return values


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
