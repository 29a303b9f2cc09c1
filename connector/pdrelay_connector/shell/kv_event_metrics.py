"""The metrics of the KV event plugin, on the engine's ``/metrics`` (vllm:pdrelay_kv_events_...).

Each API server process follows the events itself. With several (``--api-server-count``)
prometheus_client keeps their numbers in files, and ``/metrics`` of any of them adds the counters
up.
"""

from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Metric

from pdrelay_connector.core.kv_events.event_hub import HubCounts, KVEventHub

PREFIX = "vllm:pdrelay_kv_events_"
COUNTERS = {
    "batches": "Batches of KV events read, once by each API server process.",
    "unknown": "KV events of types that this version does not know; they are passed on.",
    "forgotten": (
        "Times that what was known of a rank was given up, for a reason below or because batches "
        "were lost."
    ),
    "overflows": "Of these, because the rank had too many blocks.",
    "refused_batches": "Of these, because a batch was not vLLM's, or too long.",
    "slow_readers": "Readers cut off because they were too far behind.",
    "refused_readers": "Readers answered 503 because there were too many.",
}
_FIELDS = {"unknown": "unknown_events"}  # of HubCounts, where the name is another


class KVEventMetrics:
    """The numbers of one hub.

    As a collector it is no metric of vLLM's, which unregisters these when it scales.
    """

    def __init__(self, hub: KVEventHub, registry: CollectorRegistry = REGISTRY) -> None:
        self._hub = hub
        self._registry = registry
        self._exported = HubCounts()
        # registry=None: this object collects them; with several processes their files do.
        self._counters = {
            name: Counter(PREFIX + name, text, registry=None) for name, text in COUNTERS.items()
        }
        self._readers = Gauge(
            PREFIX + "readers",
            "Connections that read KV events now.",
            registry=None,
            multiprocess_mode="livesum",
        )
        # Several API servers know the same blocks, so that one of them counts.
        self._blocks = Gauge(
            PREFIX + "blocks",
            "Blocks known of a rank.",
            ["engine"],
            registry=None,
            multiprocess_mode="livemax",
        )
        self._ranks: set[int] = set()

    def open(self) -> None:
        """Show the numbers from now on."""
        self._registry.register(self)

    def close(self) -> None:
        """Show them no more."""
        self._registry.unregister(self)

    def collect(self) -> Iterable[Metric]:
        """Return the numbers as they are now (prometheus_client's interface of collectors)."""
        self.update()
        for metric in (*self._counters.values(), self._readers, self._blocks):
            yield from metric.collect()

    def update(self) -> None:
        """Take over the hub's numbers; with several processes nothing else does."""
        for name, counter in self._counters.items():
            field = _FIELDS.get(name, name)
            value = getattr(self._hub.counts, field)
            counter.inc(value - getattr(self._exported, field))
            setattr(self._exported, field, value)
        self._readers.set(self._hub.readers)
        blocks = self._hub.blocks
        # files of several processes keep a rank: 0 is true of it, too
        for rank in self._ranks - blocks.keys():
            self._blocks.labels(str(rank)).set(0)
        for rank, count in blocks.items():
            self._blocks.labels(str(rank)).set(count)
        self._ranks |= blocks.keys()
