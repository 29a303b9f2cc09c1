"""What engines still have to do, and what one request takes by itself: what the targets of classes are held against.

Times are seconds, as measured of the router's own legs (io/request_path/engine_costs.py).
"""

from bisect import insort
from collections.abc import Iterable
from math import inf
from typing import TypeAlias

Step: TypeAlias = tuple[float, float, int]  # from token to token with one more stream; more with each; streams


class EngineOutlook:
    """The engines at one moment. What is admitted then is added, until they are looked at again."""

    __slots__ = ("queues", "steps")

    def __init__(self, queues: Iterable[float], steps: Iterable[Step] = ()) -> None:
        self.queues = sorted(queues)  # for which an engine that computes prompts is busy; the shortest first
        self.steps = sorted(steps)  # of decode engines, the fastest first; none: not measured

    @property
    def queue_s(self) -> float:
        """For how long every engine is busy that could compute a prompt."""
        return self.queues[0] if self.queues else 0.0

    @property
    def step_s(self) -> float:
        """The time between tokens of the best decode engine with one more stream; 0: not known."""
        return self.steps[0][0] if self.steps else 0.0

    @property
    def has_idle_decode(self) -> bool:
        """Whether a decode engine has no stream, or nothing is known of them."""
        return not self.steps or min([streams for _, _, streams in self.steps]) == 0

    def queue_with(self, compute_s: float) -> float:
        """Return for how long every engine is busy if one of them gets this request, too."""
        second = self.queues[1] if len(self.queues) > 1 else inf
        return min(self.queue_s + compute_s, second)

    def add(self, compute_s: float) -> None:
        """Give a request to the engines that are free first."""
        if self.queues:
            insort(self.queues, self.queues.pop(0) + compute_s)
        if self.steps:
            step_s, slope_s, streams = self.steps.pop(0)
            insort(self.steps, (step_s + slope_s, slope_s, streams + 1))


class OwnTimes:
    """What a request takes when nothing is before it. It does not change."""

    __slots__ = ("compute_s", "ttft_s")

    def __init__(self, compute_s: float, ttft_s: float) -> None:
        self.compute_s = compute_s  # of its prompt, as far as no engine has cached it
        self.ttft_s = ttft_s  # to its first token
