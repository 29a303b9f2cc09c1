"""The percentile of measured values."""

from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that so many percent do not exceed (nearest rank).

    The values are sorted, and there is one at least.
    """
    return ordered[max(1, -(-len(ordered) * percent // 100)) - 1]
