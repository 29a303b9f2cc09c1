"""The counters in Prometheus' words. prometheus_client stops at this file.

Requests and legs add to plain numbers (core/counters.py); they become metrics only while somebody scrapes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias, TypeVar

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from xpyd_proxy.core.counters import Counters, Histogram, Key
from xpyd_proxy.core.discovery.reconcile import Freshness
from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.registry import Member, Registry
from xpyd_proxy.core.routing.fleet_groups import unpaired
from xpyd_proxy.core.workers.reports import Whole, together
from xpyd_proxy.io.request_path.telemetry import Telemetry

T = TypeVar("T")
_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_LEAST: Final = frozenset({"process_start_time_seconds", "process_max_fds"})  # of all workers; the others are added up
_END: Final = b"# EOF\n"  # of OpenMetrics
_SERIES_AT_ONCE: Final = 200  # of counters; a histogram has some 25 lines
_HISTOGRAMS_AT_ONCE: Final = 10
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
        pieces, content_type = self.pieces(accept, whole)
        return b"".join(pieces), content_type

    def pieces(self, accept: str, whole: Whole) -> tuple[Iterator[bytes], str]:
        """Return the same in pieces, each of which takes a few milliseconds: thousands of engines have megabytes."""
        self._telemetry.keep(frozenset(member.instance.id for member in self._engines.members()))
        counters = together(self._telemetry.counters, [one.counts for one in whole.others])
        encode, content_type = choose_encoder(accept)
        families = _Collector(counters, self._engines, self._sources(), whole).collect()
        return _encoded(families, lambda family: encode(_Single(family))), content_type


def processes() -> Mapping[str, float]:
    """Return the numbers that Prometheus wants of every process, by their names."""
    families = ProcessCollector(registry=None).collect()
    return {sample.name: sample.value for family in families for sample in family.samples}


class _Single:
    """A registry of one family, or of a part of it."""

    def __init__(self, family: _Family) -> None:
        self._family = family

    def collect(self) -> Iterator[_Family]:
        """Return it."""
        yield self._family


def _encoded(families: Iterator[_Family], encode: Callable[[_Family], bytes]) -> Iterator[bytes]:
    """Write families whose parts follow each other; each has one heading, and OpenMetrics one end."""
    before, end = "", b""
    for family in families:
        text = encode(family)
        if text.endswith(_END):
            text, end = text[: -len(_END)], _END
        while family.name == before and text.startswith(b"# "):
            text = text[text.index(b"\n") + 1 :]
        before = family.name
        yield text
    yield end


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
        yield from _counter("xpyd_requests", text, ("path", "outcome"), seen.requests)
        text = "Requests, or each of their prompts, by the way of the KV cache; single: no transfer, for this reason."
        yield from _counter("xpyd_requests_routed", text, ("mode", "reason"), seen.routed)
        text = "Seconds from a request's head to the end of its answer."
        yield from _histogram("xpyd_request_duration_seconds", text, ("path", "outcome"), seen.durations.by_key)
        text = "Seconds that a request waited in the queue before it was served; 0 if it did not."
        yield from _histogram("xpyd_request_queue_time_seconds", text, ("path",), seen.queue_times.by_key)
        text = "Seconds from a request's head to the first event of its stream."
        yield from _histogram("xpyd_time_to_first_token_seconds", text, ("path",), seen.ttft.by_key)
        text = "Seconds between two reads of a stream, each of one token or more."
        yield from _histogram("xpyd_inter_token_latency_seconds", text, ("path",), seen.inter_token.by_key)
        text = "Connections that were closed because the client had read nothing of its answer for too long."
        yield from _counter("xpyd_client_write_timeouts", text, (), seen.write_timeouts)
        text = "What was asked of the admin API, and what became of it."
        yield from _counter("xpyd_admin_actions", text, ("action", "outcome"), seen.admin)
        text = "Files of certificates or keys that changed and were read again, by result; failed: the old ones stay."
        yield from _counter("xpyd_file_reloads", text, ("result",), seen.file_reloads)
        text = "Connections of clients that were closed before their request was served, by reason."
        yield from _counter("xpyd_connections_refused", text, ("reason",), seen.connections_refused)
        text = "Sessions of /v1/realtime that are over, by how they ended; refused: there was none."
        yield from _counter("xpyd_realtime_sessions", text, ("outcome",), seen.realtime_sessions)
        text = "Sessions of /v1/realtime that are open."
        yield from _gauge("xpyd_realtime_sessions_open", text, (), seen.realtime_open)
        text = "Legs that failed and were sent again, by the role of the engine and the reason."
        yield from _counter("xpyd_retries", text, ("role", "reason"), seen.retries)

    def _legs(self) -> Iterator[_Family]:
        seen = self._counters
        text = "Legs that are over, by engine and by how they ended; ok: also those that were not needed any more."
        yield from _counter("xpyd_legs", text, ("instance", "role", "outcome"), seen.legs)
        text = "Seconds from sending a prefill leg to the whole answer."
        yield from _histogram("xpyd_prefill_seconds", text, ("instance",), seen.prefill_times.by_key)
        text = (
            "Seconds from sending a decode leg to the first event of its stream, or to the whole answer if it is none."
        )
        yield from _histogram("xpyd_decode_ttft_seconds", text, ("instance",), seen.decode_ttft.by_key)

    def _transfers(self) -> Iterator[_Family]:
        seen = self._counters
        text = "Seconds between a prefill engine's answer and the sending of the decode leg."
        yield from _histogram("xpyd_handoff_gap_seconds", text, (), {(): seen.handoff})
        text = "Attempts to have a prefill engine free blocks that no engine will read."
        yield from _counter("xpyd_kv_releases", text, ("instance", "result"), seen.releases)
        text = "Answers of prefill engines that named a host out of reach: the engine's own was put in."
        yield from _counter("xpyd_prefill_hosts_replaced", text, ("instance",), seen.unreachable_hosts)
        text = "Good decode legs with a transfer, by whether the KV cache arrived; none: silent degradation."
        yield from _counter("xpyd_kv_transfers", text, ("instance", "result"), seen.transfers)
        text = "Decode legs that certainly got no KV cache, by their answers or by the engine's own counters."
        yield from _counter("xpyd_kv_transfers_missing", text, ("instance",), seen.transfers_missing)
        text = "Prompts that a decode engine computed alone, because most of them had been in its cache before."
        yield from _counter("xpyd_prompt_cache_misses", text, ("instance",), seen.cache_misses)
        text = "Prompts that a decode engine has nearly all of, and left to others for the sake of its streams."
        yield from _counter("xpyd_lone_prompts_bound", text, ("outcome",), seen.lone_prompts_bound)
        text = "Requests of which the two engines made different prompts: their answers are not to be trusted."
        yield from _counter("xpyd_prompt_mismatches", text, ("prefill", "decode"), seen.mismatches)

    def _caches(self) -> Iterator[_Family]:
        seen = self._counters
        text = "What engines have told of their caches: blocks stored and removed, resets, and what was not understood."
        yield from _counter("xpyd_kv_events", text, ("instance", "event"), seen.kv_events)
        text = "Connections for KV events that ended or could not be opened, by reason."
        yield from _counter("xpyd_kv_event_disconnects", text, ("instance", "reason"), seen.kv_event_disconnects)
        text = "Times that all was forgotten of an engine because it has more blocks than the router remembers."
        yield from _counter("xpyd_kv_index_drops", text, ("instance",), seen.kv_index_drops)
        text = "Workers by what has become of their connection for the KV events of an engine."
        yield from _gauge("xpyd_kv_event_connections", text, ("instance", "state"), seen.kv_event_connections)
        text = "Blocks that are remembered of an engine's cache, of all workers together."
        yield from _gauge("xpyd_kv_index_blocks", text, ("instance",), seen.kv_index_blocks)
        text = "Texts and chats whose token ids prefill engines were asked for, by what became of the ids."
        yield from _counter("xpyd_known_prompts", text, ("event",), seen.known_prompts)
        text = "Memory of the token ids of texts and chats, of all workers together, about."
        yield from _gauge("xpyd_known_prompt_bytes", text, (), seen.known_prompt_bytes)

    def _instances(self) -> Iterator[_Family]:
        state = GaugeMetricFamily(
            "xpyd_instance_state",
            "1 for the state an engine is in, 0 for the others.",
            labels=("instance", "role", "state"),
        )
        legs = GaugeMetricFamily("xpyd_legs_in_flight", "Legs an engine has now.", labels=("instance", "role"))
        members = self._engines.members()
        for some in _parts(members, _SERIES_AT_ONCE // len(HealthState)):
            for member in some:
                for word in HealthState:
                    state.add_metric((member.instance.id, member.instance.role, word), word is member.life.state)
            yield state
            state.samples = []
        for member in members:
            names = (member.instance.id, member.instance.role)
            legs.add_metric(names, sum(one.legs.get(member.instance.id, 0) for one in self._whole.all))
        text = "Engines that may serve, and fit no engine of the other role though there are some."
        alone = GaugeMetricFamily("xpyd_unpaired_instances", text, labels=("role",))
        for role, count in unpaired(self._engines).items():
            alone.add_metric((role,), count)
        yield from (legs, alone)
        yield from _speeds(members)

    def _queue(self) -> Iterator[_Family]:
        workers, refused = self._whole.all, Counter[Key]()
        for one in workers:
            refused.update({(limit,): count for limit, count in one.refused.items()})
        text = "Requests in the queue of the admission control."
        yield GaugeMetricFamily("xpyd_requests_waiting", text, value=sum(one.waiting for one in workers))
        text = "Requests that are being served."
        yield GaugeMetricFamily("xpyd_requests_running", text, value=sum(one.admitted for one in workers))
        text = "Requests that the admission control refused, by the limit."
        yield from _counter("xpyd_requests_refused", text, ("reason",), refused)

    def _workers(self) -> Iterator[_Family]:
        workers = self._whole.all
        text = "Workers that answer, the one asked included."
        yield GaugeMetricFamily("xpyd_workers", text, value=self._whole.serving)
        starts: dict[Key, int] = {(str(one.worker),): one.starts for one in workers}
        yield from _counter("xpyd_worker_starts", "Workers that were started, by number.", ("worker",), starts)
        text = "Reports of other workers that could not be read: their numbers are those of up to a second before."
        yield CounterMetricFamily("xpyd_worker_scrape_failures", text, value=sum(one.unread for one in workers))
        for name in self._whole.own.process:
            values = [one.process[name] for one in workers if name in one.process]
            kind = CounterMetricFamily if name == _CPU else GaugeMetricFamily
            yield kind(name, "Of all workers.", value=(min if name in _LEAST else sum)(values))


def _speeds(members: Sequence[Member]) -> Iterator[_Family]:
    """Say what was learned of engines, by the worker that is asked: nothing without the policy expected_ttft."""
    text = "Tokens of prompts that an engine computes in a second, as its legs show."
    rates = GaugeMetricFamily("xpyd_instance_prefill_tokens_per_second", text, labels=("instance",))
    text = "Tokens of prompts that this router waits for an engine to compute."
    queues = GaugeMetricFamily("xpyd_instance_queued_tokens", text, labels=("instance",))
    text = "Seconds between two tokens of a stream of an engine, with the streams that it has now, as its streams show."
    steps = GaugeMetricFamily("xpyd_instance_inter_token_latency_seconds", text, labels=("instance",))
    for member in members:
        name, speed = (member.instance.id,), member.speed
        if speed.prefill.line is not None:
            rates.add_metric(name, 1.0 / speed.prefill.line.slope_s)
        if speed.prefill.line is not None or speed.computing.tokens:
            queues.add_metric(name, speed.computing.tokens)
        if speed.step.line is not None:
            steps.add_metric(name, speed.step.line.at(len(speed.running)))
    yield from (rates, queues, steps)


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


def _counter(name: str, text: str, labels: Sequence[str], counts: Mapping[Key, int]) -> Iterator[_Family]:
    for some in _parts([*counts.items()], _SERIES_AT_ONCE):
        family = CounterMetricFamily(name, text, labels=labels)
        for key, count in some:
            family.add_metric(key, count)
        yield family


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Key, int]) -> Iterator[_Family]:
    for some in _parts([*values.items()], _SERIES_AT_ONCE):
        family = GaugeMetricFamily(name, text, labels=labels)
        for key, value in some:
            family.add_metric(key, value)
        yield family


def _histogram(name: str, text: str, labels: Sequence[str], histograms: Mapping[Key, Histogram]) -> Iterator[_Family]:
    for some in _parts([*histograms.items()], _HISTOGRAMS_AT_ONCE):
        family = HistogramMetricFamily(name, text, labels=labels)
        for key, histogram in some:
            bounds = [*map(str, histogram.bounds), "+Inf"]  # of each how many values are at or below it
            family.add_metric(key, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total)
        yield family


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut into parts; what is empty is one empty part, so that its family has its heading."""
    for start in range(0, max(1, len(items)), size):
        yield items[start : start + size]
