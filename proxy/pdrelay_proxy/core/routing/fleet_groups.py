"""How the engines of a whole fleet fit each other now, for people who look at it."""

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from pdrelay_proxy.core.fleet.compatibility import NO_SLICE
from pdrelay_proxy.core.fleet.health import SERVING
from pdrelay_proxy.core.fleet.lone_engines import lone_kinds_in_steps
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, Role
from pdrelay_proxy.core.routing.compatible_groups import CompatibleGroup, Grouping, group_engines
from pdrelay_proxy.core.routing.group_weights import GroupShare, shares_of
from pdrelay_proxy.core.routing.slices import SliceOf, divide_by_slice, left_out
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.settings import SlicePairing


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
    return finish(_grouping_in_steps(registry))


def _grouping_in_steps(registry: Registry) -> Generator[None, None, Grouping]:
    members = [member for member in registry.members() if member.life.state in SERVING]
    sides = [[one for member in members if (one := member.as_role(role)) is not None] for role in Role]
    yield
    return group_engines(sides[0], sides[1], registry.facts)


def slices(registry: Registry) -> dict[tuple[str, Role], int]:
    """Count the engines that may serve by slice and role, also 0; empty: slices play no part, or no engine has one."""
    members = () if registry.slice_pairing is SlicePairing.OFF else registry.members()
    names = {member.facts.slice for member in members if member.facts.slice is not None}
    found = Counter[tuple[str, Role]]({(name, role): 0 for name in sorted(names) for role in Role})
    for member in members:
        name = member.facts.slice
        if name is not None and member.life.state in SERVING:
            for role in Role:
                found[name, role] += member.as_role(role) is not None
    return found


def unpaired(registry: Registry) -> dict[Role, int]:
    """Count the engines that fit none of the other role's; none counts where the other role has no engine at all."""
    return finish(unpaired_in_steps(registry))


def unpaired_in_steps(registry: Registry) -> Generator[None, None, dict[Role, int]]:
    """Count the same in steps of a millisecond or so: sorting thousands of engines takes longer."""
    kinds = yield from lone_kinds_in_steps(registry, lambda decode: decode.facts.resting or frozenset())
    return {role: sum(map(len, some)) for role, some in kinds.lone.items()}


def fleet_groups(registry: Registry, *, may_be_alone: bool) -> Sequence[EngineGroup]:
    """List the groups, if there are several or engines without a partner; empty: one group has all engines."""
    return finish(fleet_groups_in_steps(registry, may_be_alone=may_be_alone))


def fleet_groups_in_steps(registry: Registry, *, may_be_alone: bool) -> Generator[None, None, Sequence[EngineGroup]]:
    """List the same in steps; sorting, the longest of them, takes some milliseconds among thousands of engines."""
    found = yield from _grouping_in_steps(registry)
    yield
    shares = _shares(registry, found, may_be_alone=may_be_alone)
    yield
    pairs = {share.group.name: share.weight for share in shares if not share.alone}
    alone = {share.group.name: share.weight for share in shares if share.alone}
    groups = {share.group.name: share.group for share in shares}
    groups.update({group.name: group for group in found.groups if not group.prefill})
    groups.update({group.name: group for group in _left_out(registry, found, shares)})
    rows = [
        EngineGroup(name, len(group.prefill), len(group.decode), pairs.get(name, 0.0), alone.get(name, 0.0))
        for name, group in groups.items()
    ]
    rows += _without_decode(registry, found.unpaired_prefill)
    is_divided = not pairs.keys() <= {group.name for group in found.groups}  # by slice, also if all pairs cross
    return rows if len(rows) > 1 or is_divided else ()


def _shares(registry: Registry, found: Grouping, *, may_be_alone: bool) -> Sequence[GroupShare]:
    """Divide the traffic as requests are divided."""
    if not found.pairs:
        return ()
    shares = shares_of(found, may_be_alone=may_be_alone)
    if registry.slice_pairing is SlicePairing.PREFER:
        shares = divide_by_slice(shares, _slice_of(registry))
    return shares.all


def _left_out(registry: Registry, found: Grouping, shares: Sequence[GroupShare]) -> Sequence[CompatibleGroup]:
    """List the engines that have a partner in other slices alone, and get no traffic, by slice."""
    if registry.slice_pairing is not SlicePairing.PREFER or not shares:
        return ()
    names = {one.id for share in shares for side in (share.group.prefill, share.group.decode) for one in side}
    return [part for group in found.pairs for part in left_out(group, names, _slice_of(registry))]


def _slice_of(registry: Registry) -> SliceOf:
    return lambda instance: registry.facts(instance).slice


def _without_decode(registry: Registry, prefill: Sequence[Instance]) -> Sequence[EngineGroup]:
    """Count the prefill engines that no decode engine fits, by their slice where pairs need one."""
    within = Counter(registry.facts(instance).pairs_within for instance in prefill)
    named = {None: "", NO_SLICE: ", slice none"}
    return [
        EngineGroup(f"no decode engine fits{named.get(name, f', slice {name}')}", count, 0, 0.0, 0.0)
        for name, count in within.items()
    ]
