"""The engine that has the least to do."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from pdrelay_proxy.core.model import ANY, Instance, InstanceId, RoutingHints

_MOST_REMEMBERED: Final = 4096  # engines; those that were chosen longest ago are forgotten


class LeastLoaded:
    """Looks at all; of equals, the one that was chosen longest ago.

    Turns that only count would be uneven: which engines are equal is another list each time.
    """

    def __init__(self, load: Callable[[Instance], float], turn: int = 0) -> None:
        self._load = load
        self._turn = turn
        # the turn of each engine's last choice, in their order
        self._chosen: dict[InstanceId, int] = {}

    def choose(self, among: Sequence[Instance], _hints: RoutingHints = ANY, /) -> Instance:
        """Return the least loaded engine."""
        equals: list[Instance] = []
        least = inf
        # one loop takes a third of a comprehension, ``min`` and another comprehension
        for instance in among:
            load = self._load(instance)
            if load < least:
                least = load
                equals = [instance]
            elif load == least:
                equals.append(instance)
        chosen = equals[0] if len(equals) == 1 else self._longest_ago(equals)
        self._chosen.pop(chosen.id, None)
        self._turn += 1
        self._chosen[chosen.id] = self._turn
        if len(self._chosen) > _MOST_REMEMBERED:
            del self._chosen[next(iter(self._chosen))]
        return chosen

    def _longest_ago(self, equals: Sequence[Instance]) -> Instance:
        turns = [self._chosen.get(instance.id, -1) for instance in equals]
        oldest = min(turns)
        if oldest >= 0:
            return equals[turns.index(oldest)]
        unknown = [instance for instance, turn in zip(equals, turns, strict=True) if turn < 0]
        return unknown[self._turn % len(unknown)]  # routers begin with different engines

    def copy(self) -> "LeastLoaded":
        """Return one that chooses alike, and whose choices leave no trace here."""
        alike = LeastLoaded(self._load, self._turn)
        alike._chosen = dict(self._chosen)  # its own
        return alike
