"""Detects when the traffic of a role has changed: means must not span the change.

Random arrivals (a Poisson process) double for a while now and then. So a change needs enough
requests: 24 in place of 12, or the reverse, happens by chance once in some hundred samples.
"""

from collections import deque
from typing import Final

_LATELY_S: Final = 10.0  # at least, since the change
_BEFORE_S: Final = 20.0  # at least, before it
_CHANGED: Final = 2.0  # factor between the rates of tokens
_ENOUGH: Final = 24.0  # requests since the change, or expected without it


class TrafficSteps:
    """The work of a role between consecutive samples, over the window of its means."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        # seconds, tokens, requests; the oldest first
        self._steps = deque[tuple[float, float, float]]()

    def add(self, elapsed_s: float, tokens: float, requests: float) -> int | None:
        """Add a step; return the number of steps since the traffic changed (None: no change).

        Steps before the change are forgotten.
        """
        steps = self._steps
        steps.append((elapsed_s, tokens, requests))
        all_s, all_tokens, all_requests = (sum(part) for part in zip(*steps, strict=True))
        while all_s - steps[0][0] >= self._window_s:
            oldest = steps.popleft()
            all_s = all_s - oldest[0]
            all_tokens = all_tokens - oldest[1]
            all_requests = all_requests - oldest[2]
        lately_s = lately_tokens = lately_requests = 0.0
        most = _CHANGED
        since = None
        for count, step in enumerate(reversed(steps), 1):
            lately_s = lately_s + step[0]
            lately_tokens = lately_tokens + step[1]
            lately_requests += step[2]
            before_s = all_s - lately_s
            if before_s < _BEFORE_S:
                break
            if lately_s < _LATELY_S:
                continue
            expected = (all_requests - lately_requests) / before_s * lately_s
            times = _times(lately_tokens / lately_s, (all_tokens - lately_tokens) / before_s)
            if max(expected, lately_requests) >= _ENOUGH and times >= most:
                most = times
                since = count
        if since is not None:
            for _ in range(len(steps) - since):
                steps.popleft()
        return since


def _times(rate: float, other_rate: float) -> float:
    """Return the ratio of the larger rate to the smaller one."""
    least, most = sorted((max(0.0, rate), max(0.0, other_rate)))
    return most / least if least else (float("inf") if most else 1.0)
