"""How the engines of a whole fleet fit each other now, for people who look at it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xpyd_proxy.core.fleet.compatibility import NO_SLICE
from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import Instance, Role
from xpyd_proxy.core.routing.compatible_groups import Grouping, group_engines
from xpyd_proxy.core.routing.group_weights import GroupShare, shares_of
from xpyd_proxy.core.routing.slices import divide_by_slice
from xpyd_proxy.settings import SlicePairing

_SERVING: Final = frozenset({HealthState.STARTING, HealthState.HEALTHY, HealthState.HALF_OPEN})


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines that can share requests, most often those of one revision or of one slice."""

    name: str  # what is known of them
    prefill: int  # engines
    decode: int
    pairs: float  # share of the requests that two of these engines serve
    alone: float  # share of the requests that one of these decode engines serves alone


def grouping_now(registry: Registry) -> Grouping:
    """Sort all engines that may serve into groups, whatever their models."""
    members = [member for member in registry.members() if member.life.state in _SERVING]
    prefill = [member.instance for member in members if member.instance.role is Role.PREFILL]
    decode = [member.instance for member in members if member.instance.role is Role.DECODE]
    return group_engines(prefill, decode, registry.facts)


def slices(registry: Registry) -> dict[tuple[str, Role], int]:
    """Count the engines that may serve by slice and role, also 0; empty: slices play no part, or no engine has one."""
    members = () if registry.slice_pairing is SlicePairing.OFF else registry.members()
    names = {member.facts.slice for member in members if member.facts.slice is not None}
    found = Counter[tuple[str, Role]]({(name, role): 0 for name in sorted(names) for role in Role})
    for member in members:
        name = member.facts.slice
        if name is not None and member.life.state in _SERVING:
            found[name, member.instance.role] += 1
    return found


def unpaired(registry: Registry) -> dict[Role, int]:
    """Count the engines that fit none of the other role's; none counts where the other role has no engine at all."""
    found = grouping_now(registry)
    if not found.groups or not (found.pairs or found.unpaired_prefill):
        return dict.fromkeys(Role, 0)
    return {Role.PREFILL: len(found.unpaired_prefill), Role.DECODE: len(found.unpaired_decode)}


def fleet_groups(registry: Registry, *, may_be_alone: bool) -> Sequence[EngineGroup]:
    """List the groups, if there are several or engines without a partner; empty: all engines fit each other."""
    found = grouping_now(registry)
    shares = _shares(registry, found, may_be_alone=may_be_alone)
    pairs = {share.group.name: share.weight for share in shares if not share.alone}
    alone = {share.group.name: share.weight for share in shares if share.alone}
    groups = {share.group.name: share.group for share in shares}
    groups.update({group.name: group for group in found.groups if not group.prefill})
    rows = [
        EngineGroup(name, len(group.prefill), len(group.decode), pairs.get(name, 0.0), alone.get(name, 0.0))
        for name, group in groups.items()
    ]
    rows += _without_decode(registry, found.unpaired_prefill)
    return rows if len(rows) > 1 else ()


def _shares(registry: Registry, found: Grouping, *, may_be_alone: bool) -> Sequence[GroupShare]:
    """Divide the traffic as requests are divided."""
    if not found.pairs:
        return ()
    shares = shares_of(found, may_be_alone=may_be_alone)
    if registry.slice_pairing is SlicePairing.PREFER:
        shares = divide_by_slice(shares, lambda instance: registry.facts(instance).slice)
    return shares.all


def _without_decode(registry: Registry, prefill: Sequence[Instance]) -> Sequence[EngineGroup]:
    """Count the prefill engines that no decode engine fits, by their slice where pairs need one."""
    within = Counter(registry.facts(instance).pairs_within for instance in prefill)
    named = {None: "", NO_SLICE: ", slice none"}
    return [
        EngineGroup(f"no decode engine fits{named.get(name, f', slice {name}')}", count, 0, 0.0, 0.0)
        for name, count in within.items()
    ]
