"""Latencies of streams as clients see them, and their percentiles."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_tools.percentile import percentile

PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of one load, in seconds and sorted."""

    label: str  # who answered
    ttft: tuple[float, ...]  # from sending to the first token
    itl: tuple[float, ...]  # between tokens
    requests: int
    failed: int
    seconds: float  # of the whole load
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all requests."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def latencies(
    label: str, streams: Sequence[tuple[float, Sequence[float]]], *, failed: int, seconds: float
) -> Latencies:
    """Return the latencies of streams, each given by its time of sending and its tokens' times."""
    ttft = sorted(times[0] - sent_at for sent_at, times in streams if times)
    itl = sorted(
        later - earlier for _, times in streams for earlier, later in itertools.pairwise(times)
    )
    tokens = sum(len(times) for _, times in streams)
    return Latencies(label, tuple(ttft), tuple(itl), len(streams) + failed, failed, seconds, tokens)


def percentiles(ordered: Sequence[float]) -> dict[int, float | None]:
    """Return the PERCENTILES of sorted values; None: there are no values."""
    return {percent: percentile(ordered, percent) if ordered else None for percent in PERCENTILES}


def in_ms(ordered: Sequence[float]) -> str:
    """Write the PERCENTILES of sorted seconds."""
    values = percentiles(ordered).values()
    return " / ".join("-" if value is None else f"{value * 1e3:.1f}" for value in values)
