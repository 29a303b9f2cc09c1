"""Which engines may serve a request, and the choice among them."""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Final, Protocol, Self, TypeAlias

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.fleet import compatibility
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import (
    ANY,
    Instance,
    InstanceId,
    Role,
    RoutingHints,
    SingleEngineReason,
)
from pdrelay_proxy.core.routing.alone_bound import AloneBound, Holding
from pdrelay_proxy.core.routing.candidates import Among, Candidates, Fits, Narrowed, serving
from pdrelay_proxy.core.routing.group_weights import FairRates, GroupShare, GroupTurns, Shares
from pdrelay_proxy.core.routing.pair_preference import PairPreference
from pdrelay_proxy.core.routing.share_bound import ShareBound, ShareBounds, make_room, without
from pdrelay_proxy.errors import NoInstance

Pair: TypeAlias = tuple[Instance, Instance]  # the prefill engine, and the decode engine
# likewise; None: the decode engine serves the request alone
Chosen: TypeAlias = tuple[Instance | None, Instance]


class Policy(Protocol):
    """Chooses the engine of one leg; the sequence is never empty."""

    def choose(self, among: Among, hints: RoutingHints = ANY, /) -> Instance:
        """Return one of these engines."""
        ...

    def copy(self) -> Self:
        """Return one that chooses alike, and whose choices leave no trace here."""
        ...


class PairPolicy(Policy, Protocol):
    """Chooses both engines of a request, or the decode engine alone."""

    def pair(self, prefill: Among, decode: Among, hints: RoutingHints, fits: Fits, /) -> Pair:
        """Return two engines that fit; every engine of either side fits one of the other side."""
        ...


class HolderPolicy(Protocol):
    """A policy for decode engines that knows what these have in their caches.

    Asking it leaves no trace.
    """

    def holding(
        self, among: Among, hints: RoutingHints, least: int, bound: AloneBound, /
    ) -> Holding:
        """Return the engines that lack fewer than ``least`` bytes of a prompt, and may compute
        these beside others.
        """
        ...

    def holders(self, among: Among, hints: RoutingHints, /) -> Among:
        """List the engines that would be chosen for what they have in their cache; none, if that
        decides nothing.
        """
        ...


class WeighingPolicy(PairPolicy, Protocol):
    """A choice that knows what each engine would take for a request, and so whether it is worth two
    of them.
    """

    def take_expected(self, hints: RoutingHints, /) -> ExpectedTime | None:
        """Return what was expected of the latest choice, once, if it was this request's."""
        ...

    def alone(self, prefill: Among, decode: Among, hints: RoutingHints, /) -> bool:
        """Tell whether the decode engine that ``one`` returns next is expected to be faster than
        any pair.
        """
        ...


class CacheWeighingPolicy(WeighingPolicy, HolderPolicy, Protocol):
    """One that also goes by what decode engines have in their caches."""


@dataclass(frozen=True, slots=True)
class PolicyPerLeg:
    """A choice by one policy for each leg; they do not know of each other."""

    prefill: Policy
    decode: Policy
    decode_first: bool = False  # the other engine is chosen among those that fit this one

    def pair(self, prefill: Among, decode: Among, hints: RoutingHints, fits: Fits, /) -> Pair:
        """Return what each of them chooses."""
        if self.decode_first:
            first = self.decode.choose(decode, hints)
            if fits is not compatibility.always:
                prefill = [instance for instance in prefill if fits(instance, first)]
            return self.prefill.choose(prefill, hints), first
        chosen = self.prefill.choose(prefill, hints)
        if fits is not compatibility.always:
            decode = [instance for instance in decode if fits(chosen, instance)]
        return chosen, self.decode.choose(decode, hints)

    def choose(self, among: Among, hints: RoutingHints = ANY, /) -> Instance:
        """Return what the decode policy chooses."""
        return self.decode.choose(among, hints)

    def copy(self) -> "PolicyPerLeg":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return PolicyPerLeg(self.prefill.copy(), self.decode.copy(), self.decode_first)


_NOBODY: Final = frozenset[InstanceId]()
# of the fleet, of which what they come down to is remembered: retries leave engines out
_MOST_PARTS: Final = 4


@dataclass(frozen=True, slots=True)
class _Calm:
    """What all usable engines come down to for a model, while nothing changes."""

    version: int  # the changes counted so far
    until: float  # when the passing of time may change it
    narrowed: Narrowed
    tells_alone: bool  # also which engines may serve alone


class _FoundHolders:
    """The engines of which one serves a prompt alone, as was found a moment ago."""

    __slots__ = ("_engines", "_prompt")

    def __init__(self) -> None:
        self._engines: Among = ()
        self._prompt: bytes | memoryview | None = None

    def keep(self, engines: Among, hints: RoutingHints) -> None:
        """Remember them until they are taken."""
        self._engines = engines
        self._prompt = hints.prompt

    def take(self, among: Among, hints: RoutingHints) -> Among:
        """Return those of some engines, once, if it was this prompt (or the request is sent
        again).
        """
        if self._prompt is not hints.prompt:
            return ()
        engines = self._engines
        self._engines = ()
        self._prompt = None
        return [instance for instance in engines if instance in among]


@dataclass(frozen=True, slots=True)
class PairSelector:
    """Narrows the engines down to those that serve the model and fit together, and lets a choice
    choose.

    With several groups of compatible engines, as during a rollout, the group is chosen first
    (group_weights). So it is with the groups into which a preference has divided them.
    """

    registry: Registry
    choice: PairPolicy
    holder: HolderPolicy | None = None  # the policy of decode engines; None: it remembers nothing
    bound: AloneBound | None = None  # for what decode engines compute alone; None: likewise
    turns: GroupTurns = field(default_factory=GroupTurns)
    # the choice, if it also decides whether a decode engine serves alone
    weighing: WeighingPolicy | None = None
    # Prefill engines that the cache of their policy prefers, where that of decode engines does not
    # decide.
    prefill_holders: Callable[[Among, RoutingHints], Among] | None = None
    # How much one engine gets while revisions are mixed; None: the policies see to it themselves.
    bounds: ShareBounds | None = None
    # a decode engine serves short prompts alone, though it has nothing of them
    short_alone: bool = True
    preference: PairPreference | None = None  # among engines that fit; None: any will do
    # all usable engines, as they were last
    _whole: list[Candidates] = field(default_factory=list[Candidates])
    # some of them, the latest last
    _parts: list[Candidates] = field(default_factory=list[Candidates])
    _found: _FoundHolders = field(default_factory=_FoundHolders)
    _calm: dict[str | None, _Calm] = field(default_factory=dict[str | None, _Calm])  # by model

    def calm(
        self, hints: RoutingHints, now: float = 0.0, *, may_be_alone: bool = False
    ) -> Chosen | None:
        """Return what ``pair`` would with all usable engines, if nothing has changed; None: only
        ``pair`` can tell.
        """
        calm = self._calm_now(hints, now)
        return (
            None if calm is None else self._choose(calm.narrowed, hints, may_be_alone=may_be_alone)
        )

    def calm_alone(self, hints: RoutingHints, now: float) -> Among | None:
        """Return the engines of which one may serve a request alone; None: nothing is remembered,
        as for ``calm``.
        """
        calm = self._calm_now(hints, now)
        return None if calm is None or not calm.tells_alone else calm.narrowed.alone

    def _calm_now(self, hints: RoutingHints, now: float) -> _Calm | None:
        calm = self._calm.get(hints.model)
        if calm is None or hints.rank is not None:
            return None
        return None if calm.version != self.registry.changes.count or now >= calm.until else calm

    def pair(
        self,
        prefill: Among,
        decode: Among,
        hints: RoutingHints = ANY,
        /,
        *,
        may_be_alone: bool = False,
        are_all: bool = False,
    ) -> Chosen:
        """Return two engines that can share it, or one where that is fairer (``may_be_alone``).

        ``are_all``: these are all usable engines, so that what is found holds for the next requests
        (``calm``). Raises UnknownModel, BadRequest (no such rank), or NoInstance.
        """
        among = self._candidates(self._whole if are_all else self._parts, prefill, decode)
        waiting = among.waiting(hints)
        if waiting:
            tried = self._pair_on_trial(among, waiting, hints, may_be_alone=may_be_alone)
            if tried is not None:
                return tried
            well = self._without(among, waiting)
            narrowed = well.narrowed(hints, may_be_alone=may_be_alone)
        else:
            narrowed = among.narrowed(hints, may_be_alone=may_be_alone)
        if are_all and hints.rank is None:
            if hints.model not in self._calm:
                make_room(self._calm, self.registry)
            until = min(self.registry.steady_until, self.registry.pair_history.trial_at)
            # one of these gets any request
            tells_alone = not waiting or not [d for d in decode if d.id in waiting]
            self._calm[hints.model] = _Calm(among.version, until, narrowed, tells_alone)
        return self._choose(narrowed, hints, may_be_alone=may_be_alone)

    def _candidates(self, known: list[Candidates], prefill: Among, decode: Among) -> Candidates:
        """Return these engines with what they come down to, as far as it is known."""
        for each in known:
            if each.is_for(prefill, decode):
                return each
        most = 1 if known is self._whole else _MOST_PARTS
        known[:] = [each for each in known if not each.is_old]
        if len(known) >= most:
            del known[0]
        is_bound = self.bounds is not None
        found = Candidates(
            self.registry, prefill, decode, is_bound=is_bound, preference=self.preference
        )
        known.append(found)
        return found

    def choose(self, decode: Among, hints: RoutingHints = ANY, /) -> Instance:
        """Return the engine that serves the request, or its decode leg, alone; raises what ``pair``
        raises.
        """
        among = self._within_bound(self._alone(decode, hints), hints)
        chosen = self.choice.choose(self._found.take(among, hints) or among, hints)
        rates = self._rates_alone(hints)
        if self.bounds is not None and rates is not None:
            self.bounds.of(hints.model).count(rates, (chosen,))
        return chosen

    def small(
        self, decode: Among, hints: RoutingHints, least: int, *, alone: Among | None = None
    ) -> tuple[SingleEngineReason | None, int]:
        """Say why the engine that ``one`` returns next serves a prompt alone, and how many bytes of
        it that engine has.

        It does if it lacks fewer than ``least`` bytes, those of others included that it computes
        alone now. ``alone``: those that may serve it alone, if they are known. Raises what ``pair``
        raises.
        """
        if self.short_alone and len(hints.prompt) < least:
            return SingleEngineReason.SHORT, 0
        if not least or self.holder is None or self.bound is None:
            return None, 0
        among = self._within_bound(self._alone(decode, hints) if alone is None else alone, hints)
        found = self.holder.holding(among, hints, least, self.bound)
        if not self.short_alone and not found.cached:
            return None, 0  # all of a short prompt is new
        self.bound.count(found)
        if not found.engines:
            return None, found.cached
        self._found.keep(found.engines, hints)
        return SingleEngineReason.CACHED, found.cached

    def is_faster_alone(self, prefill: Among, decode: Among, hints: RoutingHints) -> bool:
        """Tell whether the engine that ``one`` returns next is faster than any pair; raises what
        ``pair`` raises.
        """
        if self.weighing is None:
            return False
        prefill = serving(self.registry, Role.PREFILL, prefill, hints)
        # the engines that ``one`` looks at
        alone = self._within_bound(self._alone(decode, hints), hints)
        return self.weighing.alone(prefill, alone, hints)

    def take_expected(self, hints: RoutingHints) -> ExpectedTime | None:
        """Return what was expected of the latest choice, once, if it was this request's; None:
        nothing is weighed.
        """
        return None if self.weighing is None else self.weighing.take_expected(hints)

    def copy(self) -> "PairSelector":
        """Return one that chooses alike, and whose choices leave no trace here."""
        weighing = None if self.weighing is None else self.weighing.copy()
        return PairSelector(
            self.registry,
            self.choice.copy() if weighing is None else weighing,
            self.holder,
            None if self.bound is None else self.bound.copy(),
            self.turns.copy(),
            weighing,
            self.prefill_holders,
            None if self.bounds is None else self.bounds.copy(),
            self.short_alone,
            self.preference,
        )

    def _alone(self, decode: Among, hints: RoutingHints) -> Among:
        """List the engines of which one may serve the request alone; one that waits for its trial
        gets it.
        """
        trying, well = self._sorted(serving(self.registry, decode[0].role, decode, hints))
        return trying[:1] if trying and not (hints.again and well) else well

    def _within_bound(self, alone: Among, hints: RoutingHints) -> Among:
        """Leave the engines that may get more, if revisions are mixed and there are any."""
        rates = self._rates_alone(hints)
        if self.bounds is None or rates is None:
            return alone
        return without(alone, self.bounds.of(hints.model).exhausted()) or alone

    def _rates_alone(self, hints: RoutingHints) -> FairRates | None:
        """Return what each engine may get where one may serve alone, as ``pair`` has found it;
        None: any part.
        """
        calm = self._calm.get(hints.model)
        if calm is None or calm.version != self.registry.changes.count:
            return None
        return calm.narrowed.rates.get(True)

    def _choose(self, found: Narrowed, hints: RoutingHints, *, may_be_alone: bool) -> Chosen:
        """Choose a group, if there are several, and then its engines."""
        shares = found.shares_alone if may_be_alone else found.shares
        if shares is None:
            return self.choice.pair(
                found.prefill,
                found.decode,
                hints,
                compatibility.always if found.all_fit else found.fits,
            )
        rates = found.rates.get(may_be_alone)
        if self.bounds is not None and rates is not None:
            return self._choose_within(
                shares, rates, self.bounds.of(hints.model), hints, found.fits
            )
        share = self._share(shares, _NOBODY, hints)
        return self._choose_of(share, share.group.prefill, share.group.decode, hints, found.fits)

    def _choose_within(
        self, shares: Shares, rates: FairRates, bound: ShareBound, hints: RoutingHints, fits: Fits
    ) -> Chosen:
        """Choose likewise among engines that may get more; if a group has none of a role, another
        group serves.
        """
        out = bound.exhausted()
        first = share = self._share(shares, out, hints)
        sides = share.group.prefill, share.group.decode
        if out and share.group.all_fit:
            for each in (first, *self.turns.others(shares, first, hints.session)):
                prefill = without(each.group.prefill, out)
                decode = without(each.group.decode, out)
                if decode and (prefill or each.alone) and each.group.all_fit:
                    share = each
                    sides = (prefill, decode)
                    break
        if share is not first:
            self.turns.moved(first, share)
        chosen = self._choose_of(share, *sides, hints, fits)
        bound.count(rates, chosen)
        return chosen

    def _choose_of(
        self, share: GroupShare, prefill: Among, decode: Among, hints: RoutingHints, fits: Fits
    ) -> Chosen:
        if share.alone:
            return None, self.choice.choose(decode, hints)
        return self.choice.pair(
            prefill, decode, hints, compatibility.always if share.group.all_fit else fits
        )

    def _share(self, shares: Shares, out: Set[InstanceId], hints: RoutingHints) -> GroupShare:
        """Choose a share: that of a session, of an engine that has the prompt in its cache, or the
        next.

        ``out``: engines that are not asked for their caches.
        """
        share = None
        if len(shares.all) == 1:
            return shares.all[0]
        if hints.session is not None:
            return self.turns.of_session(shares, hints.session)
        if hints.prompt and self.holder is not None and (decode := without(shares.decode, out)):
            holders = self.holder.holders(decode, hints)
            share = self.turns.cached(shares, [instance.id for instance in holders])
        if (
            share is None
            and hints.prompt
            and self.prefill_holders is not None
            and (prefill := without(shares.prefill, out))
        ):
            holders = self.prefill_holders(prefill, hints)
            share = self.turns.cached(shares, [instance.id for instance in holders])
        return self.turns.next(shares) if share is None else share

    def _pair_on_trial(
        self,
        among: Candidates,
        waiting: frozenset[InstanceId],
        hints: RoutingHints,
        *,
        may_be_alone: bool,
    ) -> Chosen | None:
        """If an engine waits for its trial, this request is it, with a partner that is well if
        there is one.

        A request that has failed before is on its last chances, and goes to engines that are well
        if there are any. None: those that wait have no partner.
        """
        if hints.again:
            try:  # rests of pairs are respected: there may be another engine
                narrowed = self._without(among, waiting).narrowed(hints, may_be_alone=True)
            except NoInstance:
                pass
            else:
                return self._choose(narrowed, hints, may_be_alone=may_be_alone)
        found = among.narrowed(hints, may_be_alone=may_be_alone)
        prefill = found.prefill
        decode = found.decode
        fits = found.fits
        trying_p = [p for p in prefill if p.id in waiting]
        trying_d = [d for d in decode if d.id in waiting]
        if trying_p:
            prefill = trying_p[:1]
            fitting = [d for d in decode if d.id not in waiting and fits(prefill[0], d)]
            decode = self._near(prefill[0], fitting or [d for d in decode if fits(prefill[0], d)])
        elif trying_d:
            decode = trying_d[:1]
            prefill = self._near(decode[0], [p for p in prefill if fits(p, decode[0])])
        else:
            return None
        return self.choice.pair(prefill, decode, hints, compatibility.always)

    def _without(self, among: Candidates, waiting: frozenset[InstanceId]) -> Candidates:
        """Leave the engines that do not wait for their trial."""
        sides = [
            [one for one in side if one.id not in waiting] for side in (among.prefill, among.decode)
        ]
        return self._candidates(self._parts, *sides)

    def _near(self, engine: Instance, others: Among) -> Among:
        """Leave those that had better be its partner."""
        return others if self.preference is None else self.preference.nearest(engine, others)

    def _sorted(self, among: Among) -> tuple[Among, Among]:
        """Tell those that wait for their trial from those that are well."""
        trying = [
            instance
            for instance in among
            if (member := self.registry.get(instance.id)) is not None
            and member.life.state is HealthState.HALF_OPEN
        ]
        return trying, [
            instance for instance in among if instance not in trying
        ] if trying else among
