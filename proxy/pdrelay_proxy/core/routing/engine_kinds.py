"""Engines of one role by kind, kept up to date: if one of thousands has changed, one is moved.

Engines with equal facts are a kind. What has changed is found by comparing two lists of engines, the one before and the
one now. So nothing has to report a change, and no report can be missing; at first the list before is empty.
"""

from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from pdrelay_proxy.core.fleet.compatibility import Compared, EngineCapabilities
from pdrelay_proxy.core.model import Instance, InstanceId

T = TypeVar("T")
# The facts that partners have, too; which engines it refuses, or is refused by; and with which it rests.
KindKey: TypeAlias = tuple[Compared, frozenset[T], frozenset[T]]
AT_ONCE: Final = 500  # engines that are looked at in one step: half a millisecond
_RUN: Final = 100  # engines that are compared at once: where they are the same, that takes a tenth of the time


class CapabilityKind(Generic[T]):
    """Engines of one role with equal facts, in the order of all of their role."""

    def __init__(self, number: int, key: KindKey[T]) -> None:
        self.number = number  # no other kind of the fleet has it, or had it
        self.key = key
        self.engines = dict[InstanceId, Instance]()
        self.first = InstanceId("")  # of these, when all were in order last


class KindChanges(Generic[T]):
    """What another list of engines has changed. It is no dataclass: mypyc compiles none that is generic."""

    def __init__(
        self, before: Sequence[CapabilityKind[T]], after: Sequence[CapabilityKind[T]], touched: frozenset[int]
    ) -> None:
        """``before``, ``after``: the kinds in their order; ``touched``: those that have other engines now, or none."""
        self.touched = touched
        was, now = [kind.number for kind in before], [kind.number for kind in after]
        self.reordered = was != now  # the kinds are others, or their first engines come in another order
        self.came: Sequence[CapabilityKind[T]] = ()
        self.gone: Sequence[CapabilityKind[T]] = ()
        if self.reordered:
            came, gone = set(now).difference(was), set(was).difference(now)
            self.came = [kind for kind in after if kind.number in came]
            self.gone = [kind for kind in before if kind.number in gone]


class EngineKinds(Generic[T]):
    """All engines of one role, by kind."""

    def __init__(self) -> None:
        self.kinds = dict[KindKey[T], CapabilityKind[T]]()  # in the order of their first engines
        self.by_engine = dict[InstanceId, CapabilityKind[T]]()
        self._engines = list[Instance]()
        self._facts = list[EngineCapabilities]()  # of these
        self.is_same = True  # the latest move was one to the same engines, with the same facts
        self._places = dict[InstanceId, int]()  # of all engines in their list; empty: not looked at yet

    def joined(self, kinds: Sequence[CapabilityKind[T]]) -> Sequence[Instance]:
        """List the engines of some kinds, in the order of all of their role."""
        found = dict[InstanceId, Instance]()
        for kind in kinds:
            found.update(kind.engines)
        if len(kinds) > 1:
            places = self._placed()
            return [found[name] for name in sorted(found, key=places.__getitem__)]
        return [*found.values()]

    def move_in_steps(
        self,
        engines: list[Instance],
        facts: list[EngineCapabilities],
        key_of: Callable[[InstanceId, EngineCapabilities], KindKey[T]],
        numbers: Callable[[], int],
        *,
        all_anew: bool = False,
    ) -> Generator[None, None, KindChanges[T]]:
        """Sort these engines in place of those before, in steps. ``all_anew``: the keys of all may be others."""
        found = _differences(self._engines, self._facts, engines, facts, self.by_engine)
        self.is_same = found.is_none
        before = [*self.kinds.values()]
        touched, unsorted = dict[int, CapabilityKind[T]](), dict[int, CapabilityKind[T]]()
        self._engines, self._facts, self._places = engines, facts, {}
        for name in found.gone:
            kind = self.by_engine.pop(name)
            del kind.engines[name]
            touched[kind.number] = kind
            if kind.first == name:
                kind.first = InstanceId("")  # also if it comes anew, for then it has another place
        changed = found.changed if not all_anew else sorted({*range(len(engines))} - {*found.came})
        for count, place in enumerate((*changed, *found.came), start=1):
            instance = engines[place]
            key, old = key_of(instance.id, facts[place]), self.by_engine.get(instance.id)
            if old is None or old.key != key:
                if old is not None:
                    del old.engines[instance.id]
                    touched[old.number] = old
                kind = self._kind_of(key, numbers)
                kind.engines[instance.id] = instance
                self.by_engine[instance.id] = touched[kind.number] = kind
                if old is not None or place < found.settled:
                    unsorted[kind.number] = kind
            if count % AT_ONCE == 0:
                yield
        self._sort(touched, unsorted)
        return KindChanges(before, [*self.kinds.values()], frozenset(touched))

    def _kind_of(self, key: KindKey[T], numbers: Callable[[], int]) -> CapabilityKind[T]:
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = CapabilityKind(numbers(), key)
        return kind

    def _sort(self, touched: dict[int, CapabilityKind[T]], unsorted: dict[int, CapabilityKind[T]]) -> None:
        """Put engines and kinds in order, and drop the kinds that have no engine left."""
        for kind in unsorted.values():
            places, engines = self._placed(), kind.engines
            kind.engines = {name: engines[name] for name in sorted(engines, key=places.__getitem__)}
        is_other_order = False
        for kind in touched.values():
            if not kind.engines:
                del self.kinds[kind.key]
                continue
            first = next(iter(kind.engines))
            is_other_order = is_other_order or first != kind.first
            kind.first = first
        if is_other_order:
            places = self._placed()
            kinds = sorted(self.kinds.values(), key=lambda kind: places[kind.first])
            self.kinds = {kind.key: kind for kind in kinds}

    def _placed(self) -> dict[InstanceId, int]:
        """Return the places of all engines: where one has come at the end, nothing asks for them."""
        if not self._places:
            names = [instance.id for instance in self._engines]
            self._places = dict(zip(names, range(len(names)), strict=True))
        return self._places


@dataclass(frozen=True, slots=True)
class _Differences:
    """How a list of engines differs from one before."""

    gone: Sequence[InstanceId]  # or in another order, and then they come anew
    came: Sequence[int]  # their places in the list
    changed: Sequence[int]  # likewise: those that have other facts
    settled: int  # the engines from this place on all came

    @property
    def is_none(self) -> bool:
        """Tell whether it does not differ."""
        return not (self.gone or self.came or self.changed)


def _differences(
    old: list[Instance],
    old_facts: list[EngineCapabilities],
    new: list[Instance],
    new_facts: list[EngineCapabilities],
    known: Container[InstanceId],
) -> _Differences:
    """Compare two lists side by side; ``known`` has the engines of the old one. Engines keep their order in a fleet."""
    gone, came, changed = list[InstanceId](), list[int](), list[int]()
    i = j = settled = single = 0
    while i < len(old) and j < len(new):
        if single == 0:
            if old[i : i + _RUN] == new[j : j + _RUN] and old_facts[i : i + _RUN] == new_facts[j : j + _RUN]:
                i, j = min(i + _RUN, len(old)), min(j + _RUN, len(new))
                settled = j
                continue
            single = _RUN
        single -= 1
        one, other = old[i], new[j]
        if one is other or one == other:
            if old_facts[i] is not new_facts[j]:
                changed.append(j)
            i, j = i + 1, j + 1
            settled = j
        elif other.id not in known:
            came.append(j)
            j += 1
        else:  # the old one is gone, or comes later
            gone.append(one.id)
            i += 1
    gone.extend([one.id for one in old[i:]])
    came.extend(range(j, len(new)))
    return _Differences(gone, came, changed, settled)
