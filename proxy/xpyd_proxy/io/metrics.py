"""The counters in Prometheus' words. prometheus_client stops at this file.

Requests and legs add to plain numbers (core/counters.py); they become metrics only while somebody scrapes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from xpyd_proxy.core.counters import Counters, Histogram, Key
from xpyd_proxy.core.discovery.reconcile import Freshness
from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.workers.reports import Whole, together
from xpyd_proxy.io.request_path.telemetry import Telemetry

_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_LEAST: Final = frozenset({"process_start_time_seconds", "process_max_fds"})  # of all workers; the others are added up
_CPU: Final = "process_cpu_seconds_total"


class Metrics:
    """What ``GET /metrics`` says. Every router has its own registry; nothing is global."""

    def __init__(
        self,
        telemetry: Telemetry,
        engines: Registry,
        sources: Callable[[], Sequence[Freshness]] = tuple,
    ) -> None:
        self._telemetry = telemetry
        self._engines = engines
        self._sources = sources

    def exposition(self, accept: str, whole: Whole) -> tuple[bytes, str]:
        """Return all metrics, which are those of all workers, and their type, as ``Accept`` asks for."""
        self._telemetry.keep(frozenset(member.instance.id for member in self._engines.members()))
        counters = together(self._telemetry.counters, [one.counts for one in whole.others])
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry()
        registry.register(_Collector(counters, self._engines, self._sources(), whole))
        return encode(registry), content_type


def processes() -> Mapping[str, float]:
    """Return the numbers that Prometheus wants of every process, by their names."""
    families = ProcessCollector(registry=None).collect()
    return {sample.name: sample.value for family in families for sample in family.samples}


class _Collector:
    """Makes metrics out of the numbers, in the order in which an operator reads them."""

    def __init__(self, counters: Counters, engines: Registry, sources: Sequence[Freshness], whole: Whole) -> None:
        self._counters = counters
        self._engines = engines
        self._sources = sources
        self._whole = whole

    def collect(self) -> Iterator[_Family]:
        """Read everything once."""
        yield from self._requests()
        yield from self._legs()
        yield from self._transfers()
        yield from self._caches()
        yield from self._instances()
        yield from self._queue()
        yield from _discovery(self._sources)
        yield from self._workers()

    def _requests(self) -> Iterator[_Family]:
        seen = self._counters
        text = "Requests that are over, by path and by how they ended for the client."
        yield _counter("xpyd_requests", text, ("path", "outcome"), seen.requests)
        text = "Requests, or each of their prompts, by the way of the KV cache; single: no transfer, for this reason."
        yield _counter("xpyd_requests_routed", text, ("mode", "reason"), seen.routed)
        text = "Seconds from a request's head to the end of its answer."
        yield _histogram("xpyd_request_duration_seconds", text, ("path", "outcome"), seen.durations.by_key)
        text = "Seconds that a request waited in the queue before it was served; 0 if it did not."
        yield _histogram("xpyd_request_queue_time_seconds", text, ("path",), seen.queue_times.by_key)
        text = "Seconds from a request's head to the first event of its stream."
        yield _histogram("xpyd_time_to_first_token_seconds", text, ("path",), seen.ttft.by_key)
        text = "Seconds between two reads of a stream, each of one token or more."
        yield _histogram("xpyd_inter_token_latency_seconds", text, ("path",), seen.inter_token.by_key)
        text = "Connections that were closed because the client had read nothing of its answer for too long."
        yield _counter("xpyd_client_write_timeouts", text, (), seen.write_timeouts)
        text = "What was asked of the admin API, and what became of it."
        yield _counter("xpyd_admin_actions", text, ("action", "outcome"), seen.admin)
        text = "Connections of clients that were closed before their request was served, by reason."
        yield _counter("xpyd_connections_refused", text, ("reason",), seen.connections_refused)
        text = "Sessions of /v1/realtime that are over, by how they ended; refused: there was none."
        yield _counter("xpyd_realtime_sessions", text, ("outcome",), seen.realtime_sessions)
        text = "Sessions of /v1/realtime that are open."
        yield _gauge("xpyd_realtime_sessions_open", text, (), seen.realtime_open)
        text = "Legs that failed and were sent again, by the role of the engine and the reason."
        yield _counter("xpyd_retries", text, ("role", "reason"), seen.retries)

    def _legs(self) -> Iterator[_Family]:
        seen = self._counters
        text = "Legs that are over, by engine and by how they ended; ok: also those that were not needed any more."
        yield _counter("xpyd_legs", text, ("instance", "role", "outcome"), seen.legs)
        text = "Seconds from sending a prefill leg to the whole answer."
        yield _histogram("xpyd_prefill_seconds", text, ("instance",), seen.prefill_times.by_key)
        text = (
            "Seconds from sending a decode leg to the first event of its stream, or to the whole answer if it is none."
        )
        yield _histogram("xpyd_decode_ttft_seconds", text, ("instance",), seen.decode_ttft.by_key)

    def _transfers(self) -> Iterator[_Family]:
        seen = self._counters
        text = "Seconds between a prefill engine's answer and the sending of the decode leg."
        yield _histogram("xpyd_handoff_gap_seconds", text, (), {(): seen.handoff})
        text = "Attempts to have a prefill engine free blocks that no engine will read."
        yield _counter("xpyd_kv_releases", text, ("instance", "result"), seen.releases)
        text = "Answers of prefill engines that named a host out of reach: the engine's own was put in."
        yield _counter("xpyd_prefill_hosts_replaced", text, ("instance",), seen.unreachable_hosts)
        text = "Good decode legs with a transfer, by whether the KV cache arrived; none: silent degradation."
        yield _counter("xpyd_kv_transfers", text, ("instance", "result"), seen.transfers)
        text = "Decode legs that certainly got no KV cache, by their answers or by the engine's own counters."
        yield _counter("xpyd_kv_transfers_missing", text, ("instance",), seen.transfers_missing)
        text = "Prompts that a decode engine computed alone, because most of them had been in its cache before."
        yield _counter("xpyd_prompt_cache_misses", text, ("instance",), seen.cache_misses)
        text = "Requests of which the two engines made different prompts: their answers are not to be trusted."
        yield _counter("xpyd_prompt_mismatches", text, ("prefill", "decode"), seen.mismatches)

    def _caches(self) -> Iterator[_Family]:
        seen = self._counters
        text = "What engines have told of their caches: blocks stored and removed, resets, and what was not understood."
        yield _counter("xpyd_kv_events", text, ("instance", "event"), seen.kv_events)
        text = "Connections for KV events that ended or could not be opened, by reason."
        yield _counter("xpyd_kv_event_disconnects", text, ("instance", "reason"), seen.kv_event_disconnects)
        text = "Times that all was forgotten of an engine because it has more blocks than the router remembers."
        yield _counter("xpyd_kv_index_drops", text, ("instance",), seen.kv_index_drops)
        text = "Workers by what has become of their connection for the KV events of an engine."
        yield _gauge("xpyd_kv_event_connections", text, ("instance", "state"), seen.kv_event_connections)
        text = "Blocks that are remembered of an engine's cache, of all workers together."
        yield _gauge("xpyd_kv_index_blocks", text, ("instance",), seen.kv_index_blocks)

    def _instances(self) -> Iterator[_Family]:
        state = GaugeMetricFamily(
            "xpyd_instance_state",
            "1 for the state an engine is in, 0 for the others.",
            labels=("instance", "role", "state"),
        )
        legs = GaugeMetricFamily("xpyd_legs_in_flight", "Legs an engine has now.", labels=("instance", "role"))
        for member in self._engines.members():
            names = (member.instance.id, member.instance.role)
            legs.add_metric(names, sum(one.legs.get(member.instance.id, 0) for one in self._whole.all))
            for word in HealthState:
                state.add_metric((*names, word), word is member.life.state)
        yield from (state, legs)

    def _queue(self) -> Iterator[_Family]:
        workers, refused = self._whole.all, Counter[Key]()
        for one in workers:
            refused.update({(limit,): count for limit, count in one.refused.items()})
        text = "Requests in the queue of the admission control."
        yield GaugeMetricFamily("xpyd_requests_waiting", text, value=sum(one.waiting for one in workers))
        text = "Requests that are being served."
        yield GaugeMetricFamily("xpyd_requests_running", text, value=sum(one.admitted for one in workers))
        text = "Requests that the admission control refused, by the limit."
        yield _counter("xpyd_requests_refused", text, ("reason",), refused)

    def _workers(self) -> Iterator[_Family]:
        workers = self._whole.all
        text = "Workers that answer, the one asked included."
        yield GaugeMetricFamily("xpyd_workers", text, value=self._whole.serving)
        starts: dict[Key, int] = {(str(one.worker),): one.starts for one in workers}
        yield _counter("xpyd_worker_starts", "Workers that were started, by number.", ("worker",), starts)
        text = "Reports of other workers that could not be read: their numbers are those of up to a second before."
        yield CounterMetricFamily("xpyd_worker_scrape_failures", text, value=sum(one.unread for one in workers))
        for name in self._whole.own.process:
            values = [one.process[name] for one in workers if name in one.process]
            kind = CounterMetricFamily if name == _CPU else GaugeMetricFamily
            yield kind(name, "Of all workers.", value=(min if name in _LEAST else sum)(values))


def _discovery(sources: Sequence[Freshness]) -> Iterator[_Family]:
    synced = GaugeMetricFamily(
        "xpyd_discovery_synced", "1 if a source of engines has been read since the start.", labels=("source",)
    )
    text = "Seconds for which nobody has known whether the last view of a source is still so."
    age = GaugeMetricFamily("xpyd_discovery_age_seconds", text, labels=("source",))
    engines = GaugeMetricFamily("xpyd_discovery_engines", "Engines that a source names.", labels=("source",))
    for one in sources:
        synced.add_metric((one.source,), one.is_synced)
        age.add_metric((one.source,), one.age_s)
        engines.add_metric((one.source,), one.engines)
    yield from (synced, age, engines)


def _counter(name: str, text: str, labels: Sequence[str], counts: Mapping[Key, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, count in counts.items():
        family.add_metric(key, count)
    return family


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Key, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(
    name: str, text: str, labels: Sequence[str], histograms: Mapping[Key, Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, histogram in histograms.items():
        bounds = [*map(str, histogram.bounds), "+Inf"]  # of each how many values are at or below it
        family.add_metric(key, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total)
    return family
