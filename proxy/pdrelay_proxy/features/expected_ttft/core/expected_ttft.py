"""The engines whose first token is expected first."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.model import ANY, Instance, RoutingHints
from pdrelay_proxy.core.routing.alone_bound import AloneBound, Holding
from pdrelay_proxy.core.routing.candidates import Among, Fits
from pdrelay_proxy.core.routing.pairing import Pair

# times as long as the fastest one an engine may take for a prompt that it has nearly all of
LOYALTY: Final = 2.0
# choices that cost at most this part more than the best one are as good: chance picks one
NEAR: Final = 0.05
MOST: Final = 8  # of a role that are paired with each other
LOOKED_AT: Final = 64  # of a role whose cost is computed


class Costs(Protocol):
    """What it takes engines to serve a request, now (engine_costs.py)."""

    @property
    def may_be_alone(self) -> bool:
        """Whether a decode engine ever computes a prompt alone because that is faster."""
        ...

    def prefill(self, instance: Instance, hints: RoutingHints, /) -> ExpectedTime:
        """Return what a prefill engine's part of a request takes."""
        ...

    def decode(self, instance: Instance, hints: RoutingHints, /) -> ExpectedTime:
        """Return what a decode engine's part takes that gets what it lacks from a prefill
        engine.
        """
        ...

    def alone(self, instance: Instance, hints: RoutingHints, /) -> ExpectedTime:
        """Return what a request takes that a decode engine serves alone."""
        ...

    def spares(self, alone: ExpectedTime, /) -> bool:
        """Tell whether a decode engine can compute a prompt without a pause in its streams that is
        too long.
        """
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
    """An engine, and what its part of the request takes."""

    __slots__ = ("cost_s", "expected", "instance")

    def __init__(self, instance: Instance, expected: ExpectedTime) -> None:
        self.instance = instance
        self.expected = expected
        self.cost_s = expected.cost_s


_T = TypeVar("_T", bound=Sequence[_Priced])


class ExpectedTtft:
    """Chooses both engines by the sum of what their parts take: a pair costs what its two engines
    cost.
    """

    def __init__(self, costs: Costs, dice: Callable[[int], int]) -> None:
        self._costs = costs
        self._dice = dice  # dice(n): 0 to n-1
        # what is expected of the latest choice
        self._latest: tuple[RoutingHints, ExpectedTime] | None = None
        # the engine that serves a prompt alone, found just now
        self._alone: tuple[RoutingHints, _Priced] | None = None

    def pair(self, prefill: Among, decode: Among, hints: RoutingHints, fits: Fits, /) -> Pair:
        """Return the two engines that cost least, or nearly so."""
        self._alone = None
        left = _sorted(
            [_Priced(each, self._costs.prefill(each, hints)) for each in self._few(prefill, hints)]
        )
        right = _sorted(
            [_Priced(each, self._costs.decode(each, hints)) for each in self._few(decode, hints)]
        )
        pairs = [(p, d) for p in left[:MOST] for d in right[:MOST] if fits(p.instance, d.instance)]
        if not pairs:  # every prefill engine fits some decode engine
            fitting = [each for each in decode if fits(left[0].instance, each)][:LOOKED_AT]
            pairs = [(left[0], _Priced(each, self._costs.decode(each, hints))) for each in fitting]
        least = min([p.cost_s + d.cost_s for p, d in pairs])
        near = [(p, d) for p, d in pairs if p.cost_s + d.cost_s <= least * (1.0 + NEAR)]
        best_p, best_d = near[0] if len(near) == 1 else self._less_used(near)
        self._latest = hints, best_p.expected.followed_by(best_d.expected)
        return best_p.instance, best_d.instance

    def choose(self, among: Among, hints: RoutingHints = ANY, /) -> Instance:
        """Return the decode engine that serves a request alone in the least time, or nearly so."""
        known = self._alone
        self._alone = None
        best = (
            self._best_alone(among, hints) if known is None or known[0] is not hints else known[1]
        )
        self._latest = hints, best.expected
        return best.instance

    def alone(self, prefill: Among, decode: Among, hints: RoutingHints, /) -> bool:
        """Tell whether a decode engine alone is expected to be faster than any pair, and spares its
        streams.
        """
        if not (self._costs.may_be_alone and hints.prompt):
            return False
        best = self._best_alone(decode, hints)
        if not self._costs.spares(best.expected):
            return False
        parts = min([self._costs.prefill(each, hints).cost_s for each in self._few(prefill, hints)])
        if best.cost_s > parts + min(
            [self._costs.decode(each, hints).cost_s for each in self._few(decode, hints)]
        ):
            return False
        self._alone = hints, best
        self._latest = hints, best.expected
        return True

    def holding(
        self, among: Among, hints: RoutingHints, least: int, bound: AloneBound, /
    ) -> Holding:
        """Return the engines with the most of a prompt, of those that lack fewer bytes and may
        compute these.

        One is left only where another engine would serve it alone in less than half of the time.
        """
        looked = self._few(among, hints)
        size = hints.blocks.size
        sizes = [self._costs.cached(each, hints) for each in looked]
        few = [(each, one) for each, one in zip(sizes, looked, strict=True) if size - each < least]
        if not few:
            return Holding((), max(sizes), is_bound=False)
        loyal = LOYALTY * min([self._costs.alone(each, hints).cost_s for each in looked])
        near = [(each, one) for each, one in few if self._costs.alone(one, hints).cost_s <= loyal]
        free = [(each, one) for each, one in near if bound.has_room(one, hints, size - each, least)]
        if not free:
            return Holding((), max(sizes), is_bound=bool(near))
        most = max([each for each, _ in free])
        is_bound = most < max([each for each, _ in near])
        return Holding([one for each, one in free if each == most], most, is_bound=is_bound)

    def holders(self, among: Among, hints: RoutingHints, /) -> Among:
        """List the decode engines that have the most of a prompt, if that is most of it; none, if
        all have as much.
        """
        sizes = [self._costs.matched(each, hints) for each in among]
        most = max(sizes)
        best = [one for one, each in zip(among, sizes, strict=True) if each == most]
        decides = most * 2 > len(hints.prompt) and (len(best) < len(among) or len(among) == 1)
        return best if decides else ()

    def copy(self) -> "ExpectedTtft":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return ExpectedTtft(self._costs, self._dice)

    def take_expected(self, hints: RoutingHints, /) -> ExpectedTime | None:
        """Return what was expected of the latest choice, once, if it was this request's."""
        latest = self._latest
        self._latest = None
        # also of one sent again
        return None if latest is None or latest[0].prompt is not hints.prompt else latest[1]

    def _few(self, among: Among, hints: RoutingHints) -> Among:
        """Return those that have most of the prompt, and others that chance picks: all, unless they
        are too many.
        """
        if len(among) <= LOOKED_AT:
            return among
        matches = sorted(
            [(-self._costs.matched(each, hints), place) for place, each in enumerate(among)]
        )
        places = {place for _, place in matches[:MOST]}
        places.update([self._dice(len(among)) for _ in range(LOOKED_AT - MOST)])
        return [among[place] for place in sorted(places)]

    def _best_alone(self, among: Among, hints: RoutingHints) -> _Priced:
        priced = [_Priced(each, self._costs.alone(each, hints)) for each in self._few(among, hints)]
        least = min([each.cost_s for each in priced])
        near = [each for each in priced if each.cost_s <= least * (1.0 + NEAR)]
        most = max([each.expected.decode_hit for each in near])
        # it has the conversation, which is what being alone is for
        if most * 2 > near[0].expected.tokens:
            near = [each for each in near if each.expected.decode_hit == most]
        return near[0] if len(near) == 1 else self._less_used([(each,) for each in near])[0]

    def _less_used(self, near: Sequence[_T]) -> _T:
        """Return one of two that chance picks, so that several routers do not all choose the
        same.
        """
        first = self._dice(len(near))
        second = (first + 1 + self._dice(len(near) - 1)) % len(near)
        one = near[first]
        other = near[second]
        return one if self._used(one) <= self._used(other) else other

    def _used(self, engines: Sequence[_Priced]) -> float:
        return sum([self._costs.recent(each.instance) for each in engines])


def _cost(priced: _Priced) -> float:
    return priced.cost_s


def _sorted(priced: Sequence[_Priced]) -> list[_Priced]:
    return sorted(priced, key=_cost)
