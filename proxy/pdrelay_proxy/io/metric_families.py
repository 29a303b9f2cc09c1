"""Families of metrics out of counters, in parts: the event loop serves requests between two of
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias, TypeVar, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from pdrelay_proxy.core.counters import Counters, Histogram, Histograms, Key

T = TypeVar("T")
Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
SERIES_AT_ONCE: Final = 100  # of counters
_HISTOGRAMS_AT_ONCE: Final = 10  # some 25 lines each
# those whose values are engines
_ENGINE_LABELS: Final = frozenset({"instance", "prefill", "decode"})


class CountedFamilies:
    """Makes families of counters. A part that is None has no text."""

    def __init__(self, counters: Counters, known: frozenset[str]) -> None:
        self._counters = counters
        # engines; series of others are left out: they have gone, and their last legs may not have
        self._known = known

    def counter(
        self, name: str, text: str, labels: Sequence[str], field: str
    ) -> Iterator[Family | None]:
        """Make one of a field of Counters."""
        values: Mapping[Key, int] = getattr(self._counters, field)
        for some in self._parts(labels, values, SERIES_AT_ONCE):
            yield from counter_family(name, text, labels, some)

    def histogram(
        self, name: str, text: str, labels: Sequence[str], field: str
    ) -> Iterator[Family | None]:
        """Make one of a field of Counters that has histograms by key, or is one."""
        value: Histogram | Histograms = getattr(self._counters, field)
        bounds = [*map(str, value.bounds), "+Inf"]  # of each how many values are at or below it
        found: Mapping[Key, Histogram] = (
            {(): value} if isinstance(value, Histogram) else value.by_key
        )
        for some in self._parts(labels, found, _HISTOGRAMS_AT_ONCE):
            family = HistogramMetricFamily(name, text, labels=labels)
            for key, one in some:
                family.add_metric(
                    key, list(zip(bounds, accumulate(one.counts), strict=True)), one.total
                )
            yield family

    def _parts(
        self, labels: Sequence[str], values: Mapping[Key, T], size: int
    ) -> Iterator[Sequence[tuple[Key, T]]]:
        """Cut into parts, without the series of engines that are not known."""
        known = self._known
        places = [place for place, label in enumerate(labels) if label in _ENGINE_LABELS]
        for some in parts_of(list(values.items()), size):
            yield (
                [pair for pair in some if all(pair[0][place] in known for place in places)]
                if places
                else some
            )


def counter_family(
    name: str,
    text: str,
    labels: Sequence[str],
    counts: Mapping[Key, int] | Sequence[tuple[Key, int]],
) -> Iterator[Family]:
    """Make the parts of a family of counters."""
    items = cast(
        "Sequence[tuple[Key, int]]", list(counts.items()) if isinstance(counts, Mapping) else counts
    )
    for some in parts_of(items, SERIES_AT_ONCE):
        family = CounterMetricFamily(name, text, labels=labels)
        for key, count in some:
            family.add_metric(key, count)
        yield family


def gauge_family(
    name: str, text: str, labels: Sequence[str], values: Sequence[tuple[Key, float]]
) -> Family:
    """Make a family of gauges."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def gauge_families(
    name: str, text: str, labels: Sequence[str], values: Mapping[Key, float]
) -> Iterator[Family]:
    """Make the parts of a family of gauges."""
    for some in parts_of(list(values.items()), SERIES_AT_ONCE):
        yield gauge_family(name, text, labels, some)


def parts_of(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut into parts; what is empty is one empty part, so that its family has its heading."""
    for start in range(0, max(1, len(items)), size):
        yield items[start : start + size]
