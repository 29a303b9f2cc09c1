"""The engine that has the least to do."""

from collections.abc import Callable, Sequence

from xpyd_proxy.core.model import ANY, Instance, RoutingHints


class LeastLoaded:
    """Looks at all; equals take turns."""

    def __init__(self, load: Callable[[Instance], float], turn: int = 0) -> None:
        self._load = load
        self._turn = turn

    def one(self, among: Sequence[Instance], _ask: RoutingHints = ANY, /) -> Instance:
        """Return the least loaded engine."""
        loads = [self._load(instance) for instance in among]
        least = min(loads)
        equals = [instance for instance, load in zip(among, loads, strict=True) if load == least]
        if len(equals) > 1:
            self._turn += 1
        return equals[self._turn % len(equals)]

    def copy(self) -> "LeastLoaded":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return LeastLoaded(self._load, self._turn)
