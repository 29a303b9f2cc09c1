"""How much a decode engine computes alone at a time, so that its streams do not wait for long."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import auto

from pdrelay_proxy.core.counters import Key
from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, RoutingHints


class BoundOutcome(FastStrEnum):
    """What became of a prompt that a decode engine has nearly all of, and must not compute now."""

    MOVED = auto()  # another decode engine, which lacks more of it, serves it alone
    SPLIT = auto()  # a prefill engine computes it


class Holding:
    """The decode engines that serve a prompt alone, because they have nearly all of it.

    It does not change.
    """

    __slots__ = ("cached", "engines", "is_bound")

    def __init__(self, engines: Sequence[Instance], cached: int, *, is_bound: bool) -> None:
        self.engines = engines  # any of them; none: it is split
        # bytes of the prompt that each of them has; none: that the best engine has
        self.cached = cached
        self.is_bound = is_bound  # the bound has kept the prompt from an engine that has more of it


class AloneBound:
    """Tells whether an engine may compute a prompt beside those that it computes already."""

    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], float],
        spares: Callable[[Instance, RoutingHints], bool] | None = None,
    ) -> None:
        """``spares``: tells by measured times whether streams wait too long; None: bytes decide."""
        self._registry = registry
        self._clock = clock  # seconds; the one of the fleet
        self._spares = spares
        self.counts: Counter[Key] = Counter()  # BoundOutcome

    def has_room(self, instance: Instance, hints: RoutingHints, new: int, least: int) -> bool:
        """Tell whether an engine may compute so many bytes: with the others that it computes, fewer
        than ``least``.
        """
        member = self._registry.get(instance.id)
        if member is not None and member.lone.size(self._clock()) + new >= least:
            return False
        return self._spares is None or self._spares(instance, hints)

    def count(self, holding: Holding) -> None:
        """Count what became of a prompt."""
        if holding.is_bound:
            self.counts[(BoundOutcome.MOVED if holding.engines else BoundOutcome.SPLIT,)] += 1

    @property
    def outcome(self) -> str | None:
        """What was counted first; None: nothing was (for those that are asked once)."""
        return next((outcome for (outcome,) in self.counts), None)

    def copy(self) -> "AloneBound":
        """Return one that decides alike, and counts for itself."""
        return AloneBound(self._registry, self._clock, self._spares)

    def lone_bytes(self) -> Mapping[InstanceId, int]:
        """Return the new bytes of the prompts that engines compute alone now, of those that do."""
        now = self._clock()
        sizes = {member.instance.id: member.lone.size(now) for member in self._registry.members()}
        return {name: size for name, size in sizes.items() if size}
