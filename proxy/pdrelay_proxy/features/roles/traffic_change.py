"""When the traffic of a role became another one: a mean over both is of neither.

Requests that come by chance (a Poisson process) are sometimes twice as many for a while. So there
must be enough of them to tell: 24 where 12 were expected, or the other way round, is chance once in
some hundred looks.
"""

from collections import deque
from typing import Final

_LATELY_S: Final = 10.0  # at least, since the change
_BEFORE_S: Final = 20.0  # at least, before it
_CHANGED: Final = 2.0  # times as many tokens, or as few
_ENOUGH: Final = 24.0  # requests since the change, or that would have come without it


class TrafficSteps:
    """What the engines of a role did from one look to the next, for as long as their numbers are
    means of.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        # seconds, tokens, requests; the oldest first
        self._steps = deque[tuple[float, float, float]]()

    def add(self, elapsed_s: float, tokens: float, requests: float) -> int | None:
        """Take in a step; return how many steps there are since the traffic changed; None: it did
        not.

        Steps before the change are forgotten.
        """
        steps = self._steps
        steps.append((elapsed_s, tokens, requests))
        all_s, all_tokens, all_requests = (sum(part) for part in zip(*steps, strict=True))
        while all_s - steps[0][0] >= self._window_s:
            gone = steps.popleft()
            all_s = all_s - gone[0]
            all_tokens = all_tokens - gone[1]
            all_requests = all_requests - gone[2]
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


def _times(one: float, two: float) -> float:
    """Return how many times as much the larger one is."""
    least, most = sorted((max(0.0, one), max(0.0, two)))
    return most / least if least else (float("inf") if most else 1.0)
