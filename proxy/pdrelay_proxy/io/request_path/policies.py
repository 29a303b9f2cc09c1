"""What each policy is made of, and the fleet that they choose from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet.pair_history import PairHistory
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.protocol.push import TRANSFER_POLICIES
from pdrelay_proxy.core.routing.alone_bound import AloneBound
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.pairing import Policy, PolicyPerLeg
from pdrelay_proxy.core.routing.policies.least_loaded import LeastLoaded
from pdrelay_proxy.core.routing.policies.power_of_two import PowerOfTwo
from pdrelay_proxy.core.routing.policies.prefix import Prefix
from pdrelay_proxy.core.routing.policies.round_robin import Rotation, RoundRobin
from pdrelay_proxy.core.routing.policies.session import Session
from pdrelay_proxy.core.routing.policy_parts import PolicyParts
from pdrelay_proxy.core.routing.prompt_memory import PREFIX_LIFETIME_S, PromptMemory
from pdrelay_proxy.core.routing.routing_parts import RoutingParts, Weighing, merged
from pdrelay_proxy.core.routing.share_bound import ShareBounds
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.request_path.caches import Caches
from pdrelay_proxy.io.request_path.deferred import DeferredCalls
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet, Loads
from pdrelay_proxy.io.routing_plugins import installed_policy
from pdrelay_proxy.settings import PolicyName, Settings

Dice: TypeAlias = Callable[[int], int]  # dice(n): 0 to n-1

# They send an engine more than others for what it has; the load or turns bound the others.
_LOYAL: Final = frozenset({PolicyName.PREFIX, PolicyName.SESSION})
_OWN: Final[Mapping[str, Callable[[PolicyParts], Policy]]] = {
    PolicyName.ROUND_ROBIN: lambda parts: RoundRobin(Rotation(parts.turn), Rotation(parts.turn)),
    PolicyName.LEAST_LOADED: lambda parts: LeastLoaded(parts.load, parts.turn),
    PolicyName.POWER_OF_TWO: lambda parts: PowerOfTwo(parts.load, parts.dice),
    PolicyName.SESSION: lambda parts: Session(LeastLoaded(parts.load, parts.turn)),
    PolicyName.PREFIX: lambda parts: Prefix(
        parts.load, LeastLoaded(parts.load, parts.turn), parts.caches
    ),
}


def policy_of(name: str, parts: PolicyParts, by_features: Sequence[str] = ()) -> Policy:
    """Build the policy of one leg: the router's own, or one that is installed. Raises ConfigError.

    ``by_features``: the names of others, for both legs.
    """
    build = _OWN.get(name)
    return installed_policy(name, parts, by_features) if build is None else build(parts)


def fleet_of(
    settings: Settings,
    registry: Registry,
    learned: PushCoordinates,
    clock: Callable[[], float],
    dice: Dice,
    *,
    turn: int = 0,
    added: Sequence[RoutingParts] = (),
    later: DeferredCalls | None = None,
) -> LiveFleet:
    """Return the engines under the policies of the settings; raises ConfigError: there is no such
    policy.

    ``turn``: where policies begin, so that several routers do not all begin with the same engine;
    ``added``: by features; ``later``: as in LiveFleet.
    """
    features = merged(added)
    by_cache = (PolicyName.PREFIX, *features.policies)
    names = settings.prefill_policy, settings.decode_policy
    if settings.return_kv and settings.decode_policy not in by_cache:
        names_known = " or ".join(by_cache)
        raise ConfigError(
            f"return_kv needs decode_policy {names_known}: others forget what decode engines have "
            f"cached"
        )
    caches: Caches | None = None
    weighing: Weighing | None = None
    listeners = features.listeners
    if set(names) == {PolicyName.ROUND_ROBIN}:
        # one for both legs together, or they would advance in step
        groups = GroupChoice(RoundRobin(Rotation(turn), Rotation(turn)))
    else:
        caches = Caches(PromptMemory(PREFIX_LIFETIME_S), registry, clock, features.reports)
        loads = Loads(registry, clock)
        parts = PolicyParts(loads.of, dice, turn, caches, loads.kv_usage)
        weighing = features.weigh(parts)
        groups = _groups(names, parts, weighing, ShareBounds(registry), features.policies)
    if weighing is not None:  # before the others: what is sent to an engine is no longer new to it
        listeners = [weighing.listener, *listeners]
    remembers = groups.holder is not None
    spares = None if weighing is None else weighing.spares
    pairs = PairSelector(
        registry,
        groups,
        AloneBound(registry, clock, spares) if remembers else None,
        None if weighing is None else weighing.policy,
        # With reuse_kv a new prompt goes to a prefill engine, however short it is: its later turns
        # find its KV there.
        short_alone=not (settings.reuse_kv and settings.decode_policy in by_cache),
        preference=features.preference,
        pair_history=PairHistory() if features.pair_history is None else features.pair_history,
    )
    return LiveFleet(
        registry,
        pairs,
        learned,
        clock,
        caches,
        remembers=remembers,
        id_reader=features.id_reader,
        added=listeners,
        fixed_mode=TRANSFER_POLICIES[settings.kv_transfer_mode].fixed,
        later=later,
    )


def _groups(
    names: tuple[str, str],
    parts: PolicyParts,
    weighing: Weighing | None,
    bounds: ShareBounds,
    by_features: Sequence[str],
) -> GroupChoice:
    """Build what chooses by policies that are not both turns; raises ConfigError."""
    if weighing is not None and weighing.policy is not None:
        return GroupChoice(weighing.policy, weighing.policy, bounds=bounds)
    prefill, decode = (policy_of(name, parts, by_features) for name in names)
    # what weighs notes what engines are sent, once it has looked at what these have
    other = LeastLoaded(parts.load, parts.turn)
    prefix = Prefix(parts.load, other, parts.caches, notes=weighing is None)
    if weighing is not None and names[0] == PolicyName.PREFIX:
        prefill = prefix.copy()
    if names[1] == PolicyName.PREFIX:
        return GroupChoice(PolicyPerLeg(prefill, prefix, decode_first=True), prefix, bounds=bounds)
    return GroupChoice(
        PolicyPerLeg(prefill, decode),
        prefill_holders=prefill.holders if isinstance(prefill, Prefix) else None,
        bounds=None if _LOYAL.isdisjoint(names) else bounds,
    )
