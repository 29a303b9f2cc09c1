"""Engines by kind: those of a kind fit the same engines of the other role.

So kinds are compared and not engines: the work grows with the number of engines (4 ms for 2,000 of
them, in plain Python) plus the comparisons of a few kinds, two of each role during a rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import (
    WITHIN,
    Compared,
    EngineCapabilities,
    agree,
    compared,
)
from pdrelay_proxy.core.model import InstanceId

_NO_NAMES: Final = frozenset[str]()


@dataclass(frozen=True, slots=True, eq=False)
class PrefillKind:
    """Prefill engines that fit the same decode engines, by their places among all of their role."""

    known: Compared
    engine_id: str | None  # only where a decode engine refuses it
    name: InstanceId | None  # only where a decode engine rests with it
    places: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeKind:
    """Decode engines that fit the same prefill engines, by their places among all of their role."""

    known: Compared
    refused: frozenset[str]  # engine ids
    resting: frozenset[str]  # prefill engines
    places: list[int]


@dataclass(slots=True)
class EngineKinds:
    """The kinds of both roles, in the order of the first engine of each.

    Decode engines are added first: a prefill engine that one of them avoids is its own kind.
    """

    comparisons: int = 0  # of two kinds, so far
    _prefills: dict[object, PrefillKind] = field(default_factory=dict[object, PrefillKind])
    _decodes: dict[object, DecodeKind] = field(default_factory=dict[object, DecodeKind])
    _refused: set[str] = field(default_factory=set[str])
    _resting: set[str] = field(default_factory=set[str])

    @property
    def prefills(self) -> Sequence[PrefillKind]:
        """List the kinds of prefill engines."""
        return [*self._prefills.values()]

    def add_decode(self, place: int, facts: EngineCapabilities) -> None:
        """Add a decode engine."""
        refused = facts.incompatible or _NO_NAMES
        resting = facts.resting or _NO_NAMES
        known = compared(facts)
        key = known, refused, resting
        kind = self._decodes.get(key)
        if kind is None:
            kind = self._decodes[key] = DecodeKind(known, refused, resting, [])
            self._refused |= refused
            self._resting |= resting
        kind.places.append(place)

    def add_prefill(self, place: int, name: InstanceId, facts: EngineCapabilities) -> None:
        """Add a prefill engine."""
        engine_id = facts.engine_id if facts.engine_id in self._refused else None
        own_name = name if name in self._resting else None
        known = compared(facts)
        key = known, engine_id, own_name
        kind = self._prefills.get(key)
        if kind is None:
            kind = self._prefills[key] = PrefillKind(known, engine_id, own_name, [])
        kind.places.append(place)

    def fitting(self) -> Sequence[tuple[DecodeKind, Sequence[PrefillKind]]]:
        """Return the kinds of decode engines, each with the kinds of prefill engines that it fits.

        Facts are compared once for all kinds that have them, and those of other slices are not even
        looked at: hundreds of slices are tens of thousands of pairs of kinds, of which nearly none
        fit.
        """
        anywhere, by_slice = _by_slice(self.prefills)
        agreeing = dict[Compared, Sequence[PrefillKind]]()  # by the facts of decode engines
        fitting = list[tuple[DecodeKind, Sequence[PrefillKind]]]()
        for kind in self._decodes.values():
            if kind.known not in agreeing:
                within = kind.known[WITHIN]
                near = self.prefills if within is None else by_slice.get(within, anywhere)
                agreeing[kind.known] = self._agreeing(near, kind.known)
            some = [
                prefill
                for prefill in agreeing[kind.known]
                if prefill.engine_id not in kind.refused and prefill.name not in kind.resting
            ]
            fitting.append((kind, some))
        return fitting

    def _agreeing(self, prefills: Sequence[PrefillKind], known: Compared) -> Sequence[PrefillKind]:
        """List the prefill kinds whose facts agree with some."""
        agree_with = dict[Compared, bool]()
        for kind in prefills:
            if kind.known not in agree_with:
                agree_with[kind.known] = agree(kind.known, known)
        self.comparisons += len(agree_with)
        return [kind for kind in prefills if agree_with[kind.known]]


def _by_slice(
    prefills: Sequence[PrefillKind],
) -> tuple[Sequence[PrefillKind], dict[object, list[PrefillKind]]]:
    """List the kinds of prefill engines that fit in any slice, and those that the decode engines of
    each may fit.
    """
    anywhere = [kind for kind in prefills if kind.known[WITHIN] is None]
    by_slice = dict[object, list[PrefillKind]]()
    for kind in prefills:
        within = kind.known[WITHIN]
        if within is not None:
            by_slice.setdefault(within, [*anywhere]).append(kind)
    return anywhere, by_slice
