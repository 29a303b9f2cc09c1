"""Which engines can share requests: they form groups by the facts that are known of them, most
often one per revision.

They are sorted by kind (core/fleet/engine_kinds.py), and a group is of kinds.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

# sum() of floats fails where this is compiled: mypyc takes its result for an int
from math import fsum
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet.compatibility import NO_SLICE, Compared, EngineCapabilities
from pdrelay_proxy.core.fleet.engine_kinds import DecodeKind, EngineKinds, PrefillKind
from pdrelay_proxy.core.model import Instance

Facts: TypeAlias = Callable[[Instance], EngineCapabilities]
# of engines that all fit each other; those beyond share one, in which each pair is looked at
_MOST_GROUPS: Final = 64
# groups that a prefill engine is in, on the mean, up to which there may be more: slices
_FEW_LISTED: Final = 2
NO_PREFILL: Final = "no prefill engine fits"  # the name of a group
_UNKNOWN: Final = "unknown facts"


@dataclass(frozen=True, slots=True)
class CompatibleGroup:
    """Decode engines that fit the same prefill engines, and these.

    Without any, a decode engine can only serve alone.

    ``prefill_count`` counts a prefill engine that belongs to several groups in parts, so that all
    groups together count each engine once.
    """

    # what is known of the decode engines, in words; routers beside each other use the same
    name: str
    prefill: Sequence[Instance]
    decode: Sequence[Instance]
    prefill_count: float
    all_fit: bool = True  # each prefill engine fits each decode engine


@dataclass(frozen=True, slots=True)
class Grouping:
    """All engines, by whom they fit.

    No decode engine is in two groups; one that only fits itself is in none.
    """

    groups: Sequence[CompatibleGroup]
    unpaired_prefill: Sequence[Instance]  # they fit no decode engine
    comparisons: int  # of two kinds of engines
    all_paired: bool  # each engine is in a group of both roles

    @property
    def pairs(self) -> Sequence[CompatibleGroup]:
        """List the groups that have engines of both roles."""
        return [group for group in self.groups if group.prefill]

    @property
    def unpaired_decode(self) -> Sequence[Instance]:
        """List the decode engines that fit no prefill engine."""
        return [instance for group in self.groups if not group.prefill for instance in group.decode]


@dataclass(frozen=True, slots=True)
class _Part:
    """A group to be: kinds of decode engines that fit the same kinds of prefill engines."""

    fitting: Sequence[PrefillKind]
    kinds: list[DecodeKind]


def group_engines(
    prefill: Sequence[Instance], decode: Sequence[Instance], facts: Facts
) -> Grouping:
    """Sort engines into groups, in the order of the decode engines."""
    return group_known(
        prefill,
        [facts(instance) for instance in prefill],
        decode,
        [facts(instance) for instance in decode],
    )


def group_known(
    prefill: Sequence[Instance],
    prefill_facts: Sequence[EngineCapabilities],
    decode: Sequence[Instance],
    decode_facts: Sequence[EngineCapabilities],
) -> Grouping:
    """Sort engines into groups whose facts are given, in their order."""
    kinds = EngineKinds()
    for place, known in enumerate(decode_facts):
        kinds.add_decode(place, known)
    for place, (instance, known) in enumerate(zip(prefill, prefill_facts, strict=True)):
        kinds.add_prefill(place, instance.id, known)
    parts = _parts(kinds)
    paired = {kind for part in parts for kind in part.fitting}
    unpaired = _listed(prefill, [kind for kind in kinds.prefills if kind not in paired])
    groups = [
        CompatibleGroup(
            min([_words(kind.known) for kind in part.kinds]) if part.fitting else NO_PREFILL,
            _listed(prefill, part.fitting),
            _listed(decode, part.kinds),
            count,
        )
        for part, count in zip(parts, _counts(parts), strict=True)
    ]
    all_paired = not unpaired and [] not in [part.fitting for part in parts]
    if not {instance.id for instance in decode}.isdisjoint([instance.id for instance in prefill]):
        sizes = [(len(group.prefill), len(group.decode)) for group in groups]
        groups = [_without_itself(group) for group in groups]
        all_paired = all_paired and sizes == [
            (len(group.prefill), len(group.decode)) for group in groups
        ]
    return Grouping(_named_apart(_bounded(groups)), unpaired, kinds.comparisons, all_paired)


def _parts(kinds: EngineKinds) -> Sequence[_Part]:
    """Put the kinds of decode engines together that fit the same kinds of prefill engines."""
    by_fitting = dict[tuple[PrefillKind, ...], _Part]()
    for kind, fitting in kinds.fitting():
        by_fitting.setdefault(tuple(fitting), _Part(fitting, [])).kinds.append(kind)
    return [*by_fitting.values()]


def _listed(
    engines: Sequence[Instance], kinds: Sequence[PrefillKind] | Sequence[DecodeKind]
) -> Sequence[Instance]:
    """List the engines of some kinds, in their order."""
    if len(kinds) == 1 and len(kinds[0].places) == len(engines):
        return [*engines]
    return [
        engines[place] for place in sorted(chain.from_iterable([kind.places for kind in kinds]))
    ]


def _counts(parts: Sequence[_Part]) -> Sequence[float]:
    """Divide prefill kinds among the parts they fit, in proportion to decode engines."""
    sizes = [sum([len(kind.places) for kind in part.kinds]) for part in parts]
    wanted = dict[int, int]()  # by the place of the first engine
    for part, size in zip(parts, sizes, strict=True):
        for kind in part.fitting:
            wanted[kind.places[0]] = wanted.get(kind.places[0], 0) + size
    return [
        fsum([len(kind.places) * size / wanted[kind.places[0]] for kind in part.fitting])
        for part, size in zip(parts, sizes, strict=True)
    ]


def _without_itself(group: CompatibleGroup) -> CompatibleGroup:
    """Leave no engine in a group that serves both roles and fits itself alone: no request has one
    engine twice.
    """
    names = {instance.id for instance in group.decode}
    both = {instance.id for instance in group.prefill if instance.id in names}
    prefill = group.prefill
    decode = group.decode
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


def _bounded(groups: Sequence[CompatibleGroup]) -> Sequence[CompatibleGroup]:
    """Merge the smallest groups if there are too many: the lists of all groups together must not
    grow as x times y.
    """
    if len(groups) <= _MOST_GROUPS:
        return groups
    engines = {instance.id for group in groups for instance in group.prefill}
    if sum([len(group.prefill) for group in groups]) <= _FEW_LISTED * len(engines):
        return groups
    by_size = sorted(groups, key=lambda group: (bool(group.prefill), -len(group.decode)))
    kept = by_size[: _MOST_GROUPS - 1]
    rest = by_size[_MOST_GROUPS - 1 :]
    prefill = {instance.id: instance for group in rest for instance in group.prefill}
    decode = [instance for group in rest for instance in group.decode]
    count = fsum([group.prefill_count for group in rest])
    return [
        *kept,
        CompatibleGroup(rest[0].name, list(prefill.values()), decode, count, all_fit=False),
    ]


def _named_apart(groups: Sequence[CompatibleGroup]) -> Sequence[CompatibleGroup]:
    """Number the groups of one name: their engines have refused different others."""
    seen = Counter[str]()
    named = list[CompatibleGroup]()
    for group in groups:
        seen[group.name] += 1
        number = seen[group.name]
        named.append(group if number == 1 else replace(group, name=f"{group.name} ({number})"))
    return named


def _words(known: Compared) -> str:
    """Name what is known of an engine; the revision first, for it is what operators know."""
    version, connector, mode, revision, protocol, fingerprint, within, root, _ = known
    named = (
        ("slice", "none" if within == NO_SLICE else within),
        ("revision", revision),
        ("version", version),
        ("connector", connector),
        ("mode", mode),
        ("protocol", protocol),
        ("fingerprint", fingerprint),
        ("root", root),
    )
    return ", ".join([f"{name} {value}" for name, value in named if value is not None]) or _UNKNOWN
