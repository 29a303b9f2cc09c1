"""The engines that requests may go to, and what they come down to for a model: worked out once,
until a fact changes.

To narrow them drops the engines that do not serve the model or fit no other one, and sorts the
others into groups. Models that the same engines serve share the result: hundreds of LoRA adapters
cost no more than one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet import compatibility
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from pdrelay_proxy.core.routing.compatible_groups import Grouping, group_engines, group_known
from pdrelay_proxy.core.routing.pair_preference import PairPreference
from pdrelay_proxy.core.routing.serving_engines import has_rank, why_none
from pdrelay_proxy.core.routing.traffic_division import TrafficDivision, divide_traffic
from pdrelay_proxy.errors import NoMatchingInstance

Among: TypeAlias = Sequence[Instance]
# whether a prefill and a decode engine can share a request
Fits: TypeAlias = Callable[[Instance, Instance], bool]
# Which of the sets of models that engines serve have a model, the rank that a request asks for, and
# the model if it is an adapter of which engines have different files.
_Key: TypeAlias = tuple[frozenset[frozenset[str] | None], int | None, str | None]

_MOST_NAMED: Final = 4  # pairs in one message
_MOST_KEYS: Final = 64  # by which engines serve a model: there may be as many of these as models
_HALF_OPEN: Final = HealthState.HALF_OPEN


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What engines come down to for a model."""

    prefill: Among  # those that serve it and have a partner
    decode: Among
    alone: Among  # those of which one may serve a request alone
    all_fit: bool  # each prefill engine fits each decode engine
    fits: Fits  # for groups in which not all fit
    division: TrafficDivision


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
        # One engine of each kind whose files count: engines share what is equal.
        self._with_files = [*{(each.root, id(each.files)): each for each in facts}.values()]
        self._half_open = [
            member for member in members if member is not None and member.life.state is _HALF_OPEN
        ]
        self.narrowed_by_key = dict[_Key, Narrowed]()
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
        """Return what they come down to; raises UnknownModel, BadRequest or NoInstance."""
        key = self._key(hints.model, hints.rank)
        narrowed = self.narrowed_by_key.get(key)
        if narrowed is None:
            why = self.unmatched.get((key, may_be_alone))
            if why is not None:
                raise NoMatchingInstance(why)
            narrowed = self._narrow(key, hints, may_be_alone=may_be_alone)
            if len(self.narrowed_by_key) >= _MOST_KEYS:
                del self.narrowed_by_key[next(iter(self.narrowed_by_key))]
            self.narrowed_by_key[key] = narrowed
        return narrowed

    def _key(self, model: str | None, rank: int | None) -> _Key:
        serving = self._models
        if model is not None:
            serving = {models for models in self._models if models is None or model in models}
        roots = {each.adapter_root(model) for each in self._with_files}
        return frozenset(serving), rank, model if len(roots - {None}) > 1 else None

    def _serving(
        self, role: Role, key: _Key, hints: RoutingHints
    ) -> tuple[Among, list[EngineCapabilities]]:
        """List the engines of a role that serve the model, and their facts; as ``serving`` does."""
        at = 0 if role is Role.PREFILL else 1
        among = (self.prefill, self.decode)[at]
        facts = self.facts[at]
        models, rank, _ = key
        if len(models) == len(self._models) and rank is None and among and None not in models:
            return among, facts
        some = [
            (engine, its_facts)
            for engine, its_facts in zip(among, facts, strict=True)
            if its_facts.models in models and has_rank(engine, hints)
        ]
        if not some:
            raise why_none(self._registry, role, hints)
        known = [pair for pair in some if pair[1].models is not None] or some
        return [engine for engine, _ in known], [facts for _, facts in known]

    def _narrow(self, key: _Key, hints: RoutingHints, *, may_be_alone: bool) -> Narrowed:
        """Sort engines that serve the model into groups.

        Raises NoMatchingInstance: no two of them fit.
        """
        decode, decode_facts = self._serving(Role.DECODE, key, hints)
        prefill, prefill_facts = self._serving(Role.PREFILL, key, hints)
        adapter = key[2]
        if adapter is not None:
            prefill_facts = [_of_adapter(facts, adapter) for facts in prefill_facts]
            decode_facts = [_of_adapter(facts, adapter) for facts in decode_facts]
        grouping = group_known(prefill, prefill_facts, decode, decode_facts)
        fits: Fits = self._registry.fits  # it is called for each of thousands
        if adapter is not None:
            fits = partial(self._registry.fits, model=adapter)
        if not grouping.pairs:
            grouping = self._anyway(prefill, decode, key, may_be_alone=may_be_alone)
            fits = partial(_are_compatible, self._registry, model=adapter)
        return self._narrowed(prefill, decode, grouping, fits)

    def _narrowed(self, prefill: Among, decode: Among, grouping: Grouping, fits: Fits) -> Narrowed:
        pairs = grouping.pairs
        paired_prefill, paired_decode = _paired(grouping, prefill, decode)
        division = divide_traffic(
            grouping,
            paired_prefill,
            paired_decode,
            self._registry.facts,
            self._preference,
            is_bound=self._is_bound,
        )
        all_fit = len(pairs) == 1 and pairs[0].all_fit
        return Narrowed(paired_prefill, paired_decode, decode, all_fit, fits, division)

    def _anyway(self, prefill: Among, decode: Among, key: _Key, *, may_be_alone: bool) -> Grouping:
        """Sort engines into groups by pairs that rest, too, if no engine may serve alone."""
        if not may_be_alone:
            grouping = group_engines(prefill, decode, partial(self._facts_without_rests, key[2]))
            if grouping.pairs:
                return grouping
        why = (
            f"no prefill instance fits a decode instance: "
            f"{self._differences(prefill, decode, key[2])}"
        )
        if len(self.unmatched) >= _MOST_KEYS:
            self.unmatched.clear()
        self.unmatched[key, may_be_alone] = why
        raise NoMatchingInstance(why)

    def _facts_without_rests(self, adapter: str | None, instance: Instance) -> EngineCapabilities:
        facts = _of_adapter(self._registry.facts(instance), adapter)
        return replace(facts, resting=None) if facts.resting else facts

    def _differences(self, prefill: Among, decode: Among, adapter: str | None) -> str:
        """Name the first pairs that do not fit, and why."""
        pairs = islice(product(decode, prefill), _MOST_NAMED)
        named = [f"{d.id} with {p.id}: {self._difference(p, d, adapter)}" for d, p in pairs]
        more = len(decode) * len(prefill) - len(named)
        return "; ".join([*named, f"and {more} more"] if more else named)

    def _difference(self, prefill: Instance, decode: Instance, adapter: str | None) -> str:
        lender = _of_adapter(self._registry.facts(prefill), adapter)
        reader = _of_adapter(self._registry.facts(decode), adapter)
        if compatibility.fit(lender, reader):
            return "the pair rests, for its transfers failed"
        return compatibility.difference(lender, reader)


def _of_adapter(facts: EngineCapabilities, adapter: str | None) -> EngineCapabilities:
    """Return facts with the root of an adapter, too, if there is one and it counts."""
    root = facts.adapter_root(adapter)
    return facts if root is None else replace(facts, root=f"{facts.root} with {root}")


def _are_compatible(
    registry: Registry, prefill: Instance, decode: Instance, model: str | None
) -> bool:
    """Tell whether two engines fit, also as a pair that rests."""
    return compatibility.fit(registry.facts(prefill), registry.facts(decode), model)


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
