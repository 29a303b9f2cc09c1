"""The counters in Prometheus' words. prometheus_client stops at this file.

Requests and legs add to plain numbers (core/measures.py); they become metrics only while somebody scrapes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from xpyd_proxy.core.discovery import Freshness
from xpyd_proxy.core.measures import Histogram, Key
from xpyd_proxy.core.ports import Census, Queue
from xpyd_proxy.io.sight import Sight

_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Metrics:
    """What ``GET /metrics`` says. Every router has its own registry; nothing is global."""

    def __init__(
        self,
        sight: Sight,
        census: Census,
        queue: Queue | None = None,
        sources: Callable[[], Sequence[Freshness]] = tuple,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(sight, census, queue, sources))
        ProcessCollector(registry=self._registry)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type, in the format that an ``Accept`` header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Collector:
    """Makes metrics out of the numbers, in the order in which an operator reads them."""

    def __init__(
        self, sight: Sight, census: Census, queue: Queue | None, sources: Callable[[], Sequence[Freshness]]
    ) -> None:
        self._sight = sight
        self._census = census
        self._queue = queue
        self._sources = sources

    def collect(self) -> Iterator[_Family]:
        """Read everything once."""
        known = frozenset(standing.instance.id for standing in self._census.standings())
        self._sight.keep(known)
        yield from self._requests()
        yield from self._legs()
        yield from self._transfers()
        yield from self._instances()
        if self._queue is not None:
            yield from _queue(self._queue)
        yield from _discovery(self._sources())

    def _requests(self) -> Iterator[_Family]:
        seen = self._sight.measures
        text = "Requests that are over, by path and by how they ended for the client."
        yield _counter("xpyd_requests", text, ("path", "ending"), seen.requests)
        text = "Requests that an engine answered or failed, by the way they took: one leg after the other, push, solo."
        yield _counter("xpyd_requests_routed", text, ("route",), seen.routes)
        text = "Legs that failed and were sent again, by the role of the engine and the reason."
        yield _counter("xpyd_retries", text, ("role", "reason"), seen.retries)
        text = "Seconds from a client's request to the first event of its stream."
        yield _histogram("xpyd_time_to_first_token_seconds", text, ("path",), seen.ttft.by_key)

    def _legs(self) -> Iterator[_Family]:
        seen = self._sight.measures
        text = "Legs that are over, by engine and by how they ended; ok: also those that nobody needed any more."
        yield _counter("xpyd_legs", text, ("instance", "role", "outcome"), seen.legs)
        text = "Seconds until an engine's answer was there: all of it (prefill), its first event (decode)."
        yield _histogram("xpyd_leg_answer_seconds", text, ("instance", "role"), seen.answers.by_key)

    def _transfers(self) -> Iterator[_Family]:
        seen = self._sight.measures
        text = "Seconds between a prefill engine's answer and the sending of the decode leg."
        yield _histogram("xpyd_handoff_gap_seconds", text, (), {(): seen.gap})
        text = "Attempts to have a prefill engine free blocks that nobody will read."
        yield _counter("xpyd_releases", text, ("instance", "outcome"), seen.releases)
        text = "Good decode legs with a transfer, by whether the KV cache had arrived; none: silent degradation."
        yield _counter("xpyd_decode_kv", text, ("instance", "kv"), seen.arrivals)
        text = "Decode legs that certainly got no KV cache, by their answers or by the engine's own counters."
        yield _counter("xpyd_decode_without_kv", text, ("instance",), seen.without_kv)
        text = "Requests of which the two engines made different prompts: their answers are not to be trusted."
        yield _counter("xpyd_prompt_mismatches", text, ("prefill", "decode"), seen.mismatches)

    def _instances(self) -> Iterator[_Family]:
        state = GaugeMetricFamily(
            "xpyd_instance_state",
            "1 for the state an engine is in, 0 for the others.",
            labels=("instance", "role", "state"),
        )
        legs = GaugeMetricFamily("xpyd_legs_in_flight", "Legs an engine has now.", labels=("instance", "role"))
        for standing in self._census.standings():
            names = (standing.instance.id, standing.instance.role)
            legs.add_metric(names, self._sight.legs.in_flight.get(standing.instance.id, 0))
            for word in self._census.states():
                state.add_metric((*names, word), word == standing.state)
        yield from (state, legs)


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


def _queue(queue: Queue) -> Iterator[_Family]:
    yield GaugeMetricFamily("xpyd_queue_waiting", "Requests that wait to be let in.", value=queue.waiting)
    yield GaugeMetricFamily("xpyd_requests_admitted", "Requests that are being served.", value=queue.admitted)
    refused: dict[Key, int] = {(limit,): count for limit, count in queue.refused.items()}
    yield _counter("xpyd_requests_refused", "Requests that were not let in, by reason.", ("reason",), refused)


def _counter(name: str, text: str, labels: Sequence[str], counts: Mapping[Key, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, count in counts.items():
        family.add_metric(key, count)
    return family


def _histogram(
    name: str, text: str, labels: Sequence[str], histograms: Mapping[Key, Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, histogram in histograms.items():
        family.add_metric(key, list(_buckets(histogram)), histogram.total)
    return family


def _buckets(histogram: Histogram) -> Iterable[tuple[str, int]]:
    """Return how many values each bound has at or below it, as Prometheus counts."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return zip(bounds, accumulate(histogram.counts), strict=True)
