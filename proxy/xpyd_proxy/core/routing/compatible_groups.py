"""Which engines can share requests: they form groups by the facts that are known of them, most often one per revision.

Two engines with equal facts fit the same engines of the other role. So kinds of engines are compared and not engines:
the work grows with the number of engines plus the comparisons of a few kinds (two of each role during a rollout).
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from math import fsum  # sum() of floats fails where this is compiled: mypyc takes its result for an int
from operator import itemgetter
from typing import Final, TypeAlias

from xpyd_proxy.core.fleet.compatibility import NO_SLICE, Compared, EngineCapabilities, agree, compared
from xpyd_proxy.core.model import Instance, InstanceId
from xpyd_proxy.core.steps import finish

Facts: TypeAlias = Callable[[Instance], EngineCapabilities]
_MOST_GROUPS: Final = 64  # of engines that all fit each other; those beyond share one, in which each pair is looked at
_FEW_LISTED: Final = 2  # groups that a prefill engine is in, on the mean, up to which there may be more: slices
_AT_ONCE: Final = 500  # engines that are looked at in one step: half a millisecond
NO_PREFILL: Final = "no prefill engine fits"  # the name of a group
_UNKNOWN: Final = "unknown facts"


@dataclass(frozen=True, slots=True)
class CompatibleGroup:
    """Decode engines that fit the same prefill engines, and these. Without any, a decode engine can only serve alone.

    ``prefill_count`` counts a prefill engine that belongs to several groups in parts, so that all groups together count
    each engine once.
    """

    name: str  # what is known of the decode engines, in words; routers beside each other use the same
    prefill: Sequence[Instance]
    decode: Sequence[Instance]
    prefill_count: float
    all_fit: bool = True  # each prefill engine fits each decode engine


@dataclass(frozen=True, slots=True)
class Grouping:
    """All engines, by whom they fit. No decode engine is in two groups; one that only fits itself is in none."""

    groups: Sequence[CompatibleGroup]
    unpaired_prefill: Sequence[Instance]  # they fit no decode engine
    comparisons: int  # of two kinds of engines

    @property
    def pairs(self) -> Sequence[CompatibleGroup]:
        """List the groups that have engines of both roles."""
        return [group for group in self.groups if group.prefill]

    @property
    def unpaired_decode(self) -> Sequence[Instance]:
        """List the decode engines that fit no prefill engine."""
        return [instance for group in self.groups if not group.prefill for instance in group.decode]


@dataclass(slots=True)
class _EngineKind:
    """Engines of one role with equal facts."""

    facts: EngineCapabilities  # of the first of them
    compared: Compared
    by: tuple[int, ...] = ()  # prefill: the kinds of decode engines that rest with them
    engines: list[Instance] = field(default_factory=list[Instance])
    places: list[int] = field(default_factory=list[int])  # of these among all of their role


def group_engines(prefill: Sequence[Instance], decode: Sequence[Instance], facts: Facts) -> Grouping:
    """Sort engines into groups, in the order of the decode engines."""
    return finish(group_engines_in_steps(prefill, decode, facts))


def group_engines_in_steps(
    prefill: Sequence[Instance], decode: Sequence[Instance], facts: Facts
) -> Generator[None, None, Grouping]:
    """Sort them in steps of a millisecond or so, for who is in no hurry; engines may change in between."""
    decodes = yield from _decode_kinds(decode, facts)
    prefills = yield from _prefill_kinds(prefill, facts, decodes)
    avoided = [set[int]() for _ in decodes]
    for i, other in enumerate(prefills):
        for number in other.by:
            avoided[number].add(i)
    comparisons = 0
    by_slice = _by_slice(prefills)
    anywhere = [i for i in by_slice[None] if prefills[i].facts.pairs_within is None]
    partners = dict[
        tuple[int, ...], list[_EngineKind]
    ]()  # kinds of decode engines by the kinds of prefill engines they fit
    compatible = dict[tuple[Compared, frozenset[str]], Sequence[int]]()
    for kind, resting in zip(decodes, avoided, strict=True):
        refused = kind.facts.incompatible or frozenset[str]()
        key = kind.compared, refused
        if key not in compatible:  # kinds that differ in the pairs that rest are compared once
            within = kind.facts.pairs_within
            others = by_slice[None] if within is None else by_slice.get(within, anywhere)
            comparisons += len(others)
            compatible[key] = [
                i
                for i in others
                if agree(prefills[i].compared, kind.compared) and prefills[i].facts.engine_id not in refused
            ]
        fitting = tuple([i for i in compatible[key] if i not in resting])
        partners.setdefault(fitting, []).append(kind)
    counts = _counts(partners, prefills)
    groups = [
        CompatibleGroup(
            min([_words(kind.facts) for kind in kinds]) if fitting else NO_PREFILL,
            _joined([prefills[i] for i in fitting]),
            _joined(kinds),
            counts[fitting],
        )
        for fitting, kinds in partners.items()
    ]
    names = {instance.id for instance in decode}
    if not names.isdisjoint([instance.id for instance in prefill]):
        groups = [_without_itself(group) for group in groups]
    paired = {i for fitting in partners for i in fitting}
    unpaired = _joined([kind for i, kind in enumerate(prefills) if i not in paired])
    return Grouping(_named_apart(_bounded(groups)), unpaired, comparisons)


def _without_itself(group: CompatibleGroup) -> CompatibleGroup:
    """Leave no engine in a group that serves both roles and fits itself alone: no request has one engine twice."""
    names = {instance.id for instance in group.decode}
    both = {instance.id for instance in group.prefill if instance.id in names}
    prefill, decode = group.prefill, group.decode
    if len(decode) == 1:
        prefill = [instance for instance in prefill if instance.id not in both]
    elif len(prefill) == 1:
        decode = [instance for instance in decode if instance.id not in both]
    if not both:
        return group
    if len(prefill) == len(group.prefill) and len(decode) == len(group.decode):
        return replace(group, all_fit=False)
    name = group.name if prefill else NO_PREFILL
    return CompatibleGroup(name, prefill, decode, min(group.prefill_count, float(len(prefill))))


def _decode_kinds(decode: Sequence[Instance], facts: Facts) -> Generator[None, None, Sequence[_EngineKind]]:
    kinds = dict[tuple[Compared, frozenset[str] | None, frozenset[InstanceId] | None], _EngineKind]()
    for begin in range(0, len(decode), _AT_ONCE):
        for place, instance in enumerate(decode[begin : begin + _AT_ONCE], start=begin):
            known = facts(instance)
            key = compared(known), known.incompatible or None, known.resting or None
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _EngineKind(known, key[0])
            kind.engines.append(instance)
            kind.places.append(place)
        yield
    return list(kinds.values())


def _prefill_kinds(
    prefill: Sequence[Instance], facts: Facts, decodes: Sequence[_EngineKind]
) -> Generator[None, None, Sequence[_EngineKind]]:
    """Tell prefill engines apart by their facts, and by which kinds of decode engines refuse them or rest with them."""
    refusing, resting = dict[str, list[int]](), dict[InstanceId, list[int]]()
    for number, decode in enumerate(decodes):
        for name in decode.facts.incompatible or ():
            refusing.setdefault(name, []).append(number)
        for prefill_id in decode.facts.resting or ():
            resting.setdefault(prefill_id, []).append(number)
    kinds = dict[tuple[Compared, tuple[int, ...], tuple[int, ...]], _EngineKind]()
    for begin in range(0, len(prefill), _AT_ONCE):
        for place, instance in enumerate(prefill[begin : begin + _AT_ONCE], start=begin):
            known = facts(instance)
            by = refusing.get(known.engine_id, ()) if refusing and known.engine_id is not None else ()
            avoiding = tuple(resting[instance.id]) if instance.id in resting else ()
            key = compared(known), tuple(by), avoiding
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _EngineKind(known, key[0], avoiding)
            kind.engines.append(instance)
            kind.places.append(place)
        yield
    return list(kinds.values())


def _by_slice(prefills: Sequence[_EngineKind]) -> dict[str | None, list[int]]:
    """List the kinds of prefill engines that the decode engines of each slice may fit; None: those of any slice.

    Hundreds of slices are tens of thousands of pairs of kinds, of which nearly none fit.
    """
    found: dict[str | None, list[int]] = {None: [*range(len(prefills))]}
    anywhere = [i for i, kind in enumerate(prefills) if kind.facts.pairs_within is None]
    for i, kind in enumerate(prefills):
        if kind.facts.pairs_within is not None:
            found.setdefault(kind.facts.pairs_within, [*anywhere]).append(i)
    return {within: sorted(kinds) for within, kinds in found.items()}


def _counts(
    partners: dict[tuple[int, ...], list[_EngineKind]], prefills: Sequence[_EngineKind]
) -> dict[tuple[int, ...], float]:
    """Divide each kind of prefill engines among the groups that it fits, in proportion to their decode engines."""
    sizes = {fitting: sum([len(kind.engines) for kind in kinds]) for fitting, kinds in partners.items()}
    wanted = [0] * len(prefills)
    for fitting, size in sizes.items():
        for i in fitting:
            wanted[i] += size
    return {
        fitting: fsum([len(prefills[i].engines) * size / wanted[i] for i in fitting]) for fitting, size in sizes.items()
    }


def _bounded(groups: Sequence[CompatibleGroup]) -> Sequence[CompatibleGroup]:
    """Merge the smallest groups if there are too many: the lists of all groups together must not grow as x times y."""
    if len(groups) <= _MOST_GROUPS:
        return groups
    engines = {instance.id for group in groups for instance in group.prefill}
    if sum([len(group.prefill) for group in groups]) <= _FEW_LISTED * len(engines):
        return groups
    by_size = sorted(groups, key=lambda group: (bool(group.prefill), -len(group.decode)))
    kept, rest = by_size[: _MOST_GROUPS - 1], by_size[_MOST_GROUPS - 1 :]
    prefill = {instance.id: instance for group in rest for instance in group.prefill}
    decode = [instance for group in rest for instance in group.decode]
    count = fsum([group.prefill_count for group in rest])
    return [*kept, CompatibleGroup(rest[0].name, list(prefill.values()), decode, count, all_fit=False)]


def _named_apart(groups: Sequence[CompatibleGroup]) -> Sequence[CompatibleGroup]:
    """Number the groups whose names are the same: they differ in which engines have refused each other."""
    seen = Counter[str]()
    found = list[CompatibleGroup]()
    for group in groups:
        seen[group.name] += 1
        number = seen[group.name]
        found.append(group if number == 1 else replace(group, name=f"{group.name} ({number})"))
    return found


def _joined(kinds: Sequence[_EngineKind]) -> Sequence[Instance]:
    """List the engines of some kinds, in the order of all of their role."""
    if len(kinds) == 1:
        return kinds[0].engines
    placed = list[tuple[int, Instance]]()
    for kind in kinds:
        placed.extend(zip(kind.places, kind.engines, strict=True))
    placed.sort(key=itemgetter(0))
    return [instance for _, instance in placed]


def _words(facts: EngineCapabilities) -> str:
    """Name what is known of an engine; the revision first, for it is what operators know."""
    version, connector, mode, revision, protocol, fingerprint, within = compared(facts)
    named = (
        ("slice", "none" if within == NO_SLICE else within),
        ("revision", revision),
        ("version", version),
        ("connector", connector),
        ("mode", mode),
        ("protocol", protocol),
        ("fingerprint", fingerprint),
    )
    return ", ".join([f"{name} {value}" for name, value in named if value is not None]) or _UNKNOWN
