"""What one worker has counted, in a form that can be carried to another and added up there."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Final, TypeAlias, cast

import msgspec

from pdrelay_proxy.core.counters import Counters, Histogram, Histograms, Key
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.schemas import Bin
from pdrelay_proxy.core.schemas.roles import RolesPart

Places: TypeAlias = tuple[Sequence[int], float]  # of a histogram: counts and total


class Counts(msgspec.Struct, frozen=True):
    """All counters and histograms, by the name of the field of Counters."""

    counters: Mapping[str, Mapping[Key, int]] = {}
    histograms: Mapping[str, Mapping[Key, Places]] = {}


class Part(msgspec.Struct, frozen=True):
    """The numbers of the status page; the series have the oldest step first."""

    minute: Mapping[str, Bin]  # requests, ttft, gaps
    series: Mapping[str, Sequence[Bin]]
    legs: Mapping[InstanceId, Bin]  # the last minute's, by engine
    span: Mapping[InstanceId, Bin]  # the last five minutes', by engine
    answers: Mapping[InstanceId, Bin]  # the same, of the seconds until answers
    failures: Sequence[tuple[float, str, str, str]]  # seconds ago, request, where, reason
    roles: RolesPart | None = None  # of the worker that decides; None: another one does, or none


class WorkerReport(msgspec.Struct, frozen=True):
    """One worker, now."""

    worker: int
    starts: int  # workers of this number so far
    counts: Counts
    part: Part
    legs: Mapping[InstanceId, int]  # in flight, by engine
    waiting: int
    admitted: int
    max_concurrency: int  # its share of the router's; 0: it has ended, or does not answer
    refused: Mapping[str, int]
    process: Mapping[str, float]  # Prometheus' process metrics, by name
    unread: int = 0  # reports of peers that this worker could not read


class Whole(msgspec.Struct, frozen=True):
    """All workers of a router: who was asked, and the others as far as they can be read."""

    own: WorkerReport  # its part is empty: who reads it has that
    others: Sequence[WorkerReport]
    serving: int  # how many of all answer

    @property
    def all(self) -> Sequence[WorkerReport]:
        """List all of them."""
        return (self.own, *self.others)


EMPTY: Final = Part({}, {}, {}, {}, {}, ())


def counts_of(counters: Counters) -> Counts:
    """Write all that was counted."""
    counted, histograms = dict[str, Mapping[Key, int]](), dict[str, Mapping[Key, Places]]()
    for name, value in _values(counters):
        if isinstance(value, Counter):
            counted[name] = cast("Counter[Key]", value)
        elif isinstance(value, Histograms):
            histograms[name] = {key: (one.counts, one.total) for key, one in value.by_key.items()}
        elif isinstance(value, Histogram):
            histograms[name] = {(): (value.counts, value.total)}
    return Counts(counted, histograms)


def absorb(counters: Counters, counts: Counts) -> None:
    """Add what another has counted. What has another shape is another version's, and is left out."""
    for name, value in _values(counters):
        if isinstance(value, Counter):
            cast("Counter[Key]", value).update(counts.counters.get(name, {}))
        elif isinstance(value, Histograms):
            for key, places in counts.histograms.get(name, {}).items():
                _absorb(value.of(key), places)
        elif isinstance(value, Histogram):
            _absorb(value, counts.histograms.get(name, {}).get((), ((), 0.0)))


def bin_of(bins: Iterable[Bin]) -> Bin:
    """Add up what several workers have counted in the same seconds."""
    found = [one for one in bins if one.count]
    count = sum(one.count for one in found)
    total = sum((one.mean or 0.0) * one.count for one in found)
    worst = max((one.worst or 0.0 for one in found), default=None)
    return Bin(count, sum(one.failed for one in found), total / count if count else None, worst)


def _values(counters: Counters) -> Iterable[tuple[str, object]]:
    return [(field.name, getattr(counters, field.name)) for field in fields(counters)]


def _absorb(histogram: Histogram, places: Places) -> None:
    counts, total = places
    if len(counts) == len(histogram.counts):
        histogram.counts = [one + other for one, other in zip(histogram.counts, counts, strict=True)]
        histogram.total += total
