"""The policy expected_ttft: the pair of engines with the earliest expected first token."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.model import ANY, Instance, RoutingHints
from pdrelay_proxy.core.routing.alone_bound import AloneBound, Holding
from pdrelay_proxy.core.routing.candidates import Among, Fits
from pdrelay_proxy.core.routing.pairing import Pair

# an engine with nearly all of a prompt may take so many times as long as the fastest one
LOYALTY: Final = 2.0
# choices that cost at most this share more than the best one are equal: one is drawn
NEAR: Final = 0.05
MOST: Final = 8  # engines of a role that are paired with each other
LOOKED_AT: Final = 64  # engines of a role whose cost is computed


class Costs(Protocol):
    """The expected costs of a request at each engine (engine_costs.py)."""

    @property
    def may_be_alone(self) -> bool:
        """Whether a decode engine ever computes a prompt alone because that is faster."""
        ...

    def prefill(self, instance: Instance, hints: RoutingHints, /) -> ExpectedTime:
        """Return the expected time of a prefill engine's part of a request."""
        ...

    def decode(self, instance: Instance, hints: RoutingHints, /) -> ExpectedTime:
        """Return the expected time of a decode engine's part, with the load of KV."""
        ...

    def alone(self, instance: Instance, hints: RoutingHints, /) -> ExpectedTime:
        """Return the expected time of a request that a decode engine serves alone."""
        ...

    def spares(self, alone: ExpectedTime, /) -> bool:
        """Tell whether the pause in a decode engine's streams is short enough."""
        ...

    def cached(self, instance: Instance, hints: RoutingHints, /) -> int:
        """Return how many bytes of the prompt a decode engine has."""
        ...

    def matched(self, instance: Instance, hints: RoutingHints, /) -> int:
        """Return how many bytes of the prompt an engine has, or will soon."""
        ...

    def recent(self, instance: Instance, /) -> float:
        """Return the tokens of the legs that an engine was sent lately."""
        ...


class _Priced:
    """An engine, and the expected time of its part."""

    __slots__ = ("cost_s", "expected", "instance")

    def __init__(self, instance: Instance, expected: ExpectedTime) -> None:
        self.instance = instance
        self.expected = expected
        self.cost_s = expected.cost_s


_T = TypeVar("_T", bound=Sequence[_Priced])


class ExpectedTtft:
    """Chooses both engines: the cost of a pair is the sum of its two engines' costs."""

    def __init__(self, costs: Costs, dice: Callable[[int], int]) -> None:
        self._costs = costs
        self._dice = dice  # dice(n): 0 to n-1
        # what is expected of the latest choice
        self._latest: tuple[RoutingHints, ExpectedTime] | None = None
        # the engine that `alone` has just found; `choose` uses it once
        self._alone: tuple[RoutingHints, _Priced] | None = None

    def pair(self, prefill: Among, decode: Among, hints: RoutingHints, fits: Fits, /) -> Pair:
        """Return the pair with the least cost, or nearly so."""
        self._alone = None
        priced_prefill = _sorted(
            [
                _Priced(engine, self._costs.prefill(engine, hints))
                for engine in self._few(prefill, hints)
            ]
        )
        priced_decode = _sorted(
            [
                _Priced(engine, self._costs.decode(engine, hints))
                for engine in self._few(decode, hints)
            ]
        )
        pairs = [
            (p, d)
            for p in priced_prefill[:MOST]
            for d in priced_decode[:MOST]
            if fits(p.instance, d.instance)
        ]
        if not pairs:  # every prefill engine fits some decode engine
            fitting = [engine for engine in decode if fits(priced_prefill[0].instance, engine)][
                :LOOKED_AT
            ]
            pairs = [
                (priced_prefill[0], _Priced(engine, self._costs.decode(engine, hints)))
                for engine in fitting
            ]
        least = min([p.cost_s + d.cost_s for p, d in pairs])
        near = [(p, d) for p, d in pairs if p.cost_s + d.cost_s <= least * (1.0 + NEAR)]
        best_p, best_d = near[0] if len(near) == 1 else self._less_used(near)
        self._latest = hints, best_p.expected.followed_by(best_d.expected)
        return best_p.instance, best_d.instance

    def choose(self, among: Among, hints: RoutingHints = ANY, /) -> Instance:
        """Return the decode engine that serves a request alone in the least time, or nearly so."""
        cached_choice = self._alone
        self._alone = None
        best = (
            self._best_alone(among, hints)
            if cached_choice is None or cached_choice[0] is not hints
            else cached_choice[1]
        )
        self._latest = hints, best.expected
        return best.instance

    def alone(self, prefill: Among, decode: Among, hints: RoutingHints, /) -> bool:
        """Tell whether one decode engine is expected to beat every pair, and spares its streams."""
        if not (self._costs.may_be_alone and hints.prompt):
            return False
        best = self._best_alone(decode, hints)
        if not self._costs.spares(best.expected):
            return False
        parts = min(
            [self._costs.prefill(engine, hints).cost_s for engine in self._few(prefill, hints)]
        )
        if best.cost_s > parts + min(
            [self._costs.decode(engine, hints).cost_s for engine in self._few(decode, hints)]
        ):
            return False
        self._alone = hints, best
        self._latest = hints, best.expected
        return True

    def holding(
        self, among: Among, hints: RoutingHints, least: int, bound: AloneBound, /
    ) -> Holding:
        """Return the engines with the most of a prompt cached, of those that lack fewer than
        ``least`` bytes and have room to compute these.

        Engines that would take more than LOYALTY times as long as the fastest one are left out.
        """
        engines = self._few(among, hints)
        size = hints.blocks.size
        sizes = [self._costs.cached(engine, hints) for engine in engines]
        lacking_few = [
            (cached, engine)
            for cached, engine in zip(sizes, engines, strict=True)
            if size - cached < least
        ]
        if not lacking_few:
            return Holding((), max(sizes), is_bound=False)
        most_s = LOYALTY * min([self._costs.alone(engine, hints).cost_s for engine in engines])
        near = [
            (cached, engine)
            for cached, engine in lacking_few
            if self._costs.alone(engine, hints).cost_s <= most_s
        ]
        free = [
            (cached, engine)
            for cached, engine in near
            if bound.has_room(engine, hints, size - cached, least)
        ]
        if not free:
            return Holding((), max(sizes), is_bound=bool(near))
        most = max([cached for cached, _ in free])
        is_bound = most < max([cached for cached, _ in near])
        return Holding(
            [engine for cached, engine in free if cached == most], most, is_bound=is_bound
        )

    def holders(self, among: Among, hints: RoutingHints, /) -> Among:
        """Return the decode engines with the most of a prompt cached, if that is more than half.

        If all engines have as much, none is returned.
        """
        sizes = [self._costs.matched(engine, hints) for engine in among]
        most = max(sizes)
        best = [engine for engine, size in zip(among, sizes, strict=True) if size == most]
        decides = most * 2 > len(hints.prompt) and (len(best) < len(among) or len(among) == 1)
        return best if decides else ()

    def copy(self) -> "ExpectedTtft":
        """Return a copy whose choices do not change this one."""
        return ExpectedTtft(self._costs, self._dice)

    def take_expected(self, hints: RoutingHints, /) -> ExpectedTime | None:
        """Return the expected time of the latest choice, once, if it was this request's."""
        latest = self._latest
        self._latest = None
        # also of one sent again
        return None if latest is None or latest[0].prompt is not hints.prompt else latest[1]

    def _few(self, among: Among, hints: RoutingHints) -> Among:
        """Return the engines to price: all, or of too many the best cached and random others."""
        if len(among) <= LOOKED_AT:
            return among
        matches = sorted(
            [(-self._costs.matched(engine, hints), place) for place, engine in enumerate(among)]
        )
        places = {place for _, place in matches[:MOST]}
        places.update([self._dice(len(among)) for _ in range(LOOKED_AT - MOST)])
        return [among[place] for place in sorted(places)]

    def _best_alone(self, among: Among, hints: RoutingHints) -> _Priced:
        options = [
            _Priced(engine, self._costs.alone(engine, hints)) for engine in self._few(among, hints)
        ]
        least = min([option.cost_s for option in options])
        near = [option for option in options if option.cost_s <= least * (1.0 + NEAR)]
        most = max([option.expected.decode_hit for option in near])
        # the engine that has the conversation is why a request is served alone
        if most * 2 > near[0].expected.tokens:
            near = [option for option in near if option.expected.decode_hit == most]
        return near[0] if len(near) == 1 else self._less_used([(option,) for option in near])[0]

    def _less_used(self, near: Sequence[_T]) -> _T:
        """Return the less used of two random choices: several routers must choose differently."""
        place = self._dice(len(near))
        second_place = (place + 1 + self._dice(len(near) - 1)) % len(near)
        first = near[place]
        second = near[second_place]
        return first if self._used(first) <= self._used(second) else second

    def _used(self, engines: Sequence[_Priced]) -> float:
        return sum([self._costs.recent(priced.instance) for priced in engines])


def _cost(priced: _Priced) -> float:
    return priced.cost_s


def _sorted(priced: Sequence[_Priced]) -> list[_Priced]:
    return sorted(priced, key=_cost)
