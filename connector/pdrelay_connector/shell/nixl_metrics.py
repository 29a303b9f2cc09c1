"""The metrics of vLLM's NixlConnector, for its dashboards and alerts (``nixl_metrics: true``).

Names, kinds and buckets are those of vLLM 0.32 (``kv_connector/v1/nixl/stats.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pdrelay_connector.core.counters import StatsReport, TransferSample


class _Histogram(NamedTuple):
    text: str
    buckets: Sequence[float]
    value_of: Callable[[TransferSample], float]


class _Counter(NamedTuple):
    text: str
    counts: Sequence[str]  # of ours, which add up to it


_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
HISTOGRAMS: Final[Mapping[str, _Histogram]] = {
    "xfer_time_seconds": _Histogram(
        "Seconds of a transfer.", _SECONDS[1:], lambda sample: sample.seconds
    ),
    "post_time_seconds": _Histogram(
        "Seconds of posting a transfer.", _SECONDS, lambda sample: sample.posting
    ),
    "bytes_transferred": _Histogram(
        "Bytes of a transfer.",
        [2.0 ** (10 + power) for power in range(1, 25, 2)],
        lambda sample: sample.bytes,
    ),
    "num_descriptors": _Histogram(
        "Pieces of memory of a transfer.",
        (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000),
        lambda sample: sample.descriptors,
    ),
}
COUNTERS: Final[Mapping[str, _Counter]] = {
    "num_failed_transfers": _Counter(
        "Loads that failed in the network, handshakes included.",
        (
            "loads_failed_handshake",
            "loads_failed_transfer",
            "loads_failed_timeout",
            "loads_failed_peer",
        ),
    ),
    "num_failed_notifications": _Counter(
        "Always 0: this connector confirms reads over its side channel.", ()
    ),
    "num_kv_expired_reqs": _Counter(
        "Leases of the prefill engine that were not renewed in time.", ("leases_expired",)
    ),
    "num_notifications_after_expiry": _Counter(
        "Transfers that ended after their lease; their bytes were discarded.", ("reads_discarded",)
    ),
}
Make = Callable[..., Mapping[int, Any]]  # what makes a metric of each engine


class NixlMetrics:
    """What vLLM's connector would have counted, beside our own metrics."""

    def __init__(self, make_histogram: Make, make_counter: Make) -> None:
        self._histograms = {
            name: make_histogram(f"vllm:nixl_{name}", definition.text, buckets=definition.buckets)
            for name, definition in HISTOGRAMS.items()
        }
        self._counters = {
            name: make_counter(f"vllm:nixl_{name}", definition.text)
            for name, definition in COUNTERS.items()
        }

    def observe(self, report: StatsReport, engine: int) -> None:
        """Add one report of an engine."""
        for name, histogram in self._histograms.items():
            for sample in report.transfers:
                histogram[engine].observe(HISTOGRAMS[name].value_of(sample))
        for name, counter in self._counters.items():
            counter[engine].inc(sum(report.counters.get(own, 0) for own in COUNTERS[name].counts))
