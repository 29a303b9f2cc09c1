"""Families of metrics out of counters, in parts: the event loop serves requests between two of them."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias, TypeVar, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from pdrelay_proxy.core.counters import Counters, Histogram, Histograms, Key
from pdrelay_proxy.core.workers.reports import Counts, Places

T = TypeVar("T")
Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
SERIES_AT_ONCE: Final = 100  # of counters
_HISTOGRAMS_AT_ONCE: Final = 10  # some 25 lines each
_SUMS_AT_ONCE: Final = 2_000  # of numbers, while those of several workers are added up
_ENGINE_LABELS: Final = frozenset({"instance", "prefill", "decode"})  # those whose values are engines


class CountedFamilies:
    """Makes families of the counters of one worker and those of the others. A part that is None has no text."""

    def __init__(self, counters: Counters, others: Sequence[Counts], known: frozenset[str]) -> None:
        self._counters = counters
        self._others = others
        self._known = known  # engines; series of others are left out: they have gone, and their last legs may not have

    def counter(self, name: str, text: str, labels: Sequence[str], field: str) -> Iterator[Family | None]:
        """Make one of a field of Counters."""
        values = yield from self._sums(field)
        for some in self._parts(labels, values, SERIES_AT_ONCE):
            yield from counter_family(name, text, labels, some)

    def gauge(self, name: str, text: str, labels: Sequence[str], field: str) -> Iterator[Family | None]:
        """Make one of a field of Counters that says how something is now."""
        values = yield from self._sums(field)
        for some in self._parts(labels, values, SERIES_AT_ONCE):
            family = GaugeMetricFamily(name, text, labels=labels)
            for key, value in some:
                family.add_metric(key, value)
            yield family

    def histogram(self, name: str, text: str, labels: Sequence[str], field: str) -> Iterator[Family | None]:
        """Make one of a field of Counters that has histograms by key, or is one."""
        value: Histogram | Histograms = getattr(self._counters, field)
        bounds = [*map(str, value.bounds), "+Inf"]  # of each how many values are at or below it
        found: Mapping[Key, Histogram] = {(): value} if isinstance(value, Histogram) else value.by_key
        if self._others:
            found = yield from self._added(found, field, value.bounds)
        for some in self._parts(labels, found, _HISTOGRAMS_AT_ONCE):
            family = HistogramMetricFamily(name, text, labels=labels)
            for key, one in some:
                family.add_metric(key, list(zip(bounds, accumulate(one.counts), strict=True)), one.total)
            yield family

    def _parts(self, labels: Sequence[str], values: Mapping[Key, T], size: int) -> Iterator[Sequence[tuple[Key, T]]]:
        """Cut into parts, without the series of engines that are not known."""
        known, places = self._known, [place for place, label in enumerate(labels) if label in _ENGINE_LABELS]
        for some in parts_of(list(values.items()), size):
            yield [pair for pair in some if all(pair[0][place] in known for place in places)] if places else some

    def _sums(self, field: str) -> Generator[None, None, Mapping[Key, int]]:
        own: Mapping[Key, int] = getattr(self._counters, field)
        if not self._others:
            return own
        sums = dict(own)
        for counts in self._others:
            for some in parts_of(list(counts.counters.get(field, {}).items()), _SUMS_AT_ONCE):
                for key, count in some:
                    sums[key] = sums.get(key, 0) + count
                yield
        return sums

    def _added(
        self, own: Mapping[Key, Histogram], field: str, bounds: Sequence[float]
    ) -> Generator[None, None, Mapping[Key, Histogram]]:
        """Add up; what has another shape is another version's, and is left out."""
        sums = dict[Key, Histogram]()
        sources: list[Mapping[Key, Places]] = [{key: (one.counts, one.total) for key, one in own.items()}]
        sources += [counts.histograms.get(field, {}) for counts in self._others]
        for source in sources:
            for some in parts_of(list(source.items()), max(1, _SUMS_AT_ONCE // (len(bounds) + 1))):
                for key, (counts, total) in some:
                    if len(counts) == len(bounds) + 1:
                        into = sums.setdefault(key, Histogram(bounds))
                        into.counts = [a + b for a, b in zip(into.counts, counts, strict=True)]
                        into.total += total
                yield
        return sums


def counter_family(
    name: str, text: str, labels: Sequence[str], counts: Mapping[Key, int] | Sequence[tuple[Key, int]]
) -> Iterator[Family]:
    """Make the parts of a family of counters."""
    items = cast("Sequence[tuple[Key, int]]", list(counts.items()) if isinstance(counts, Mapping) else counts)
    for some in parts_of(items, SERIES_AT_ONCE):
        family = CounterMetricFamily(name, text, labels=labels)
        for key, count in some:
            family.add_metric(key, count)
        yield family


def parts_of(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut into parts; what is empty is one empty part, so that its family has its heading."""
    for start in range(0, max(1, len(items)), size):
        yield items[start : start + size]
