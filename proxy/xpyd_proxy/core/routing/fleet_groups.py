"""How the engines of a whole fleet fit each other now, for people who look at it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import Role
from xpyd_proxy.core.routing.compatible_groups import Grouping, group_engines
from xpyd_proxy.core.routing.group_weights import shares_of

_SERVING: Final = frozenset({HealthState.STARTING, HealthState.HEALTHY, HealthState.HALF_OPEN})


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines that can share requests, most often those of one revision."""

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


def unpaired(registry: Registry) -> dict[Role, int]:
    """Count the engines that fit none of the other role's; none counts where the other role has no engine at all."""
    found = grouping_now(registry)
    if not found.groups or not (found.pairs or found.unpaired_prefill):
        return dict.fromkeys(Role, 0)
    return {Role.PREFILL: len(found.unpaired_prefill), Role.DECODE: len(found.unpaired_decode)}


def fleet_groups(registry: Registry, *, may_be_alone: bool) -> Sequence[EngineGroup]:
    """List the groups, if there are several or engines without a partner; empty: all engines fit each other."""
    found = grouping_now(registry)
    lonely = len(found.unpaired_prefill)
    if len(found.groups) + bool(lonely) < 2:
        return ()
    shares = shares_of(found, may_be_alone=may_be_alone).all if found.pairs else ()
    pairs = {share.group.name: share.weight for share in shares if not share.alone}
    alone = {share.group.name: share.weight for share in shares if share.alone}
    groups = [
        EngineGroup(
            group.name,
            len(group.prefill),
            len(group.decode),
            pairs.get(group.name, 0.0),
            alone.get(group.name, 0.0),
        )
        for group in found.groups
    ]
    return [*groups, EngineGroup("no decode engine fits", lonely, 0, 0.0, 0.0)] if lonely else groups
