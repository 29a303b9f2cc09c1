"""Slices of a fleet: zones, racks or NVLink domains, within which KV moves fast
(``slice_pairing``).

``require`` is a fact like the revision: two engines of two slices do not fit
(core/fleet/compatibility.py). ``prefer`` is here: the traffic of engines that fit is divided once
more. With p and d engines of the roles, a slice with p_s and d_s of them gets min(p_s / p, d_s / d)
of the requests for pairs of its own, and up to ``BOUND`` times that while there is more. Only what
is left then crosses: from prefill engines of slices that lack decode engines to decode engines of
slices that lack prefill engines. So no engine gets more than ``BOUND`` times the mean, however
uneven the slices are.
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
_WITHOUT: Final = "-"  # the name of those without a slice: no label is like that
_MOST_REASONS: Final = 4096


class CrossingReason(StrEnum):
    """Why the two engines of a request are of two slices."""

    NO_ENGINE = "no_engine"  # the slice of one of them has no engine of the other role
    DRAINING = "draining"  # all of those are drained
    UNAVAILABLE = "unavailable"  # those that are not drained are ejected, or have not come up
    FAILED = "failed"  # they have failed this request before
    FULL = "full"  # they have all that they can take: BOUND times the mean


@dataclass(slots=True)
class _Slice:
    """The engines of a slice."""

    name: str
    prefill: list[Instance] = field(default_factory=list[Instance])
    decode: list[Instance] = field(default_factory=list[Instance])


@dataclass(slots=True)
class _Room:
    """Engines of one role, and the part of the traffic that they can take from other slices."""

    name: str
    engines: Sequence[Instance]
    weight: float


def divide_by_slice(shares: Shares, slice_of: SliceOf) -> Shares:
    """Divide the shares of pairs once more, so that both engines are of one slice as far as that is
    fair.

    A group in which not all engines fit stays whole: in it each pair is looked at.
    """
    found = list[GroupShare]()
    for share in shares.all:
        found.extend(
            [share] if share.alone or not share.group.all_fit else _divided(share, slice_of)
        )
    return Shares(found, shares.prefills, shares.decodes)


def left_out(
    group: CompatibleGroup, served: Set[InstanceId], slice_of: SliceOf
) -> Sequence[CompatibleGroup]:
    """List the engines of a group that get no traffic, by slice: they have no partner there, and no
    pair crosses.
    """
    found = list[CompatibleGroup]()
    for each in _slices(group, slice_of):
        prefill = [instance for instance in each.prefill if instance.id not in served]
        decode = [instance for instance in each.decode if instance.id not in served]
        if prefill or decode:
            found.append(CompatibleGroup(_name(group, each), prefill, decode, 0.0))
    return found


def nearest(engine: Instance, others: Sequence[Instance], slice_of: SliceOf) -> Sequence[Instance]:
    """List those of some engines that are in the slice of another one; all of them, if none is."""
    wanted = slice_of(engine)
    return [other for other in others if slice_of(other) == wanted] or others


def _divided(share: GroupShare, slice_of: SliceOf) -> Sequence[GroupShare]:
    group = share.group
    slices = _slices(group, slice_of)
    if len(slices) == 1:
        return [share]
    p = len(group.prefill)
    d = len(group.decode)
    fair = [min(len(each.prefill) / p, len(each.decode) / d) for each in slices]
    total = fsum(fair)
    stretch = min(1.0 / total, BOUND) if total > 0 else 1.0
    found = list[GroupShare]()
    givers = list[_Room]()
    takers = list[_Room]()
    for each, least in zip(slices, fair, strict=True):
        used = least * stretch
        if least > 0:
            part = CompatibleGroup(
                _name(group, each),
                each.prefill,
                each.decode,
                group.prefill_count * len(each.prefill) / p,
            )
            weight = share.weight * used
            found.append(
                GroupShare(part, alone=False, weight=weight, limit=share.weight * least * BOUND)
            )
        givers.append(_Room(each.name, each.prefill, max(0.0, len(each.prefill) / p - used)))
        takers.append(_Room(each.name, each.decode, max(0.0, len(each.decode) / d - used)))
    left = 1.0 - total * stretch
    if left > _LEAST:
        found.extend(_crossing(share, _scaled(givers, left), _scaled(takers, left)))
    return found


def _name(group: CompatibleGroup, part: _Slice) -> str:
    return f"{group.name}, slice {part.name}"


def _slices(group: CompatibleGroup, slice_of: SliceOf) -> Sequence[_Slice]:
    """Sort the engines of a group by slice; those without one are a slice of their own."""
    found = dict[str | None, _Slice]()
    for engines, is_prefill in ((group.prefill, True), (group.decode, False)):
        for instance in engines:
            name = slice_of(instance)
            part = found.get(name)
            if part is None:
                part = found[name] = _Slice(name or _WITHOUT)
            (part.prefill if is_prefill else part.decode).append(instance)
    return list(found.values())


def _scaled(rooms: Sequence[_Room], total: float) -> list[_Room]:
    """Leave out the slices without room, and let the others take ``total`` in proportion to
    theirs.
    """
    some = [room for room in rooms if room.weight > _LEAST]
    factor = total / fsum([room.weight for room in some]) if some else 0.0
    return [_Room(room.name, room.engines, room.weight * factor) for room in some]


def _crossing(share: GroupShare, givers: list[_Room], takers: list[_Room]) -> Sequence[GroupShare]:
    """Join prefill engines of some slices with decode engines of others, so that each gets what it
    has room for.

    The first giver fills the first taker, and so on (the northwest corner rule of transport
    problems): there are fewer pairs of slices than slices.
    """
    found = list[GroupShare]()
    i = 0
    j = 0
    while i < len(givers) and j < len(takers):
        giver = givers[i]
        taker = takers[j]
        weight = min(giver.weight, taker.weight)
        if weight > _LEAST:
            name = f"{share.group.name}, slice {giver.name} to {taker.name}"
            part = CompatibleGroup(name, giver.engines, taker.engines, 0.0)
            whole = share.weight * weight
            found.append(GroupShare(part, alone=False, weight=whole, limit=whole * BOUND))
        giver.weight -= weight
        taker.weight -= weight
        if giver.weight <= _LEAST:
            i += 1
        if taker.weight <= _LEAST:
            j += 1
    return found


class SlicePreference(PairPreference):
    """Divides traffic by slice, and counts the pairs of two slices by reason."""

    __slots__ = ("_found", "_registry", "_version", "counted")

    def __init__(self, registry: Registry) -> None:
        self.counted = Counter[Key]()  # by CrossingReason
        self._registry = registry
        self._found = dict[tuple[Role, str | None, str | None], CrossingReason | None]()
        self._version = -1  # changes of the registry for which that holds

    def divide(self, shares: Shares, /) -> Shares:
        """Divide them so that both engines of a request are of one slice as far as that is fair."""
        return divide_by_slice(shares, self._slice_of)

    def left_out(
        self, group: CompatibleGroup, served: Set[InstanceId], /
    ) -> Sequence[CompatibleGroup]:
        """List the engines of a group that get no traffic, by slice."""
        return left_out(group, served, self._slice_of)

    def nearest(self, engine: Instance, others: Sequence[Instance], /) -> Sequence[Instance]:
        """List those of some engines that are in the slice of another one; all of them, if none
        is.
        """
        return nearest(engine, others, self._slice_of)

    def note(self, prefill: Instance | None, decode: Instance, hints: RoutingHints, /) -> None:
        """Count a pair, if it crosses; None: the decode engine is alone."""
        if prefill is not None:
            reason = self.reason(prefill, decode, hints)
            if reason is not None:
                self.counted[(reason.value,)] += 1

    def reason(
        self, prefill: Instance, decode: Instance, hints: RoutingHints, /
    ) -> CrossingReason | None:
        """Say why a pair crosses; None: it does not."""
        here = self._slice_of(prefill)
        there = self._slice_of(decode)
        if here == there:
            return None
        lacks = self._lack(Role.DECODE, here, hints.model)
        if lacks is None:
            lacks = (
                CrossingReason.FAILED
                if hints.again
                else self._lack(Role.PREFILL, there, hints.model)
            )
        return lacks or CrossingReason.FULL

    def _lack(self, role: Role, name: str | None, model: str | None) -> CrossingReason | None:
        """Say why a slice has no engine of a role that can take a request; None: it has one."""
        changes = self._registry.changes.count
        if changes != self._version or len(self._found) > _MOST_REASONS:
            self._version = changes
            self._found.clear()
        key = role, name, model
        if key not in self._found:
            self._found[key] = self._why_none(role, name, model)
        return self._found[key]

    def _why_none(self, role: Role, name: str | None, model: str | None) -> CrossingReason | None:
        there = [
            member.life
            for member in self._registry.members()
            if member.as_role(role) is not None
            and member.facts.slice == name
            and member.facts.serves(model)
        ]
        if not there:
            return CrossingReason.NO_ENGINE
        if any(life.state in WELL and not life.is_away for life in there):
            return None
        left = [life for life in there if life.state not in LEAVING]
        return CrossingReason.UNAVAILABLE if left else CrossingReason.DRAINING

    def _slice_of(self, instance: Instance) -> str | None:
        return self._registry.facts(instance).slice


def slice_sizes(registry: Registry) -> dict[tuple[str, Role], int]:
    """Count the engines that may serve by slice and role, also 0; empty: no engine has a slice."""
    members = registry.members()
    names = {member.facts.slice for member in members if member.facts.slice is not None}
    found = Counter[tuple[str, Role]]({(name, role): 0 for name in sorted(names) for role in Role})
    for member in members:
        name = member.facts.slice
        if name is not None and member.life.state in SERVING:
            for role in Role:
                found[name, role] += member.as_role(role) is not None
    return found
