"""The less loaded of two engines that chance picks."""

from collections.abc import Callable, Sequence
from typing import Self

from pdrelay_proxy.core.model import ANY, Instance, RoutingHints


class PowerOfTwo:
    """Nearly as even as looking at all, and several routers do not all run to the same engine."""

    def __init__(self, load: Callable[[Instance], float], dice: Callable[[int], int]) -> None:
        self._load = load
        self._dice = dice  # dice(n): 0 to n-1

    def choose(self, among: Sequence[Instance], _hints: RoutingHints = ANY, /) -> Instance:
        """Return one of two different engines."""
        if len(among) == 1:
            return among[0]
        first = self._dice(len(among))
        second = (first + 1 + self._dice(len(among) - 1)) % len(among)
        engine = among[first]
        other = among[second]
        return engine if self._load(engine) <= self._load(other) else other

    def copy(self) -> Self:
        """Return itself: nothing is remembered."""
        return self
