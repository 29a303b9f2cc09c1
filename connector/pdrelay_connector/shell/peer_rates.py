"""How fast KV of each other engine moves: GB/s is the rate of bytes over the rate of seconds.

UCX chooses the transport, which NIXL does not know; ``pdrelay doctor`` shows it (docs/doctor.md).
"""

from collections.abc import Sequence
from typing import Any

from pdrelay_connector.core.counters import TransferSample
from pdrelay_connector.core.sleep import known_as
from pdrelay_connector.shell.peer_names import PeerNames

BYTES = "Bytes of KV read from this engine (pull) or written to it (push)."
SECONDS = (
    "Seconds that these transfers took, added up; several at the same time count several times."
)


class PeerRates:
    """Two counters with the label ``peer``, an engine's ``engine_id``."""

    def __init__(self, make: Any, labels: Sequence[str]) -> None:
        """``make``: the class of counters, prometheus_client's or Ray's."""
        self._bytes = make("vllm:pdrelay_peer_bytes", BYTES, [*labels, "peer"])
        self._seconds = make("vllm:pdrelay_peer_transfer_seconds", SECONDS, [*labels, "peer"])
        self._names = PeerNames(self._bytes)
        self._shown: dict[tuple[str, ...], None] = {}  # the least recently moved first

    def add(self, labels: Sequence[str], sample: TransferSample) -> None:
        """Add a transfer.

        Of too many engines the one that moved nothing for longest is forgotten.
        """
        peer = known_as(sample.peer)
        if not peer or not self._names.admit(peer):
            return
        key = (*labels, peer)
        self._shown.pop(key, None)
        self._shown[key] = None
        self._bytes.labels(*key).inc(sample.bytes)
        self._seconds.labels(*key).inc(sample.seconds)
        if (first := self._names.to_remove(self._shown)) is not None:
            del self._shown[first]
            self._bytes.remove(*first)
            self._seconds.remove(*first)
