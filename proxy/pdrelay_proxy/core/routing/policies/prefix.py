"""The engine that has the longest beginning of the prompt, while it is not overloaded."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from pdrelay_proxy.core.model import ANY, Instance, RoutingHints
from pdrelay_proxy.core.routing.alone_bound import AloneBound, Holding
from pdrelay_proxy.core.routing.pairing import Policy
from pdrelay_proxy.core.routing.policy_parts import PromptMatches

LEAST: Final = 256  # bytes: a shorter match counts if it is half of the prompt
# how much more load than the least loaded engine an engine may have and still be preferred
SLACK: Final = 4.0


class Prefix:
    """Prefers the longest match; equals and newcomers go by the other policy."""

    def __init__(
        self,
        load: Callable[[Instance], float],
        otherwise: Policy,
        caches: PromptMatches,
        *,
        notes: bool = True,
    ) -> None:
        self._load = load
        self._otherwise = otherwise
        self._caches = caches
        self._notes = notes

    def choose(self, among: Sequence[Instance], hints: RoutingHints = ANY, /) -> Instance:
        """Return the engine with the longest match that has room."""
        best = self._best(among, hints)
        chosen = best[0] if len(best) == 1 else self._otherwise.choose(best, hints)
        if self._notes and hints.prompt:
            self._caches.sent(chosen, hints)
        return chosen

    def holding(
        self, among: Sequence[Instance], hints: RoutingHints, least: int, bound: AloneBound, /
    ) -> Holding:
        """Return the engines with the most of a prompt that may compute the rest of it."""
        near = self._not_overloaded(among)
        size = hints.blocks.size
        sizes = self._caches.matches(near, hints, is_there=True)
        lowest = min(sizes)
        largest = 0
        most = -1
        most_few = -1
        holding: list[Instance] = []
        # one loop takes a third of comprehensions over ``zip``
        for place, matched in enumerate(sizes):
            cached = lowest if _is_short(matched, hints) else matched
            if cached > largest:  # noqa: PLR1730 (a call of ``max`` takes as long as the rest)
                largest = cached
            if size - cached >= least:
                continue
            if cached > most_few:  # noqa: PLR1730
                most_few = cached
            if cached < most or not bound.has_room(near[place], hints, size - cached, least):
                continue
            if cached > most:
                most = cached
                holding = []
            holding.append(near[place])
        if not holding:
            return Holding((), largest, is_bound=most_few >= 0)
        return Holding(holding, most, is_bound=most < most_few)

    def holders(self, among: Sequence[Instance], hints: RoutingHints) -> Sequence[Instance]:
        """List the engines that would be chosen for what they have in their cache; none, if that
        decides nothing.
        """
        best = self._best(among, hints)
        has_some = bool(hints.prompt) and self._caches.matches(best[:1], hints)[0] > 0
        return best if has_some and (len(best) < len(among) or len(among) == 1) else ()

    def copy(self) -> "Prefix":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return Prefix(self._load, self._otherwise.copy(), self._caches, notes=False)

    def _best(self, among: Sequence[Instance], hints: RoutingHints) -> Sequence[Instance]:
        if len(among) == 1 or not hints.prompt:
            return among
        among = self._not_overloaded(among)
        matches = self._caches.matches(among, hints)
        longest = max(matches)
        if _is_short(longest, hints) or longest == min(matches):
            return among
        return [among[place] for place, match in enumerate(matches) if match == longest]

    def _not_overloaded(self, among: Sequence[Instance]) -> Sequence[Instance]:
        loads: list[float] = []
        least = inf
        most = -inf
        for instance in among:  # one loop takes half of a comprehension, ``min`` and ``max``
            load = self._load(instance)
            loads.append(load)
            if load < least:  # noqa: PLR1730
                least = load
            if load > most:  # noqa: PLR1730
                most = load
        if most <= least + SLACK:
            return among
        return [among[place] for place, load in enumerate(loads) if load <= least + SLACK]


def _is_short(match: int, hints: RoutingHints) -> bool:
    """Tell whether so few bytes are in common that they are no reason to go somewhere."""
    return match < LEAST and match * 2 < len(hints.prompt)
