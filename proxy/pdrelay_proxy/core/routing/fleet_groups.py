"""How the engines of a whole fleet fit each other now, for people who look at it."""

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final, cast

from pdrelay_proxy.core.fleet.compatibility import NO_SLICE, compared, fit, rests
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Member, Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.core.routing.compatible_groups import CompatibleGroup, Grouping, group_engines_in_steps
from pdrelay_proxy.core.routing.group_weights import GroupShare, shares_of
from pdrelay_proxy.core.routing.slices import SliceOf, divide_by_slice, left_out
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.settings import SlicePairing

_AT_ONCE: Final = 500  # engines
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
    return finish(_grouping_in_steps(registry))


def _grouping_in_steps(registry: Registry) -> Generator[None, None, Grouping]:
    members = [member for member in registry.members() if member.life.state in _SERVING]
    sides = [[one for member in members if (one := member.as_role(role)) is not None] for role in Role]
    yield
    found = yield from group_engines_in_steps(sides[0], sides[1], registry.facts)
    return found


def slices(registry: Registry) -> dict[tuple[str, Role], int]:
    """Count the engines that may serve by slice and role, also 0; empty: slices play no part, or no engine has one."""
    members = () if registry.slice_pairing is SlicePairing.OFF else registry.members()
    names = {member.facts.slice for member in members if member.facts.slice is not None}
    found = Counter[tuple[str, Role]]({(name, role): 0 for name in sorted(names) for role in Role})
    for member in members:
        name = member.facts.slice
        if name is not None and member.life.state in _SERVING:
            for role in Role:
                found[name, role] += member.as_role(role) is not None
    return found


def unpaired(registry: Registry) -> dict[Role, int]:
    """Count the engines that fit none of the other role's; none counts where the other role has no engine at all."""
    steps = unpaired_in_steps(registry)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return cast("dict[Role, int]", done.value)


def unpaired_in_steps(registry: Registry) -> Generator[None, None, dict[Role, int]]:
    """Count the same in steps of a millisecond or so: sorting thousands of engines takes longer."""
    members = registry.members()
    decodes = dict[object, list[Member]]()  # those of one kind fit the same engines
    for number, member in enumerate(members, start=1):
        if member.as_role(Role.DECODE) is not None and member.life.state in _SERVING:
            facts = member.facts
            decodes.setdefault((compared(facts), facts.incompatible, facts.resting or None), []).append(member)
        if number % _AT_ONCE == 0:
            yield
    refused = frozenset[str]().union(*(kind[0].facts.incompatible or () for kind in decodes.values()))
    resting = frozenset[InstanceId]().union(*(kind[0].facts.resting or () for kind in decodes.values()))
    prefills = dict[object, list[Member]]()
    for number, member in enumerate(members, start=1):
        facts = member.facts
        if member.as_role(Role.PREFILL) is not None and member.life.state in _SERVING:
            own = facts.engine_id if facts.engine_id in refused else None
            name = member.instance.id if member.instance.id in resting else None
            prefills.setdefault((compared(facts), own, name), []).append(member)
        if number % _AT_ONCE == 0:
            yield
    if not prefills or not decodes:
        return dict.fromkeys(Role, 0)
    alone, paired = 0, set[object]()
    for decode in decodes.values():
        facts = decode[0].facts
        fitting = [
            key
            for key, prefill in prefills.items()
            if not rests(prefill[0].instance.id, facts) and fit(prefill[0].facts, facts)
        ]
        paired.update(fitting)
        alone += 0 if fitting else len(decode)
        yield
    return {
        Role.PREFILL: sum(len(kind) for key, kind in prefills.items() if key not in paired),
        Role.DECODE: alone,
    }


def fleet_groups(registry: Registry, *, may_be_alone: bool) -> Sequence[EngineGroup]:
    """List the groups, if there are several or engines without a partner; empty: one group has all engines."""
    return finish(fleet_groups_in_steps(registry, may_be_alone=may_be_alone))


def fleet_groups_in_steps(registry: Registry, *, may_be_alone: bool) -> Generator[None, None, Sequence[EngineGroup]]:
    """List the same in steps of a millisecond or so, also among thousands of engines."""
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
