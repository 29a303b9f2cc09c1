"""The engine that has the least to do."""

from collections.abc import Callable, Sequence
from math import inf

from xpyd_proxy.core.model import ANY, Instance, RoutingHints


class LeastLoaded:
    """Looks at all; equals take turns."""

    def __init__(self, load: Callable[[Instance], float], turn: int = 0) -> None:
        self._load = load
        self._turn = turn

    def one(self, among: Sequence[Instance], _ask: RoutingHints = ANY, /) -> Instance:
        """Return the least loaded engine."""
        equals: list[Instance] = []
        least = inf
        for instance in among:  # one loop takes a third of a comprehension, ``min`` and another comprehension
            load = self._load(instance)
            if load < least:
                least, equals = load, [instance]
            elif load == least:
                equals.append(instance)
        if len(equals) > 1:
            self._turn += 1
        return equals[self._turn % len(equals)]

    def copy(self) -> "LeastLoaded":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return LeastLoaded(self._load, self._turn)
