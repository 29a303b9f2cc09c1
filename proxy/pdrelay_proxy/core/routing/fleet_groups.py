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
from pdrelay_proxy.core.routing.pair_preference import PairPreference


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines that can share requests, most often those of one revision or of one slice."""

    name: str  # what is known of them
    prefill: int  # engines
    decode: int
    pairs: float  # share of the requests that two of these engines serve
    alone: float  # share of the requests that one of these decode engines serves alone


def grouping_in_steps(registry: Registry) -> Generator[None, None, Grouping]:
    """Sort all engines that may serve into groups, whatever their models."""
    members = [member for member in registry.members() if member.life.state in SERVING]
    sides = [
        [instance for member in members if (instance := member.as_role(role)) is not None]
        for role in Role
    ]
    yield
    return group_engines(sides[0], sides[1], registry.facts)


def unpaired_in_steps(registry: Registry) -> Generator[None, None, dict[Role, int]]:
    """Count the engines that fit none of the other role's; none counts where the other role has no
    engine at all.

    A step takes a millisecond or so: sorting thousands of engines takes longer.
    """
    kinds = yield from lone_kinds_in_steps(registry, {})
    return {role: sum(map(len, lone)) for role, (_, lone) in kinds.items()}


def fleet_groups_in_steps(
    registry: Registry, preference: PairPreference | None, *, may_be_alone: bool
) -> Generator[None, None, Sequence[EngineGroup]]:
    """List the groups, if there are several or engines without a partner; empty: one group has all
    engines.

    Sorting, the longest step, takes some milliseconds among thousands of engines.
    """
    grouping = yield from grouping_in_steps(registry)
    yield
    shares = _shares(preference, grouping, may_be_alone=may_be_alone)
    yield
    pairs = {share.group.name: share.weight for share in shares if not share.alone}
    alone = {share.group.name: share.weight for share in shares if share.alone}
    groups = {share.group.name: share.group for share in shares}
    groups.update({group.name: group for group in grouping.groups if not group.prefill})
    groups.update({group.name: group for group in _left_out(preference, grouping, shares)})
    rows = [
        EngineGroup(
            name, len(group.prefill), len(group.decode), pairs.get(name, 0.0), alone.get(name, 0.0)
        )
        for name, group in groups.items()
    ]
    rows += _without_decode(registry, grouping.unpaired_prefill)
    is_divided = not pairs.keys() <= {group.name for group in grouping.groups}  # by a preference
    return rows if len(rows) > 1 or is_divided else ()


def _shares(
    preference: PairPreference | None, grouping: Grouping, *, may_be_alone: bool
) -> Sequence[GroupShare]:
    """Divide the traffic as requests are divided."""
    if not grouping.pairs:
        return ()
    shares = shares_of(grouping, may_be_alone=may_be_alone)
    return shares.all if preference is None else preference.divide(shares).all


def _left_out(
    preference: PairPreference | None, grouping: Grouping, shares: Sequence[GroupShare]
) -> Sequence[CompatibleGroup]:
    """List the engines whose partners are not preferred, and get no traffic."""
    if preference is None or not shares:
        return ()
    names = {
        instance.id
        for share in shares
        for side in (share.group.prefill, share.group.decode)
        for instance in side
    }
    return [part for group in grouping.pairs for part in preference.left_out(group, names)]


def _without_decode(registry: Registry, prefill: Sequence[Instance]) -> Sequence[EngineGroup]:
    """Count the prefill engines that no decode engine fits, by their slice where pairs need one."""
    within = Counter(registry.facts(instance).pairs_within for instance in prefill)
    named = {None: "", NO_SLICE: ", slice none"}
    return [
        EngineGroup(
            f"no decode engine fits{named.get(name, f', slice {name}')}", count, 0, 0.0, 0.0
        )
        for name, count in within.items()
    ]
