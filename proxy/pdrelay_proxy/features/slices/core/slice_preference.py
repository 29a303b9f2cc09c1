"""Slices of a fleet: zones, racks or NVLink domains, within which KV moves fast
(``slice_pairing``).

``require`` is a rule of compatibility, like the revision: engines of two slices do not fit
(core/fleet/compatibility.py). ``prefer`` is implemented here: it divides the traffic of fitting
engines by slice. With p and d engines of the two roles, a slice with p_s and d_s of them gets
min(p_s / p, d_s / d) of the requests for its own pairs, and up to ``BOUND`` times that if there is
more. Only the rest crosses: from prefill engines of slices that lack decode engines to decode
engines of slices that lack prefill engines. So no engine gets more than ``BOUND`` times the mean,
however uneven the slices are.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum
from typing import Final, TypeAlias

from pdrelay_proxy.core.counters import Key
from pdrelay_proxy.core.fleet.health import LEAVING, SERVING, WELL
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from pdrelay_proxy.core.routing.compatible_groups import CompatibleGroup
from pdrelay_proxy.core.routing.group_weights import BOUND, GroupShare, Shares
from pdrelay_proxy.core.routing.pair_preference import PairPreference

SliceOf: TypeAlias = Callable[[Instance], str | None]
_LEAST: Final = 1e-9
_WITHOUT: Final = "-"  # the name for engines without a slice: no label can have it
_MOST_REASONS: Final = 4096


class CrossingReason(StrEnum):
    """Why the two engines of a request are of two slices."""

    NO_ENGINE = "no_engine"  # the slice of one of them has no engine of the other role
    DRAINING = "draining"  # all engines of the other role there are drained
    UNAVAILABLE = "unavailable"  # those that are not drained are ejected, or not up yet
    FAILED = "failed"  # they have failed this request before
    FULL = "full"  # they have their most traffic: BOUND times the mean


@dataclass(slots=True)
class _Slice:
    """The engines of a slice."""

    name: str
    prefill: list[Instance] = field(default_factory=list[Instance])
    decode: list[Instance] = field(default_factory=list[Instance])


@dataclass(slots=True)
class _Room:
    """Engines of one role, and the share of the traffic that they can take from other slices."""

    name: str
    engines: Sequence[Instance]
    weight: float


def divide_by_slice(shares: Shares, slice_of: SliceOf) -> Shares:
    """Divide the shares of pairs by slice, as far as that is fair.

    A group in which not all engines fit stays undivided: there each pair is checked on its own.
    """
    divided = list[GroupShare]()
    for share in shares.all:
        divided.extend(
            [share] if share.alone or not share.group.all_fit else _divided(share, slice_of)
        )
    return Shares(divided, shares.prefills, shares.decodes)


def left_out(
    group: CompatibleGroup, served: Set[InstanceId], slice_of: SliceOf
) -> Sequence[CompatibleGroup]:
    """Return the engines of a group that get no traffic, by slice: without a partner there."""
    groups = list[CompatibleGroup]()
    for part in _slices(group, slice_of):
        prefill = [instance for instance in part.prefill if instance.id not in served]
        decode = [instance for instance in part.decode if instance.id not in served]
        if prefill or decode:
            groups.append(CompatibleGroup(_name(group, part), prefill, decode, 0.0))
    return groups


def nearest(engine: Instance, others: Sequence[Instance], slice_of: SliceOf) -> Sequence[Instance]:
    """Return those of ``others`` that are in the engine's slice; if there are none, all."""
    slice_name = slice_of(engine)
    return [candidate for candidate in others if slice_of(candidate) == slice_name] or others


def _divided(share: GroupShare, slice_of: SliceOf) -> Sequence[GroupShare]:
    group = share.group
    slices = _slices(group, slice_of)
    if len(slices) == 1:
        return [share]
    prefills = len(group.prefill)
    decodes = len(group.decode)
    fair = [
        min(len(engines.prefill) / prefills, len(engines.decode) / decodes) for engines in slices
    ]
    total = fsum(fair)
    stretch = min(1.0 / total, BOUND) if total > 0 else 1.0
    shares = list[GroupShare]()
    givers = list[_Room]()
    takers = list[_Room]()
    for engines, least in zip(slices, fair, strict=True):
        used = least * stretch
        if least > 0:
            part = CompatibleGroup(
                _name(group, engines),
                engines.prefill,
                engines.decode,
                group.prefill_count * len(engines.prefill) / prefills,
            )
            weight = share.weight * used
            shares.append(
                GroupShare(part, alone=False, weight=weight, limit=share.weight * least * BOUND)
            )
        givers.append(
            _Room(engines.name, engines.prefill, max(0.0, len(engines.prefill) / prefills - used))
        )
        takers.append(
            _Room(engines.name, engines.decode, max(0.0, len(engines.decode) / decodes - used))
        )
    rest = 1.0 - total * stretch
    if rest > _LEAST:
        shares.extend(_crossing(share, _scaled(givers, rest), _scaled(takers, rest)))
    return shares


def _name(group: CompatibleGroup, part: _Slice) -> str:
    return f"{group.name}, slice {part.name}"


def _slices(group: CompatibleGroup, slice_of: SliceOf) -> Sequence[_Slice]:
    """Group engines by slice; those without a slice are one of their own."""
    slices = dict[str | None, _Slice]()
    for engines, is_prefill in ((group.prefill, True), (group.decode, False)):
        for instance in engines:
            name = slice_of(instance)
            part = slices.get(name)
            if part is None:
                part = slices[name] = _Slice(name or _WITHOUT)
            (part.prefill if is_prefill else part.decode).append(instance)
    return list(slices.values())


def _scaled(rooms: Sequence[_Room], total: float) -> list[_Room]:
    """Scale the rooms so that they take ``total`` together; slices without room are left out."""
    some = [room for room in rooms if room.weight > _LEAST]
    factor = total / fsum([room.weight for room in some]) if some else 0.0
    return [_Room(room.name, room.engines, room.weight * factor) for room in some]


def _crossing(share: GroupShare, givers: list[_Room], takers: list[_Room]) -> Sequence[GroupShare]:
    """Join prefill engines of some slices with decode engines of others, up to their room.

    The first giver fills the first taker, and so on (the northwest corner rule for transportation
    problems), so there are fewer pairs of slices than slices.
    """
    shares = list[GroupShare]()
    i = 0
    j = 0
    while i < len(givers) and j < len(takers):
        giver = givers[i]
        taker = takers[j]
        weight = min(giver.weight, taker.weight)
        if weight > _LEAST:
            name = f"{share.group.name}, slice {giver.name} to {taker.name}"
            part = CompatibleGroup(name, giver.engines, taker.engines, 0.0)
            total = share.weight * weight
            shares.append(GroupShare(part, alone=False, weight=total, limit=total * BOUND))
        giver.weight -= weight
        taker.weight -= weight
        if giver.weight <= _LEAST:
            i += 1
        if taker.weight <= _LEAST:
            j += 1
    return shares


class SlicePreference(PairPreference):
    """Divides traffic by slice, and counts the pairs of two slices by reason."""

    __slots__ = ("_reasons", "_registry", "_version", "counted")

    def __init__(self, registry: Registry) -> None:
        self.counted = Counter[Key]()  # by CrossingReason
        self._registry = registry
        self._reasons = dict[tuple[Role, str | None, str | None], CrossingReason | None]()
        self._version = -1  # the count of registry changes for which the reasons hold

    def divide(self, shares: Shares, /) -> Shares:
        """Divide the shares of pairs by slice, as far as that is fair."""
        return divide_by_slice(shares, self._slice_of)

    def left_out(
        self, group: CompatibleGroup, served: Set[InstanceId], /
    ) -> Sequence[CompatibleGroup]:
        """Return the engines of a group that get no traffic, by slice."""
        return left_out(group, served, self._slice_of)

    def nearest(self, engine: Instance, others: Sequence[Instance], /) -> Sequence[Instance]:
        """Return those of ``others`` that are in the engine's slice; if there are none, all."""
        return nearest(engine, others, self._slice_of)

    def note(self, prefill: Instance | None, decode: Instance, hints: RoutingHints, /) -> None:
        """Count a pair that crosses slices; ``prefill`` is None if the decode engine is alone."""
        if prefill is not None:
            reason = self.reason(prefill, decode, hints)
            if reason is not None:
                self.counted[(reason.value,)] += 1

    def reason(
        self, prefill: Instance, decode: Instance, hints: RoutingHints, /
    ) -> CrossingReason | None:
        """Return why a pair crosses slices; None: it does not."""
        prefill_slice = self._slice_of(prefill)
        decode_slice = self._slice_of(decode)
        if prefill_slice == decode_slice:
            return None
        lacks = self._lack(Role.DECODE, prefill_slice, hints.model)
        if lacks is None:
            lacks = (
                CrossingReason.FAILED
                if hints.again
                else self._lack(Role.PREFILL, decode_slice, hints.model)
            )
        return lacks or CrossingReason.FULL

    def _lack(self, role: Role, name: str | None, model: str | None) -> CrossingReason | None:
        """Return why a slice has no engine of a role for a request; None: it has one."""
        changes = self._registry.changes.count
        if changes != self._version or len(self._reasons) > _MOST_REASONS:
            self._version = changes
            self._reasons.clear()
        key = role, name, model
        if key not in self._reasons:
            self._reasons[key] = self._why_none(role, name, model)
        return self._reasons[key]

    def _why_none(self, role: Role, name: str | None, model: str | None) -> CrossingReason | None:
        lives = [
            member.life
            for member in self._registry.members()
            if member.as_role(role) is not None
            and member.facts.slice == name
            and member.facts.serves(model)
        ]
        if not lives:
            return CrossingReason.NO_ENGINE
        if any(life.state in WELL and not life.is_away for life in lives):
            return None
        staying = [life for life in lives if life.state not in LEAVING]
        return CrossingReason.UNAVAILABLE if staying else CrossingReason.DRAINING

    def _slice_of(self, instance: Instance) -> str | None:
        return self._registry.facts(instance).slice


def slice_sizes(registry: Registry) -> dict[tuple[str, Role], int]:
    """Count the serving engines by slice and role, also 0; empty: no engine has a slice."""
    members = registry.members()
    names = {member.facts.slice for member in members if member.facts.slice is not None}
    sizes = Counter[tuple[str, Role]]({(name, role): 0 for name in sorted(names) for role in Role})
    for member in members:
        name = member.facts.slice
        if name is not None and member.life.state in SERVING:
            for role in Role:
                sizes[name, role] += member.as_role(role) is not None
    return sizes
