"""The connector's numbers in vLLM's log line, and its Prometheus metrics (vllm:pdrelay_...)."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from pdrelay_connector.core.counters import COUNTERS, FAILURES, GAUGES, LOADED, StatsReport, merge
from pdrelay_connector.core.sleep import known_as
from pdrelay_connector.core.timeline import TimelineStore
from pdrelay_connector.shell.nixl_metrics import NixlMetrics
from pdrelay_connector.shell.peer_names import PeerNames
from pdrelay_connector.shell.peer_rates import PeerRates

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

# of this process, where it is an API server: shell/timelines.py shows them
TIMELINES: Final = TimelineStore()
INFO = (
    "Labels that a router compares before it pairs two engines, and the id by which peers know "
    "this one."
)
PEER_LOADS = (
    "Loads by prefill engine and by how they ended, of those engines of which one has failed."
)
PEER_FAILURE = "Why the latest load from a prefill engine failed, until one has not."
INCOMPATIBLE = (
    "A prefill engine that differs, by its engine_id: this engine computes its prompts itself."
)


class PDRelayStats(KVConnectorStats):
    """One report, of which vLLM asks for plain data before it passes it to API servers."""

    def __init__(self, report: StatsReport) -> None:
        self.report = report

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self.report)
        return plain

    def reset(self) -> None:
        """Clear the report."""
        self.report = StatsReport()

    def aggregate(self, other: "PDRelayStats") -> "PDRelayStats":
        """Add another rank's or interval's numbers: with each step those of a log line grow."""
        return PDRelayStats(merge([self.report, other.report]))

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers of one log line."""
        report = self.report
        shown: dict[str, int | float] = {**report.counters, **report.gauges}
        if report.transfers:
            seconds = sum(sample.seconds for sample in report.transfers)
            moved = sum(sample.bytes for sample in report.transfers)
            shown["transfers"] = len(report.transfers)
            shown["MB moved"] = round(moved / 1e6, 3)
            shown["descriptors"] = sum(sample.descriptors for sample in report.transfers)
            shown["mean transfer ms"] = round(1e3 * seconds / len(report.transfers), 3)
            shown["mean posting ms"] = round(
                1e3 * sum(s.posting for s in report.transfers) / len(report.transfers), 3
            )
        return shown

    def is_empty(self) -> bool:
        """Whether the report is empty."""
        return not self.report


class PDRelayPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics of one API server process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: Any,
        values: Any,
        info: Mapping[str, str],
        *,
        shows_nixl: bool = False,
    ) -> None:
        """``shows_nixl``: those of vLLM's NixlConnector, too."""
        super().__init__(vllm_config, metric_types, labelnames, values)
        self._counters = {
            name: self._make(Counter, f"vllm:pdrelay_{name}", text)
            for name, text in {
                **COUNTERS,
                "bytes_transferred": "Bytes of KV read (pull) or written (push).",
                "descriptors": "Pieces of memory read or written.",
                "posting_seconds": "Seconds spent on posting transfers to NIXL.",
            }.items()
        }
        # mostrecent: several API servers report the same engine, so the latest value counts, not
        # their sum.
        self._gauges = {
            name: self._make(Gauge, f"vllm:pdrelay_{name}", text, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._seconds = self._make(
            Histogram,
            "vllm:pdrelay_transfer_seconds",
            "Seconds from posting a read or a write to its end.",
            buckets=SECONDS,
        )

        self._incompatible = self._gauge_cls(
            "vllm:pdrelay_incompatible_peer",
            INCOMPATIBLE,
            [*self._labelnames, "peer"],
            multiprocess_mode="mostrecent",
        )
        self._refused: dict[tuple[str, ...], None] = {}
        self._peer_loads = self._counter_cls(
            "vllm:pdrelay_peer_loads", PEER_LOADS, [*self._labelnames, "peer", "outcome"]
        )
        self._peer_failure = self._gauge_cls(
            "vllm:pdrelay_peer_failure",
            PEER_FAILURE,
            [*self._labelnames, "peer", "outcome", "reason"],
            multiprocess_mode="mostrecent",
        )
        # the failures shown, by the labels of an engine, which self._failing has, too
        self._failures: dict[tuple[str, ...], str] = {}
        self._incompatible_names = PeerNames(self._incompatible)
        self._failing_names = PeerNames(self._peer_loads)
        # the outcomes shown, by the labels of an engine
        self._failing: dict[tuple[str, ...], set[str]] = {}
        self._peer_rates = PeerRates(self._counter_cls, self._labelnames)
        labels = [*self._labelnames, *info]
        label_values = {
            engine: [*own, *info.values()] for engine, own in self.per_engine_labelvalues.items()
        }
        gauge = self._gauge_cls(
            "vllm:pdrelay_connector_info", INFO, labels, multiprocess_mode="mostrecent"
        )
        for series in create_metric_per_engine(gauge, label_values).values():
            series.set(1)
        self._nixl: NixlMetrics | None = None
        if shows_nixl:
            self._nixl = NixlMetrics(partial(self._make, Histogram), partial(self._make, Counter))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        report = msgspec.convert(transfer_stats_data, StatsReport)
        for name, value in report.counters.items():
            self._counters[name][engine_idx].inc(value)
        for name, gauge in report.gauges.items():
            self._gauges[name][engine_idx].set(gauge)
        for peer in map(known_as, report.incompatible):
            self._show_refused(*self.per_engine_labelvalues[engine_idx], peer)
        for peer in map(known_as, report.compatible):
            self._show_accepted(*self.per_engine_labelvalues[engine_idx], peer)
        for engine, loads in report.peer_loads.items():
            peer = known_as(engine)
            labels = *self.per_engine_labelvalues[engine_idx], peer
            if loads.keys() <= {LOADED} and labels not in self._failing:
                continue
            if not self._failing_names.admit(peer):
                continue
            self._count_peer_loads(labels, loads)
            self._show_failure(labels, report.failures.get(engine), has_loaded=LOADED in loads)
        if self._nixl is not None:
            self._nixl.observe(report, engine_idx)
        TIMELINES.add(engine_idx, report.events)
        for sample in report.transfers:
            self._counters["bytes_transferred"][engine_idx].inc(sample.bytes)
            self._counters["descriptors"][engine_idx].inc(sample.descriptors)
            self._counters["posting_seconds"][engine_idx].inc(sample.posting)
            self._seconds[engine_idx].observe(sample.seconds)
            self._peer_rates.add(self.per_engine_labelvalues[engine_idx], sample)

    def _show_refused(self, *labels: str) -> None:
        """Show one more engine, and no longer the first of too many."""
        if not self._incompatible_names.admit(labels[-1]):
            return
        self._refused[labels] = None
        self._incompatible.labels(*labels).set(1)
        if (first := self._incompatible_names.to_remove(self._refused)) is not None:
            del self._refused[first]
            self._incompatible.remove(*first)

    def _show_accepted(self, *labels: str) -> None:
        """Show no longer that an engine differs.

        vLLM tells each report to one of several API servers: another one may show the engine.
        """
        names = self._incompatible_names
        is_shown = labels in self._refused
        self._refused.pop(labels, None)
        if names.can_forget and is_shown:
            self._incompatible.remove(*labels)
        elif is_shown or (not names.can_forget and names.admit(labels[-1])):
            self._incompatible.labels(*labels).set(0)

    def _count_peer_loads(self, labels: tuple[str, ...], loads: Mapping[str, int]) -> None:
        """Count the loads of an engine from its first failure on; forget the longest ago."""
        has_failed = not loads.keys() <= {LOADED}
        shown = self._failing.pop(labels, set()) if has_failed else self._failing[labels]
        self._failing[labels] = shown
        for outcome, count in loads.items():
            shown.add(outcome)
            self._peer_loads.labels(*labels, outcome).inc(count)
        if (first := self._failing_names.to_remove(self._failing)) is not None:
            for outcome in self._failing.pop(first):
                self._peer_loads.remove(*first, outcome)
            if first in self._failures:  # its later loads are not looked at
                self._hide_failure(first)

    def _show_failure(
        self, labels: tuple[str, ...], failure: str | None, *, has_loaded: bool
    ) -> None:
        """Show the latest failure of an engine, or none after a successful load."""
        if failure is None and not has_loaded:
            return
        if (before := self._failures.get(labels)) == failure:
            return
        if before is not None:
            self._hide_failure(labels)
        if failure is not None:
            self._failures[labels] = failure
            self._peer_failure.labels(*labels, failure, FAILURES.get(failure, "")).set(1)

    def _hide_failure(self, labels: tuple[str, ...]) -> None:
        """Show a failure no longer.

        Where processes share their metrics, and with Ray, no label can be forgotten.
        """
        failure = self._failures.pop(labels)
        shown = *labels, failure, FAILURES.get(failure, "")
        self._peer_failure.labels(*shown).set(0)
        if isinstance(self._peer_failure, Gauge):
            self._peer_failure.remove(*shown)

    def _make(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        cls = {Counter: self._counter_cls, Gauge: self._gauge_cls, Histogram: self._histogram_cls}[
            kind
        ]
        metric = cls(name=name, documentation=text, labelnames=self._labelnames, **options)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)
