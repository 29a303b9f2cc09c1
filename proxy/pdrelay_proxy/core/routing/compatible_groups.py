"""Which engines can share requests: they form groups by the facts that are known of them, most often one per revision.

Two engines with equal facts fit the same engines of the other role. So kinds of engines are compared and not engines:
the work grows with the number of engines plus the comparisons of a few kinds (two of each role during a rollout). After
a change the groups are moved on: what is left to do grows with the engines that differ, and with the kinds.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from math import fsum  # sum() of floats fails where this is compiled: mypyc takes its result for an int
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet.compatibility import NO_SLICE, WITHIN, Compared, EngineCapabilities, agree, compared
from pdrelay_proxy.core.model import Instance, InstanceId
from pdrelay_proxy.core.routing.engine_kinds import AT_ONCE, CapabilityKind, EngineKinds, KindChanges, KindKey
from pdrelay_proxy.core.steps import finish

Facts: TypeAlias = Callable[[Instance], EngineCapabilities]
_Prefills: TypeAlias = CapabilityKind[int]  # with the numbers of the families and kinds that refuse it, or rest with it
_Decodes: TypeAlias = CapabilityKind[str]  # with the engine ids that it refuses, and the engines that it rests with
_MOST_GROUPS: Final = 64  # of engines that all fit each other; those beyond share one, in which each pair is looked at
_FEW_LISTED: Final = 2  # groups that a prefill engine is in, on the mean, up to which there may be more: slices
NO_PREFILL: Final = "no prefill engine fits"  # the name of a group
_UNKNOWN: Final = "unknown facts"
_NONE: Final = frozenset[int]()
_NO_NAMES: Final = frozenset[str]()


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
    all_paired: bool  # each engine is in a group of both roles

    @property
    def pairs(self) -> Sequence[CompatibleGroup]:
        """List the groups that have engines of both roles."""
        return [group for group in self.groups if group.prefill]

    @property
    def unpaired_decode(self) -> Sequence[Instance]:
        """List the decode engines that fit no prefill engine."""
        return [instance for group in self.groups if not group.prefill for instance in group.decode]


def group_engines(prefill: Sequence[Instance], decode: Sequence[Instance], facts: Facts) -> Grouping:
    """Sort engines into groups, in the order of the decode engines."""
    return finish(group_engines_in_steps(prefill, decode, facts))


def group_engines_in_steps(
    prefill: Sequence[Instance], decode: Sequence[Instance], facts: Facts
) -> Generator[None, None, Grouping]:
    """Sort them in steps of a millisecond or so, for who is in no hurry; engines may change in between."""
    decode_facts = yield from _facts_in_steps(decode, facts)
    prefill_facts = yield from _facts_in_steps(prefill, facts)
    groups = EngineGroups()
    yield from groups.move_in_steps(prefill, prefill_facts, decode, decode_facts)
    return groups.grouping


def _facts_in_steps(engines: Sequence[Instance], facts: Facts) -> Generator[None, None, list[EngineCapabilities]]:
    found = list[EngineCapabilities]()
    for begin in range(0, len(engines), AT_ONCE):
        found.extend([facts(instance) for instance in engines[begin : begin + AT_ONCE]])
        yield
    return found


class _Family:
    """Kinds of decode engines that differ in nothing but the pairs that rest: they are compared with others once."""

    def __init__(self, number: int, known: Compared) -> None:
        self.number = number
        self.compared = known
        self.members = set[int]()  # the numbers of its kinds
        self.partners = dict[int, _Prefills]()  # by number: the kinds of prefill engines that it fits


@dataclass(frozen=True, slots=True)
class _Part:
    """Kinds of decode engines that fit the same kinds of prefill engines, and the group that they are."""

    fitting: Sequence[_Prefills]
    kinds: Sequence[_Decodes]
    numbers: frozenset[int]  # of all of these
    name: str


class EngineGroups:
    """The groups of some engines, which can be moved on to those of other engines.

    That takes work for the engines that differ and for the kinds, and copies of lists: whatever the groups were before,
    they are then what they would be if all engines were sorted anew.
    """

    def __init__(self) -> None:
        self.grouping = Grouping([], [], 0, all_paired=True)
        self.size = 0  # engines
        self._prefills, self._decodes = EngineKinds[int](), EngineKinds[str]()
        self._families = dict[tuple[Compared, frozenset[str]], _Family]()
        # By engine id, the families that have refused it; and by prefill engine, the kinds that rest with it.
        self._refusing = dict[str, frozenset[int]]()
        self._resting = dict[str, frozenset[int]]()
        self._parts: Sequence[_Part] = ()
        self._unpaired: Sequence[_Prefills] = ()
        self._groups = dict[frozenset[int], CompatibleGroup]()  # of these parts, by their numbers
        self._last = 0  # number of a kind or a family

    def move(
        self,
        prefill: Sequence[Instance],
        prefill_facts: list[EngineCapabilities],
        decode: Sequence[Instance],
        decode_facts: list[EngineCapabilities],
    ) -> bool:
        """Sort these engines, whose facts are given, in place of those before; tell whether any of them differ."""
        return finish(self.move_in_steps(prefill, prefill_facts, decode, decode_facts))

    def move_in_steps(
        self,
        prefill: Sequence[Instance],
        prefill_facts: list[EngineCapabilities],
        decode: Sequence[Instance],
        decode_facts: list[EngineCapabilities],
    ) -> Generator[None, None, bool]:
        """Sort them in steps of a millisecond or so."""
        decodes = yield from self._decodes.move_in_steps([*decode], decode_facts, _decode_key, self._number)
        new = self._change_families(decodes) if decodes.came or decodes.gone else ()
        refusing, resting = self._excluded() if decodes.came or decodes.gone else (self._refusing, self._resting)
        is_other = refusing != self._refusing or resting != self._resting
        self._refusing, self._resting = refusing, resting
        prefills = yield from self._prefills.move_in_steps(
            [*prefill], prefill_facts, self._prefill_key, self._number, all_anew=is_other
        )
        if self._decodes.is_same and self._prefills.is_same:
            return False
        comparisons = self._compare(prefills, new)
        if decodes.reordered or prefills.reordered:
            self._divide()
        self._regroup(decodes.touched | prefills.touched, comparisons)
        return True

    def _number(self) -> int:
        self._last += 1
        return self._last

    def _prefill_key(self, name: InstanceId, facts: EngineCapabilities) -> KindKey[int]:
        refused = self._refusing.get(facts.engine_id, _NONE) if facts.engine_id is not None else _NONE
        return compared(facts), refused, self._resting.get(name, _NONE)

    def _change_families(self, changes: KindChanges[str]) -> Sequence[_Family]:
        """Have the kinds of decode engines in their families; return the families that are new."""
        new = list[_Family]()
        for kind in changes.came:
            known, refused, _ = kind.key
            family = self._families.get((known, refused))
            if family is None:
                family = self._families[known, refused] = _Family(self._number(), known)
                new.append(family)
            family.members.add(kind.number)
        for kind in changes.gone:
            known, refused, _ = kind.key
            family = self._families[known, refused]
            family.members.discard(kind.number)
            if not family.members:
                del self._families[known, refused]
        return new

    def _excluded(self) -> tuple[dict[str, frozenset[int]], dict[str, frozenset[int]]]:
        """Say which families have refused which engine ids, and which kinds rest with which prefill engines."""
        refusing, resting = dict[str, list[int]](), dict[str, list[int]]()
        for (_, refused), family in self._families.items():
            for name in refused:
                refusing.setdefault(name, []).append(family.number)
        for kind in self._decodes.kinds.values():
            for name in kind.key[2]:
                resting.setdefault(name, []).append(kind.number)
        return _frozen(refusing), _frozen(resting)

    def _compare(self, changes: KindChanges[int], new: Sequence[_Family]) -> int:
        """Find the partners of families; those of other slices are not even looked at. Return how many were compared.

        Hundreds of slices are tens of thousands of pairs of kinds, of which nearly none fit.
        """
        count, old = 0, [*self._families.values()]
        for kind in changes.gone:
            for family in old:
                family.partners.pop(kind.number, None)
        if new:
            prefills, numbers = [*self._prefills.kinds.values()], {family.number for family in new}
            by_slice = _by_slice(prefills)
            anywhere = [kind for kind in prefills if kind.key[0][WITHIN] is None]
            for family in new:
                within = family.compared[WITHIN]
                count += _meet(family, prefills if within is None else by_slice.get(within, anywhere))
            old = [family for family in old if family.number not in numbers]
        for family in old:
            within = family.compared[WITHIN]
            some = changes.came
            if within is not None:
                some = [kind for kind in some if kind.key[0][WITHIN] in (None, within)]
            count += _meet(family, some)
        return count

    def _divide(self) -> None:
        """Put decode engines that fit the same prefill engines together."""
        order = {kind.number: place for place, kind in enumerate(self._prefills.kinds.values())}
        parts = dict[tuple[int, ...], list[_Decodes]]()
        prefills = {kind.number: kind for kind in self._prefills.kinds.values()}
        for kind in self._decodes.kinds.values():
            partners = self._families[kind.key[0], kind.key[1]].partners
            fitting = [n for n, other in partners.items() if kind.number not in other.key[2]]
            parts.setdefault(tuple(sorted(fitting, key=order.__getitem__)), []).append(kind)
        self._parts = [
            _Part(
                [prefills[n] for n in fitting],
                kinds,
                frozenset([*fitting, *[kind.number for kind in kinds]]),
                min([_words(kind.key[0]) for kind in kinds]) if fitting else NO_PREFILL,
            )
            for fitting, kinds in parts.items()
        ]
        paired = {n for fitting in parts for n in fitting}
        self._unpaired = [kind for n, kind in prefills.items() if n not in paired]

    def _regroup(self, touched: frozenset[int], comparisons: int) -> None:
        """List the engines of all parts; what no change has touched is as it was."""
        counts, before = _counts(self._parts), self._groups
        self._groups = {
            part.numbers: self._group(part, count, before.get(part.numbers), touched)
            for part, count in zip(self._parts, counts, strict=True)
        }
        groups, prefills, decodes = [*self._groups.values()], self._prefills.by_engine, self._decodes.by_engine
        unpaired = self._prefills.joined(self._unpaired)
        all_paired = not unpaired and [] not in [part.fitting for part in self._parts]
        if not decodes.keys().isdisjoint(prefills):
            sizes = [(len(group.prefill), len(group.decode)) for group in groups]
            groups = [_without_itself(group) for group in groups]
            all_paired = all_paired and sizes == [(len(group.prefill), len(group.decode)) for group in groups]
        self.size = len(prefills) + len(decodes)
        self.grouping = Grouping(_named_apart(_bounded(groups)), unpaired, comparisons, all_paired)

    def _group(
        self, part: _Part, count: float, before: CompatibleGroup | None, touched: frozenset[int]
    ) -> CompatibleGroup:
        if before is not None and touched.isdisjoint(part.numbers):
            return before if before.prefill_count == count else replace(before, prefill_count=count)
        prefill, decode = self._prefills.joined(part.fitting), self._decodes.joined(part.kinds)
        return CompatibleGroup(part.name, prefill, decode, count)


def _decode_key(_: InstanceId, facts: EngineCapabilities) -> KindKey[str]:
    return compared(facts), facts.incompatible or _NO_NAMES, facts.resting or _NO_NAMES


def _frozen(found: dict[str, list[int]]) -> dict[str, frozenset[int]]:
    return {name: frozenset(numbers) for name, numbers in found.items()}


def _meet(family: _Family, prefills: Sequence[_Prefills]) -> int:
    """Note the kinds of prefill engines that a family fits; return how many were compared."""
    for kind in prefills:
        if family.number not in kind.key[1] and agree(kind.key[0], family.compared):
            family.partners[kind.number] = kind
    return len(prefills)


def _by_slice(prefills: Sequence[_Prefills]) -> dict[object, list[_Prefills]]:
    """List the kinds of prefill engines that the decode engines of each slice may fit."""
    anywhere = [kind for kind in prefills if kind.key[0][WITHIN] is None]
    found = dict[object, list[_Prefills]]()
    for kind in prefills:
        within = kind.key[0][WITHIN]
        if within is not None:
            found.setdefault(within, [*anywhere]).append(kind)
    return found


def _counts(parts: Sequence[_Part]) -> Sequence[float]:
    """Divide each kind of prefill engines among the parts that it fits, in proportion to their decode engines."""
    sizes = [sum([len(kind.engines) for kind in part.kinds]) for part in parts]
    wanted = dict[int, int]()
    for part, size in zip(parts, sizes, strict=True):
        for kind in part.fitting:
            wanted[kind.number] = wanted.get(kind.number, 0) + size
    return [
        fsum([len(kind.engines) * size / wanted[kind.number] for kind in part.fitting])
        for part, size in zip(parts, sizes, strict=True)
    ]


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
