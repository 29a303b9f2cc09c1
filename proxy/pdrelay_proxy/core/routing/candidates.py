"""The engines that requests may go to, and what they come down to for a model: looked at once,
until a fact changes.

A look drops the engines that do not serve the model or fit no other one, and sorts the others into
groups. Models that the same engines serve share one: hundreds of LoRA adapters cost no more looks
than one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet import compatibility
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.fleet_models import clipped
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry, listed
from pdrelay_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from pdrelay_proxy.core.routing.compatible_groups import Grouping, group_engines, group_known
from pdrelay_proxy.core.routing.group_weights import FairRates, Shares, shares_of
from pdrelay_proxy.core.routing.pair_preference import PairPreference
from pdrelay_proxy.errors import BadRequest, NoInstance, NoMatchingInstance, UnknownModel

Among: TypeAlias = Sequence[Instance]
# whether a prefill and a decode engine can share a request
Fits: TypeAlias = Callable[[Instance, Instance], bool]
# Which of the sets of models that engines serve have a model, and the rank that a request asks for.
_Key: TypeAlias = tuple[frozenset[frozenset[str] | None], int | None]

_UNBOUND: Final[Mapping[bool, FairRates]] = {}
_MOST_NAMED: Final = 4  # pairs in one message
_MOST_LOOKS: Final = 64  # by which engines serve a model: there may be as many of these as models
_HALF_OPEN: Final = HealthState.HALF_OPEN  # looking a member up takes as long as a call


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What engines come down to for a model."""

    prefill: Among  # those that serve it and have a partner
    decode: Among
    alone: Among  # those of which one may serve a request alone
    all_fit: bool  # each prefill engine fits each decode engine
    shares: Shares | None  # None: there is one group of all of them, and nothing to divide
    shares_alone: Shares | None  # the same where decode engines may serve alone
    fits: Fits  # for groups in which not all fit
    # By whether decode engines may serve alone: the part of the requests that each engine may get;
    # empty: any.
    rates: Mapping[bool, FairRates]


class Candidates:
    """Some engines that can take a request, with what is known of them now."""

    def __init__(
        self,
        registry: Registry,
        prefill: Among,
        decode: Among,
        *,
        is_bound: bool,
        preference: PairPreference | None = None,
    ) -> None:
        """``is_bound``: say how much each engine may get while revisions are mixed."""
        self.prefill = prefill
        self.decode = decode
        self.version = registry.changes.count  # for which all of this is true
        self._registry = registry
        self._is_bound = is_bound
        self._preference = preference
        find = registry.get
        unknown = EngineCapabilities()
        members = [find(instance.id) for side in (prefill, decode) for instance in side]
        facts = [unknown if member is None else member.facts for member in members]
        self.facts = facts[: len(prefill)], facts[len(prefill) :]
        self._models = {each.models for each in facts}
        self._half_open = [
            member for member in members if member is not None and member.life.state is _HALF_OPEN
        ]
        self.looks = dict[_Key, Narrowed]()
        self.unmatched = dict[tuple[_Key, bool], str]()  # why no two engines fit

    @property
    def is_old(self) -> bool:
        """Tell whether something has changed since."""
        return self.version != self._registry.changes.count

    def is_for(self, prefill: Among, decode: Among) -> bool:
        """Tell at once whether these are the engines, and nothing has changed."""
        return self.prefill is prefill and self.decode is decode and not self.is_old

    def waiting(self, hints: RoutingHints) -> frozenset[InstanceId]:
        """Return the engines that wait for their trial, and serve the model."""
        return frozenset(
            [member.instance.id for member in self._half_open if member.facts.serves(hints.model)]
        )

    def narrowed(self, hints: RoutingHints, *, may_be_alone: bool) -> Narrowed:
        """Return what they come down to for a request; raises UnknownModel, BadRequest or
        NoInstance.
        """
        key = self._key(hints.model, hints.rank)
        found = self.looks.get(key)
        if found is None:
            why = self.unmatched.get((key, may_be_alone))
            if why is not None:
                raise NoMatchingInstance(why)
            found = self._look(key, hints, may_be_alone=may_be_alone)
            if len(self.looks) >= _MOST_LOOKS:
                del self.looks[next(iter(self.looks))]
            self.looks[key] = found
        return found

    def _key(self, model: str | None, rank: int | None) -> _Key:
        serving = self._models
        if model is not None:
            serving = {models for models in self._models if models is None or model in models}
        return frozenset(serving), rank

    def _serving(
        self, role: Role, key: _Key, hints: RoutingHints
    ) -> tuple[Among, list[EngineCapabilities]]:
        """List the engines of a role that serve the model, and their facts; as ``serving`` does."""
        at = 0 if role is Role.PREFILL else 1
        among = (self.prefill, self.decode)[at]
        facts = self.facts[at]
        models, rank = key
        if len(models) == len(self._models) and rank is None and among and None not in models:
            return among, facts
        some = [
            (one, each)
            for one, each in zip(among, facts, strict=True)
            if each.models in models and has_rank(one, hints)
        ]
        if not some:
            raise why_none(self._registry, role, hints)
        found = [each for each in some if each[1].models is not None] or some
        return [one for one, _ in found], [each for _, each in found]

    def _look(self, key: _Key, hints: RoutingHints, *, may_be_alone: bool) -> Narrowed:
        """Sort engines that serve the model into groups.

        Raises NoMatchingInstance: no two of them fit.
        """
        decode, decode_facts = self._serving(Role.DECODE, key, hints)
        prefill, prefill_facts = self._serving(Role.PREFILL, key, hints)
        grouping = group_known(prefill, prefill_facts, decode, decode_facts)
        if grouping.pairs:
            return self._narrowed(prefill, decode, grouping, self._registry.fits)
        grouping = self._anyway(prefill, decode, key, may_be_alone=may_be_alone)
        return self._narrowed(prefill, decode, grouping, partial(_are_compatible, self._registry))

    def _narrowed(self, prefill: Among, decode: Among, grouping: Grouping, fits: Fits) -> Narrowed:
        pairs = grouping.pairs
        paired_prefill, paired_decode = _paired(grouping, prefill, decode)
        alone = self._shares(grouping, may_be_alone=True)
        # Where nothing is served alone although it may be, nothing changes if it may not.
        is_some_alone = True in [share.alone for share in alone.all]
        shares = self._shares(grouping, may_be_alone=False) if is_some_alone else alone
        rates = _UNBOUND
        if self._is_bound and self._is_mixed(grouping):
            rates_alone = alone.rates()
            rates = {True: rates_alone, False: shares.rates() if is_some_alone else rates_alone}
        is_bound = rates is not _UNBOUND
        return Narrowed(
            paired_prefill,
            paired_decode,
            decode,
            len(pairs) == 1 and pairs[0].all_fit,
            None if not is_bound and _is_whole(shares, paired_prefill, paired_decode) else shares,
            None if not is_bound and _is_whole(alone, paired_prefill, paired_decode) else alone,
            fits,
            rates,
        )

    def _is_mixed(self, grouping: Grouping) -> bool:
        """Tell whether two engines differ in more than their slice, and not only because their pair
        rests.
        """
        prefill = [*grouping.unpaired_prefill, *(group.prefill[0] for group in grouping.pairs)]
        sides = prefill, [group.decode[0] for group in grouping.groups]
        kinds = [
            {compatibility.without_slice(self._registry.facts(one)) for one in side}
            for side in sides
        ]
        return not all(compatibility.agree(one, other) for one, other in product(*kinds))

    def _shares(self, grouping: Grouping, *, may_be_alone: bool) -> Shares:
        shares = shares_of(grouping, may_be_alone=may_be_alone)
        return shares if self._preference is None else self._preference.divide(shares)

    def _anyway(self, prefill: Among, decode: Among, key: _Key, *, may_be_alone: bool) -> Grouping:
        """Sort engines into groups by pairs that rest, too: all that fit do, and no engine may
        serve alone.
        """
        if not may_be_alone:
            grouping = group_engines(prefill, decode, self._facts_without_rests)
            if grouping.pairs:
                return grouping
        why = f"no prefill instance fits a decode instance: {self._differences(prefill, decode)}"
        if len(self.unmatched) >= _MOST_LOOKS:
            self.unmatched.clear()
        self.unmatched[key, may_be_alone] = why
        raise NoMatchingInstance(why)

    def _facts_without_rests(self, instance: Instance) -> EngineCapabilities:
        facts = self._registry.facts(instance)
        return replace(facts, resting=None) if facts.resting else facts

    def _differences(self, prefill: Among, decode: Among) -> str:
        """Name the first pairs that do not fit, and why."""
        pairs = islice(product(decode, prefill), _MOST_NAMED)
        named = [f"{d.id} with {p.id}: {self._difference(p, d)}" for d, p in pairs]
        more = len(decode) * len(prefill) - len(named)
        return "; ".join([*named, f"and {more} more"] if more else named)

    def _difference(self, prefill: Instance, decode: Instance) -> str:
        one = self._registry.facts(prefill)
        other = self._registry.facts(decode)
        if compatibility.fit(one, other):
            return "the pair rests, for its transfers failed"
        return compatibility.difference(one, other)


def serving(registry: Registry, role: Role, among: Among, hints: RoutingHints) -> Among:
    """List the engines of a role that serve the model of a request; raises as
    ``Candidates.narrowed``.

    Those that have not said yet what they serve come only where none is known to serve it: they may
    not know the model.
    """
    found = [
        one for one in among if registry.facts(one).serves(hints.model) and has_rank(one, hints)
    ]
    if not found:
        raise why_none(registry, role, hints)
    return [one for one in found if registry.facts(one).models is not None] or found


def why_none(
    registry: Registry, role: Role, hints: RoutingHints
) -> UnknownModel | BadRequest | NoInstance:
    """Say why no engine of a role would do for a request."""
    members = [member for member in registry.members() if member.facts.serves(hints.model)]
    if not members:
        model = clipped(hints.model or "")
        return UnknownModel(
            f"the model {model!r} is not served here; there is {registry.models.listed()}"
        )
    members = [member for member in members if member.as_role(role) is not None]
    if not any(has_rank(member.instance, hints) for member in members):
        if hints.rank is not None and role is Role.DECODE:
            return BadRequest(
                f"X-data-parallel-rank is {hints.rank}, and no decode instance has this rank"
            )
        return NoInstance(f"no {role} instance serves the model {clipped(hints.model or '')!r}")
    states = [f"{member.instance.id} is {member.life.state}" for member in members]
    return NoInstance(f"no {role} instance that would do can take a request now: {listed(states)}")


def has_rank(instance: Instance, hints: RoutingHints) -> bool:
    """Look for the rank that a client wants: it means the engine that answers, so prefill engines
    have them all.
    """
    return (
        hints.rank is None or instance.rank in (None, hints.rank) or instance.role is Role.PREFILL
    )


def _are_compatible(registry: Registry, prefill: Instance, decode: Instance) -> bool:
    """Tell whether two engines fit, also as a pair that rests."""
    return compatibility.fit(registry.facts(prefill), registry.facts(decode))


def _paired(grouping: Grouping, prefill: Among, decode: Among) -> tuple[Among, Among]:
    """Drop the engines that fit none of the other side; the others stay in their order."""
    pairs = grouping.pairs
    if grouping.all_paired:
        return prefill, decode
    paired_prefill = {instance.id for group in pairs for instance in group.prefill}
    paired_decode = {instance.id for group in pairs for instance in group.decode}
    return [p for p in prefill if p.id in paired_prefill], [
        d for d in decode if d.id in paired_decode
    ]


def _is_whole(shares: Shares, prefill: Among, decode: Among) -> bool:
    """Tell whether there is one share, of all these engines: a preference may leave some out."""
    if len(shares.all) > 1:
        return False
    group = shares.all[0].group
    return len(group.prefill) == len(prefill) and len(group.decode) == len(decode)
