"""Which engines may serve a request, and the choice among them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Final, Protocol, Self, TypeAlias

from xpyd_proxy.core.expected_time import ExpectedTime
from xpyd_proxy.core.fleet import compatibility
from xpyd_proxy.core.fleet.compatibility import EngineCapabilities
from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import ANY, Instance, InstanceId, Role, RoutingHints, SingleEngineReason
from xpyd_proxy.core.routing.alone_bound import AloneBound, Holding
from xpyd_proxy.core.routing.compatible_groups import Grouping, group_engines
from xpyd_proxy.core.routing.group_weights import GroupShare, GroupTurns, Shares, shares_of
from xpyd_proxy.core.routing.share_bound import ShareBound, ShareBounds, without
from xpyd_proxy.core.routing.slices import divide_by_slice, nearest
from xpyd_proxy.errors import BadRequest, NoInstance, NoMatchingInstance, UnknownModel
from xpyd_proxy.settings import SlicePairing

Among: TypeAlias = Sequence[Instance]
Pair: TypeAlias = tuple[Instance, Instance]  # the prefill engine, and the decode engine
Chosen: TypeAlias = tuple[Instance | None, Instance]  # likewise; None: the decode engine serves the request alone
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


class HolderPolicy(Protocol):
    """A policy for decode engines that knows what these have in their caches. Asking it leaves no trace."""

    def holding(self, among: Among, ask: RoutingHints, least: int, bound: AloneBound, /) -> Holding:
        """Return the engines that lack fewer than ``least`` bytes of a prompt, and may compute these beside others."""
        ...

    def holders(self, among: Among, ask: RoutingHints, /) -> Among:
        """List the engines that would be chosen for what they have in their cache; none, if that decides nothing."""
        ...


class WeighingPolicy(PairPolicy, Protocol):
    """A choice that knows what each engine would take for a request, and so whether it is worth two of them."""

    latest: ExpectedTime | None  # what is expected of the latest choice

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
            if fits is not compatibility.always:
                prefill = [instance for instance in prefill if fits(instance, first)]
            return self.prefill.one(prefill, ask), first
        chosen = self.prefill.one(prefill, ask)
        if fits is not compatibility.always:
            decode = [instance for instance in decode if fits(chosen, instance)]
        return chosen, self.decode.one(decode, ask)

    def one(self, among: Among, ask: RoutingHints = ANY, /) -> Instance:
        """Return what the decode policy chooses."""
        return self.decode.one(among, ask)

    def copy(self) -> "PolicyPerLeg":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return PolicyPerLeg(self.prefill.copy(), self.decode.copy(), self.decode_first)


_UNBOUND: Final[Mapping[bool, Mapping[InstanceId, float]]] = {True: {}, False: {}}
_MOST_NAMED: Final = 4  # pairs in one message
_MOST_SEEN: Final = 64  # clients can think of models without end


@dataclass(frozen=True, slots=True)
class _Seen:
    """What some engines were narrowed down to, which stays true for as long as they and their facts are the same."""

    of: Sequence[object]
    prefill: Among
    decode: Among
    alone: Among  # those of which one may serve a request alone
    all_fit: bool  # each prefill engine fits each decode engine
    shares: Shares | None  # None: there is one group of all of them, and nothing to divide
    shares_alone: Shares | None  # the same where decode engines may serve alone
    fits: Fits  # for groups in which not all fit
    # By whether decode engines may serve alone: the part of the requests that each engine may get; empty: any.
    rates: Mapping[bool, Mapping[InstanceId, float]]


class _FoundHolders:
    """The engines of which one serves a prompt alone, as was found a moment ago."""

    __slots__ = ("_engines", "_prompt")

    def __init__(self) -> None:
        self._engines: Among = ()
        self._prompt: bytes | memoryview | None = None

    def keep(self, engines: Among, ask: RoutingHints) -> None:
        """Remember them until they are taken."""
        self._engines, self._prompt = engines, ask.prompt

    def take(self, among: Among, ask: RoutingHints) -> Among:
        """Return those of some engines, once, if it was this prompt (or the request is sent again)."""
        if self._prompt is not ask.prompt:
            return ()
        engines, self._engines, self._prompt = self._engines, (), None
        return [instance for instance in engines if instance in among]


@dataclass(frozen=True, slots=True)
class PairSelector:
    """Narrows the engines down to those that serve the model and fit together, and lets a choice choose.

    With several groups of compatible engines, as during a rollout, the group is chosen first (group_weights), and so is
    the slice, if there are several that count (slices).
    """

    registry: Registry
    choice: PairPolicy
    holder: HolderPolicy | None = None  # the policy of decode engines; None: it remembers nothing
    bound: AloneBound | None = None  # for what decode engines compute alone; None: likewise
    turns: GroupTurns = field(default_factory=GroupTurns)
    weighing: WeighingPolicy | None = None  # the choice, if it also decides whether a decode engine serves alone
    # Prefill engines that the cache of their policy prefers, where that of decode engines does not decide.
    prefill_holders: Callable[[Among, RoutingHints], Among] | None = None
    # How much one engine gets while revisions are mixed; None: the policies see to it themselves.
    bounds: ShareBounds | None = None
    _seen: dict[tuple[str | None, int | None], _Seen] = field(
        default_factory=dict[tuple[str | None, int | None], _Seen]
    )
    _found: _FoundHolders = field(default_factory=_FoundHolders)
    # By model: the changes counted so far, when time may change the choice, and what was seen.
    _calm: dict[str | None, tuple[int, float, _Seen]] = field(
        default_factory=dict[str | None, tuple[int, float, _Seen]]
    )

    def calm(self, ask: RoutingHints, now: float = 0.0, *, may_be_alone: bool = False) -> Chosen | None:
        """Return what ``pair`` would with all usable engines, if nothing has changed; None: only ``pair`` can tell."""
        seen = self._calm_seen(ask, now)
        return None if seen is None else self._choose(seen, ask, may_be_alone=may_be_alone)

    def calm_alone(self, ask: RoutingHints, now: float) -> Among | None:
        """Return the engines of which one may serve a request alone; None: nothing is remembered, as for ``calm``."""
        seen = self._calm_seen(ask, now)
        return None if seen is None else seen.alone

    def _calm_seen(self, ask: RoutingHints, now: float) -> _Seen | None:
        remembered = self._calm.get(ask.model)
        if remembered is None or ask.rank is not None:
            return None
        version, until, seen = remembered
        return None if version != self.registry.changes.count or now >= until else seen

    def remember(self, ask: RoutingHints) -> None:
        """Remember what ``pair`` has just found among all usable engines, until time alone changes it."""
        seen = self._seen.get((ask.model, ask.rank))
        if seen is not None and ask.rank is None:
            if len(self._calm) >= _MOST_SEEN:
                self._calm.clear()
            self._calm[ask.model] = self.registry.changes.count, self.registry.calm_until, seen

    def pair(self, prefill: Among, decode: Among, ask: RoutingHints = ANY, /, *, may_be_alone: bool = False) -> Chosen:
        """Return two engines that can share it, or one where that is fairer (``may_be_alone``).

        Raises UnknownModel, BadRequest (no such rank), or NoInstance.
        """
        members = [self.registry.get(instance.id) for instance in (*prefill, *decode)]
        if any(member is not None and member.life.state is HealthState.HALF_OPEN for member in members):
            return self._pair_on_trial(prefill, decode, ask, may_be_alone=may_be_alone)
        facts_now = [None if member is None else member.facts for member in members]
        of = [*prefill, None, *decode, *facts_now]
        seen = self._seen.get((ask.model, ask.rank))
        if seen is None or seen.of != of:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            serving = self._serving_both(prefill, decode, ask)
            seen = self._seen[ask.model, ask.rank] = self._look(of, *serving, may_be_alone=may_be_alone)
        return self._choose(seen, ask, may_be_alone=may_be_alone)

    def one(self, decode: Among, ask: RoutingHints = ANY, /) -> Instance:
        """Return the engine that serves the request, or its decode leg, alone; raises what ``pair`` raises."""
        among = self._within_bound(self._alone(decode, ask), ask)
        chosen = self.choice.one(self._found.take(among, ask) or among, ask)
        rates = self._rates_alone(ask)
        if self.bounds is not None and rates:
            self.bounds.of(ask.model).count(rates, (chosen,))
        return chosen

    def small(
        self, decode: Among, ask: RoutingHints, least: int, *, alone: Among | None = None
    ) -> tuple[SingleEngineReason | None, int]:
        """Say why the engine that ``one`` returns next serves a prompt alone, and how many bytes of it that engine has.

        It does if it lacks fewer than ``least`` bytes, those of others included that it computes alone now. ``alone``:
        those that may serve it alone, if they are known. Raises what ``pair`` raises.
        """
        if len(ask.prompt) < least:
            return SingleEngineReason.SHORT, 0
        if not least or self.holder is None or self.bound is None:
            return None, 0
        among = self._within_bound(self._alone(decode, ask) if alone is None else alone, ask)
        found = self.holder.holding(among, ask, least, self.bound)
        self.bound.count(found)
        if not found.engines:
            return None, found.cached
        self._found.keep(found.engines, ask)
        return SingleEngineReason.CACHED, found.cached

    def is_faster_alone(self, prefill: Among, decode: Among, ask: RoutingHints) -> bool:
        """Tell whether the engine that ``one`` returns next is faster than any pair; raises what ``pair`` raises."""
        if self.weighing is None:
            return False
        serving = self._serving(Role.PREFILL, prefill, ask)
        alone = self._within_bound(self._alone(decode, ask), ask)  # the engines that ``one`` looks at
        return self.weighing.alone(serving, alone, ask)

    @property
    def expected(self) -> ExpectedTime | None:
        """What is expected of the latest choice; None: the policies do not ask for it."""
        return None if self.weighing is None else self.weighing.latest

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
        )

    def _alone(self, decode: Among, ask: RoutingHints) -> Among:
        """List the engines of which one may serve the request alone; one that waits for its trial gets it."""
        trying, well = self._sorted(self._serving(decode[0].role, decode, ask))
        return trying[:1] if trying and not (ask.again and well) else well

    def _within_bound(self, alone: Among, ask: RoutingHints) -> Among:
        """Leave the engines that may get more, if revisions are mixed and there are any."""
        rates = self._rates_alone(ask)
        if self.bounds is None or not rates:
            return alone
        return without(alone, self.bounds.of(ask.model).exhausted()) or alone

    def _rates_alone(self, ask: RoutingHints) -> Mapping[InstanceId, float]:
        """Return what each engine may get where one may serve alone, as ``pair`` has found it; empty: any part."""
        remembered = self._calm.get(ask.model)
        is_known = remembered is not None and remembered[0] == self.registry.changes.count
        return remembered[2].rates[True] if remembered is not None and is_known else _UNBOUND[True]

    def _choose(self, seen: _Seen, ask: RoutingHints, *, may_be_alone: bool) -> Chosen:
        """Choose a group, if there are several, and then its engines."""
        shares = seen.shares_alone if may_be_alone else seen.shares
        if shares is None:
            return self.choice.pair(seen.prefill, seen.decode, ask, compatibility.always if seen.all_fit else seen.fits)
        rates = seen.rates[may_be_alone]
        if self.bounds is not None and rates:
            return self._choose_within(shares, rates, self.bounds.of(ask.model), ask, seen.fits)
        share = self._share(shares, shares.prefill, shares.decode, ask)
        return self._choose_of(share, share.group.prefill, share.group.decode, ask, seen.fits)

    def _choose_within(
        self, shares: Shares, rates: Mapping[InstanceId, float], bound: ShareBound, ask: RoutingHints, fits: Fits
    ) -> Chosen:
        """Choose likewise among engines that may get more; if a group has none of a role, another group serves."""
        out = bound.exhausted()
        first = share = self._share(shares, without(shares.prefill, out), without(shares.decode, out), ask)
        sides = share.group.prefill, share.group.decode
        if out and share.group.all_fit:
            for each in (first, *self.turns.others(shares, first, ask.session)):
                prefill, decode = without(each.group.prefill, out), without(each.group.decode, out)
                if decode and (prefill or each.alone) and each.group.all_fit:
                    share, sides = each, (prefill, decode)
                    break
        if share is not first:
            self.turns.moved(first, share)
        chosen = self._choose_of(share, *sides, ask, fits)
        bound.count(rates, chosen)
        return chosen

    def _choose_of(self, share: GroupShare, prefill: Among, decode: Among, ask: RoutingHints, fits: Fits) -> Chosen:
        if share.alone:
            return None, self.choice.one(decode, ask)
        return self.choice.pair(prefill, decode, ask, compatibility.always if share.group.all_fit else fits)

    def _share(self, shares: Shares, prefill: Among, decode: Among, ask: RoutingHints) -> GroupShare:
        """Choose a share: that of a session, of an engine of these that has the prompt in its cache, or the next."""
        share = None
        if len(shares.all) == 1:
            return shares.all[0]
        if ask.session is not None:
            return self.turns.of_session(shares, ask.session)
        if ask.prompt and self.holder is not None and decode:
            holders = self.holder.holders(decode, ask)
            share = self.turns.cached(shares, [instance.id for instance in holders])
        if share is None and ask.prompt and self.prefill_holders is not None and prefill:
            holders = self.prefill_holders(prefill, ask)
            share = self.turns.cached(shares, [instance.id for instance in holders])
        return self.turns.next(shares) if share is None else share

    def _look(self, of: Sequence[object], prefill: Among, decode: Among, *, may_be_alone: bool) -> _Seen:
        """Sort engines that serve the model into groups. Raises NoMatchingInstance: no two of them fit."""
        grouping, fits = self._grouped(prefill, decode, may_be_alone=may_be_alone)
        pairs = grouping.pairs
        paired_prefill, paired_decode = _paired(grouping, prefill, decode)
        alone = self._shares(grouping, may_be_alone=True)
        # Where nothing is served alone although it may be, nothing changes if it may not.
        is_some_alone = True in [share.alone for share in alone.all]
        shares = self._shares(grouping, may_be_alone=False) if is_some_alone else alone
        is_bound = self.bounds is not None and self._is_mixed(grouping)
        return _Seen(
            of,
            paired_prefill,
            paired_decode,
            decode,
            len(pairs) == 1 and pairs[0].all_fit,
            None if not is_bound and _is_whole(shares, paired_prefill, paired_decode) else shares,
            None if not is_bound and _is_whole(alone, paired_prefill, paired_decode) else alone,
            fits,
            {True: alone.rates(), False: shares.rates()} if is_bound else _UNBOUND,
        )

    def _is_mixed(self, grouping: Grouping) -> bool:
        """Tell whether two engines differ in more than their slice, and not only because their pair rests."""
        prefill = [*grouping.unpaired_prefill, *(group.prefill[0] for group in grouping.pairs)]
        sides = prefill, [group.decode[0] for group in grouping.groups]
        kinds = [{compatibility.without_slice(self.registry.facts(one)) for one in side} for side in sides]
        return not all(compatibility.agree(one, other) for one, other in product(*kinds))

    def _shares(self, grouping: Grouping, *, may_be_alone: bool) -> Shares:
        shares = shares_of(grouping, may_be_alone=may_be_alone)
        return divide_by_slice(shares, self._slice_of) if self._prefers_slices else shares

    def _grouped(self, prefill: Among, decode: Among, *, may_be_alone: bool) -> tuple[Grouping, Fits]:
        """Sort engines into groups; if all pairs that fit rest, and no engine may serve alone, they are used anyway."""
        grouping = group_engines(prefill, decode, self.registry.facts)
        if grouping.pairs:
            return grouping, self.registry.fits
        if not may_be_alone:
            grouping = group_engines(prefill, decode, self._facts_without_rests)
            if grouping.pairs:
                return grouping, self._are_compatible
        raise NoMatchingInstance(f"no prefill instance fits a decode instance: {self._differences(prefill, decode)}")

    def _facts_without_rests(self, instance: Instance) -> EngineCapabilities:
        facts = self.registry.facts(instance)
        return replace(facts, resting=None) if facts.resting else facts

    def _serving_both(self, prefill: Among, decode: Among, ask: RoutingHints) -> tuple[Among, Among]:
        decode = self._serving(Role.DECODE, decode, ask)
        return self._serving(Role.PREFILL, prefill, ask), decode

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
        members = [member for member in members if member.as_role(role) is not None]
        if not any(_has_rank(member.instance, ask) for member in members):
            if ask.rank is not None and role is Role.DECODE:
                raise BadRequest(f"X-data-parallel-rank is {ask.rank}, and no decode instance has this rank")
            raise NoInstance(f"no {role} instance serves the model {ask.model!r}")
        states = ", ".join(f"{member.instance.id} is {member.life.state}" for member in members)
        raise NoInstance(f"no {role} instance that would do can take a request now: {states}")

    def _differences(self, prefill: Among, decode: Among) -> str:
        """Name the first pairs that do not fit, and why."""
        pairs = islice(product(decode, prefill), _MOST_NAMED)
        named = [f"{d.id} with {p.id}: {self._difference(p, d)}" for d, p in pairs]
        more = len(decode) * len(prefill) - len(named)
        return "; ".join([*named, f"and {more} more"] if more else named)

    def _difference(self, prefill: Instance, decode: Instance) -> str:
        one, other = self.registry.facts(prefill), self.registry.facts(decode)
        if compatibility.fit(one, other):
            return "the pair rests, for its transfers failed"
        return compatibility.difference(one, other)

    def _pair_on_trial(self, prefill: Among, decode: Among, ask: RoutingHints, *, may_be_alone: bool) -> Chosen:
        """If an engine waits for its trial, this request is it, with a partner that is well if there is one.

        A request that has failed before is on its last chances, and goes to engines that are well if there are any.
        """
        serving = self._serving_both(prefill, decode, ask)
        grouping, fits = self._grouped(*serving, may_be_alone=may_be_alone)
        prefill, decode = _paired(grouping, *serving)
        (trying_p, well_p), (trying_d, well_d) = self._sorted(prefill), self._sorted(decode)
        if ask.again and well_p and well_d and group_engines(well_p, well_d, self.registry.facts).pairs:
            return self._look_and_choose(well_p, well_d, ask, may_be_alone=may_be_alone)
        if not trying_p and not trying_d:  # what waits for its trial fits no engine, or serves another model
            return self._look_and_choose(prefill, decode, ask, may_be_alone=may_be_alone)
        if trying_p:
            prefill = trying_p[:1]
            fitting = [d for d in well_d if fits(prefill[0], d)]
            decode = self._near(prefill[0], fitting or [d for d in decode if fits(prefill[0], d)])
        else:
            decode = trying_d[:1]
            prefill = self._near(decode[0], [p for p in prefill if fits(p, decode[0])])
        return self.choice.pair(prefill, decode, ask, compatibility.always)

    def _look_and_choose(self, prefill: Among, decode: Among, ask: RoutingHints, *, may_be_alone: bool) -> Chosen:
        seen = self._look((), prefill, decode, may_be_alone=may_be_alone)
        return self._choose(seen, ask, may_be_alone=may_be_alone)

    def _near(self, engine: Instance, others: Among) -> Among:
        """Leave those of its slice, if slices count and some are."""
        return nearest(engine, others, self._slice_of) if self._prefers_slices else others

    @property
    def _prefers_slices(self) -> bool:
        return self.registry.slice_pairing is SlicePairing.PREFER

    def _sorted(self, among: Among) -> tuple[Among, Among]:
        """Tell those that wait for their trial from those that are well."""
        trying = [
            instance
            for instance in among
            if (member := self.registry.get(instance.id)) is not None and member.life.state is HealthState.HALF_OPEN
        ]
        return trying, [instance for instance in among if instance not in trying] if trying else among

    def _slice_of(self, instance: Instance) -> str | None:
        return self.registry.facts(instance).slice

    def _are_compatible(self, prefill: Instance, decode: Instance) -> bool:
        """Tell whether two engines fit, also as a pair that rests."""
        return compatibility.fit(self.registry.facts(prefill), self.registry.facts(decode))


def _paired(grouping: Grouping, prefill: Among, decode: Among) -> tuple[Among, Among]:
    """Drop the engines that fit none of the other side; the others stay in their order."""
    pairs = grouping.pairs
    if len(pairs) == 1 and len(pairs[0].prefill) == len(prefill) and len(pairs[0].decode) == len(decode):
        return prefill, decode
    paired_prefill = {instance.id for group in pairs for instance in group.prefill}
    paired_decode = {instance.id for group in pairs for instance in group.decode}
    return [p for p in prefill if p.id in paired_prefill], [d for d in decode if d.id in paired_decode]


def _is_whole(shares: Shares, prefill: Among, decode: Among) -> bool:
    """Tell whether there is one share, of all these engines: that of a slice may leave some of other slices out."""
    if len(shares.all) > 1:
        return False
    group = shares.all[0].group
    return len(group.prefill) == len(prefill) and len(group.decode) == len(decode)


def _has_rank(instance: Instance, ask: RoutingHints) -> bool:
    """Look for the rank that a client wants: it means the engine that answers, so prefill engines have them all."""
    return ask.rank is None or instance.rank in (None, ask.rank) or instance.role is Role.PREFILL
