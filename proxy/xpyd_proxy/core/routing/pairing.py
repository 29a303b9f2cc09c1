"""Which engines may serve a request, and the choice among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Final, Protocol, Self, TypeAlias

from xpyd_proxy.core.expected_time import ExpectedTime
from xpyd_proxy.core.fleet import compatibility
from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import ANY, Instance, Role, RoutingHints, SingleEngineReason
from xpyd_proxy.errors import BadRequest, NoInstance, NoMatchingInstance, UnknownModel

Among: TypeAlias = Sequence[Instance]
Pair: TypeAlias = tuple[Instance, Instance]  # the prefill engine, and the decode engine
Fits: TypeAlias = Callable[[Instance, Instance], bool]  # whether a prefill and a decode engine can share a request


class Policy(Protocol):
    """Chooses the engine of one leg; the sequence is never empty."""

    def one(self, among: Among, ask: RoutingHints = ANY, /) -> Instance:
        """Return one of these engines."""
        ...

    def copy(self) -> Self:
        """Return one that chooses alike, and whose choices leave no trace here."""
        ...


class PairPolicy(Policy, Protocol):
    """Chooses both engines of a request, or the decode engine alone."""

    def pair(self, prefill: Among, decode: Among, ask: RoutingHints, fits: Fits, /) -> Pair:
        """Return two engines that fit; every engine of either side fits one of the other side."""
        ...


class WeighingPolicy(PairPolicy, Protocol):
    """A choice that knows what each engine would take for a request, and so whether it is worth two of them."""

    latest: ExpectedTime | None  # what is expected of the latest choice

    def cached(self, among: Among, ask: RoutingHints, /) -> int:
        """Return how many bytes of the prompt the decode engine has that ``one`` returns next for this request."""
        ...

    def alone(self, prefill: Among, decode: Among, ask: RoutingHints, /) -> bool:
        """Tell whether the decode engine that ``one`` returns next is expected to be faster than any pair."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyPerLeg:
    """A choice by one policy for each leg; they do not know of each other."""

    prefill: Policy
    decode: Policy
    decode_first: bool = False  # the other engine is chosen among those that fit this one

    def pair(self, prefill: Among, decode: Among, ask: RoutingHints, fits: Fits, /) -> Pair:
        """Return what each of them chooses."""
        if self.decode_first:
            first = self.decode.one(decode, ask)
            return self.prefill.one([instance for instance in prefill if fits(instance, first)], ask), first
        chosen = self.prefill.one(prefill, ask)
        return chosen, self.decode.one([instance for instance in decode if fits(chosen, instance)], ask)

    def one(self, among: Among, ask: RoutingHints = ANY, /) -> Instance:
        """Return what the decode policy chooses."""
        return self.decode.one(among, ask)

    def copy(self) -> "PolicyPerLeg":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return PolicyPerLeg(self.prefill.copy(), self.decode.copy(), self.decode_first)


_MOST_NAMED: Final = 4  # pairs in one message
_MOST_SEEN: Final = 64  # clients can think of models without end


@dataclass(frozen=True, slots=True)
class _Seen:
    """What some engines were narrowed down to, which stays true for as long as they and their facts are the same."""

    of: Sequence[object]
    prefill: Among
    decode: Among
    all_fit: bool  # each prefill engine fits each decode engine


@dataclass(frozen=True, slots=True)
class PairSelector:
    """Narrows the engines down to those that serve the model and fit together, and lets a choice choose."""

    registry: Registry
    choice: PairPolicy
    decode_cache: Callable[[Among, RoutingHints], int] | None = None  # None: the decode policy remembers nothing
    weighing: WeighingPolicy | None = None  # the choice, if it also decides whether a decode engine serves alone
    _seen: dict[tuple[str | None, int | None], _Seen] = field(
        default_factory=dict[tuple[str | None, int | None], _Seen]
    )
    _calm: dict[str | None, tuple[int, _Seen]] = field(default_factory=dict[str | None, tuple[int, _Seen]])

    def calm(self, ask: RoutingHints) -> Pair | None:
        """Return what ``pair`` would with all usable engines, if nothing has changed; None: only ``pair`` can tell."""
        version, seen = self._calm.get(ask.model) or (-1, None)
        if seen is None or version != self.registry.changes.count or ask.rank is not None:
            return None
        return self.choice.pair(seen.prefill, seen.decode, ask, compatibility.always if seen.all_fit else self._fits)

    def remember(self, ask: RoutingHints) -> None:
        """Remember what ``pair`` has just found among all usable engines, if time alone does not change it."""
        seen = self._seen.get((ask.model, ask.rank))
        if seen is not None and ask.rank is None and self.registry.is_calm:
            if len(self._calm) >= _MOST_SEEN:
                self._calm.clear()
            self._calm[ask.model] = self.registry.changes.count, seen

    def pair(self, prefill: Among, decode: Among, ask: RoutingHints = ANY, /) -> Pair:
        """Return two engines that can share it; raises UnknownModel, BadRequest (no such rank), or NoInstance."""
        members = [self.registry.get(instance.id) for instance in (*prefill, *decode)]
        if any(member is not None and member.life.state is HealthState.HALF_OPEN for member in members):
            narrowed = self._narrowed(prefill, decode, ask)
            return self.choice.pair(*self._matched(*self._with_trial(*narrowed, ask)), ask, self._fits)
        facts_now = [None if member is None else member.facts for member in members]
        of = [*prefill, None, *decode, *facts_now]
        seen = self._seen.get((ask.model, ask.rank))
        if seen is None or seen.of != of:
            left, right = self._narrowed(prefill, decode, ask)
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            all_fit = all(self._fits(p, d) for p in left for d in right)
            seen = self._seen[ask.model, ask.rank] = _Seen(of, left, right, all_fit)
        return self.choice.pair(seen.prefill, seen.decode, ask, compatibility.always if seen.all_fit else self._fits)

    def one(self, decode: Among, ask: RoutingHints = ANY, /) -> Instance:
        """Return the engine that serves the request, or its decode leg, alone; raises what ``pair`` raises."""
        return self.choice.one(self._alone(decode, ask), ask)

    def small(self, decode: Among, ask: RoutingHints, least: int) -> tuple[SingleEngineReason | None, int]:
        """Say why the engine that ``one`` would return serves a prompt alone, and how many bytes of it that engine has.

        It does if it lacks fewer than ``least`` bytes. Raises what ``pair`` raises.
        """
        if len(ask.prompt) < least:
            return SingleEngineReason.SHORT, 0
        cache = self.decode_cache if self.weighing is None else self.weighing.cached
        if not least or cache is None:
            return None, 0
        cached = cache(self._alone(decode, ask), ask)
        return (SingleEngineReason.CACHED if ask.blocks.size - cached < least else None), cached

    def is_faster_alone(self, prefill: Among, decode: Among, ask: RoutingHints) -> bool:
        """Tell whether the engine that ``one`` returns next is faster than any pair; raises what ``pair`` raises."""
        return self.weighing is not None and self.weighing.alone(*self._narrowed(prefill, decode, ask), ask)

    @property
    def expected(self) -> ExpectedTime | None:
        """What is expected of the latest choice; None: the policies do not ask for it."""
        return None if self.weighing is None else self.weighing.latest

    def copy(self) -> "PairSelector":
        """Return one that chooses alike, and whose choices leave no trace here."""
        if self.weighing is not None:
            weighing = self.weighing.copy()
            return PairSelector(self.registry, weighing, weighing=weighing)
        return PairSelector(self.registry, self.choice.copy(), self.decode_cache)

    def _alone(self, decode: Among, ask: RoutingHints) -> Among:
        """List the engines of which one may serve the request alone; one that waits for its trial gets it."""
        trying, well = self._sorted(self._serving(decode[0].role, decode, ask))
        return trying[:1] if trying and not (ask.again and well) else well

    def _narrowed(self, prefill: Among, decode: Among, ask: RoutingHints) -> tuple[Among, Among]:
        decode = self._serving(Role.DECODE, decode, ask)
        prefill = self._serving(Role.PREFILL, prefill, ask)
        return self._matched(*self._matched(prefill, decode))

    def _serving(self, role: Role, among: Among, ask: RoutingHints) -> Among:
        serving = (instance for instance in among if self.registry.facts(instance).serves(ask.model))
        found = [instance for instance in serving if _has_rank(instance, ask)]
        if found:
            return found
        members = [member for member in self.registry.members() if member.facts.serves(ask.model)]
        if not members:
            names = {name for member in self.registry.members() for name in member.facts.models or ()}
            there = ", ".join(sorted(names)) or "none"
            raise UnknownModel(f"the model {ask.model!r} is not served here; there is {there}")
        members = [member for member in members if member.instance.role is role]
        if not any(_has_rank(member.instance, ask) for member in members):
            if ask.rank is not None and role is Role.DECODE:
                raise BadRequest(f"X-data-parallel-rank is {ask.rank}, and no decode instance has this rank")
            raise NoInstance(f"no {role} instance serves the model {ask.model!r}")
        states = ", ".join(f"{member.instance.id} is {member.life.state}" for member in members)
        raise NoInstance(f"no {role} instance that would do can take a request now: {states}")

    def _matched(self, prefill: Among, decode: Among) -> tuple[Among, Among]:
        """Drop the engines that fit none of the other side. Raises NoInstance: none is left."""
        left = [p for p in prefill if any(self._fits(p, d) for d in decode)]
        if not left:
            raise NoMatchingInstance(
                f"no prefill instance fits a decode instance: {self._differences(prefill, decode)}"
            )
        return left, [d for d in decode if any(self._fits(p, d) for p in left)]

    def _differences(self, prefill: Among, decode: Among) -> str:
        """Name the first pairs that do not fit, and why."""
        facts = self.registry.facts
        pairs = islice(product(decode, prefill), _MOST_NAMED)
        named = [f"{d.id} with {p.id}: {compatibility.difference(facts(p), facts(d))}" for d, p in pairs]
        more = len(decode) * len(prefill) - len(named)
        return "; ".join([*named, f"and {more} more"] if more else named)

    def _with_trial(self, prefill: Among, decode: Among, ask: RoutingHints) -> tuple[Among, Among]:
        """If an engine waits for its trial, this request is it, with a partner that is well if there is one.

        A request that has failed before is on its last chances, and goes to engines that are well if there are any.
        """
        (trying_p, well_p), (trying_d, well_d) = self._sorted(prefill), self._sorted(decode)
        if ask.again and any(self._fits(p, d) for p in well_p for d in well_d):
            return well_p, well_d
        if trying_p:
            fits = any(self._fits(trying_p[0], d) for d in well_d)
            return trying_p[:1], well_d if fits else decode
        return prefill, trying_d[:1] or decode

    def _sorted(self, among: Among) -> tuple[Among, Among]:
        """Tell those that wait for their trial from those that are well."""
        trying = [
            instance
            for instance in among
            if (member := self.registry.get(instance.id)) is not None and member.life.state is HealthState.HALF_OPEN
        ]
        return trying, [instance for instance in among if instance not in trying] if trying else among

    def _fits(self, prefill: Instance, decode: Instance) -> bool:
        return compatibility.fit(self.registry.facts(prefill), self.registry.facts(decode))


def _has_rank(instance: Instance, ask: RoutingHints) -> bool:
    """Look for the rank that a client wants: it means the engine that answers, so prefill engines have them all."""
    return ask.rank is None or instance.rank in (None, ask.rank) or instance.role is Role.PREFILL
