"""Families of metrics, built from counters in parts: the event loop serves requests between two
parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias, TypeVar, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from pdrelay_proxy.core.counters import Counters, Histogram, Histograms, Key
from pdrelay_proxy.core.steps import portions

T = TypeVar("T")
Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
SERIES_AT_ONCE: Final = 100  # of counters
_HISTOGRAMS_AT_ONCE: Final = 10  # some 25 lines each
# labels whose values are engines
_ENGINE_LABELS: Final = frozenset({"instance", "prefill", "decode"})


@dataclass(frozen=True, slots=True)
class CountedMetric:
    """A metric whose numbers are a field of Counters."""

    name: str
    labels: Sequence[str]
    field: str
    text: str


class CountedFamilies:
    """Builds families from counters. None is a pause between two parts."""

    def __init__(self, counters: Counters, known: frozenset[str]) -> None:
        self._counters = counters
        # engines in the fleet; series of engines that are gone are left out, though their last
        # legs may run
        self._known = known

    def family(self, metric: CountedMetric) -> Iterator[Family | None]:
        """Build the parts of a family of counters or of histograms."""
        numbers: Mapping[Key, int] | Histogram | Histograms = getattr(self._counters, metric.field)
        match numbers:
            case Histogram():
                yield histogram_family(metric.name, metric.text, metric.labels, [((), numbers)])
            case Histograms():
                for part in self._parts(metric.labels, numbers.by_key, _HISTOGRAMS_AT_ONCE):
                    yield histogram_family(metric.name, metric.text, metric.labels, part)
            case _:
                for counts in self._parts(metric.labels, numbers, SERIES_AT_ONCE):
                    yield from counter_family(metric.name, metric.text, metric.labels, counts)

    def _parts(
        self, labels: Sequence[str], values: Mapping[Key, T], size: int
    ) -> Iterator[Sequence[tuple[Key, T]]]:
        """Cut into parts, without the series of engines that are gone."""
        known = self._known
        places = [place for place, label in enumerate(labels) if label in _ENGINE_LABELS]
        for part in parts_of(list(values.items()), size):
            yield (
                [pair for pair in part if all(pair[0][place] in known for place in places)]
                if places
                else part
            )


def counter_family(
    name: str,
    text: str,
    labels: Sequence[str],
    counts: Mapping[Key, int] | Sequence[tuple[Key, int]],
) -> Iterator[Family]:
    """Build the parts of a family of counters."""
    items = cast(
        "Sequence[tuple[Key, int]]", list(counts.items()) if isinstance(counts, Mapping) else counts
    )
    for part in parts_of(items, SERIES_AT_ONCE):
        family = CounterMetricFamily(name, text, labels=labels)
        for key, count in part:
            family.add_metric(key, count)
        yield family


def histogram_family(
    name: str, text: str, labels: Sequence[str], histograms: Sequence[tuple[Key, Histogram]]
) -> Family:
    """Make a family of histograms."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, one in histograms:
        bounds = [*map(str, one.bounds), "+Inf"]  # of each how many values are at or below it
        family.add_metric(key, list(zip(bounds, accumulate(one.counts), strict=True)), one.total)
    return family


def gauge_family(
    name: str, text: str, labels: Sequence[str], values: Sequence[tuple[Key, float]]
) -> Family:
    """Build a family of gauges."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def gauge_families(
    name: str, text: str, labels: Sequence[str], values: Mapping[Key, float]
) -> Iterator[Family]:
    """Build the parts of a family of gauges."""
    for part in parts_of(list(values.items()), SERIES_AT_ONCE):
        yield gauge_family(name, text, labels, part)


def parts_of(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut into parts; of an empty sequence one, so that its family has a heading."""
    return portions(items, size) if items else iter((items,))
