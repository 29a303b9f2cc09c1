"""What each policy is made of, and the fleet that they choose from."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from xpyd_proxy.core.fleet.cache_index import CacheIndex
from xpyd_proxy.core.fleet.push_coordinates import PushCoordinates
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import Instance
from xpyd_proxy.core.routing.pairing import PairPolicy, PairSelector, Policy, PolicyPerLeg
from xpyd_proxy.core.routing.policies.least_loaded import LeastLoaded
from xpyd_proxy.core.routing.policies.power_of_two import PowerOfTwo
from xpyd_proxy.core.routing.policies.prefix import Prefix, PromptCaches
from xpyd_proxy.core.routing.policies.round_robin import Rotation, RoundRobin
from xpyd_proxy.core.routing.policies.session import Session
from xpyd_proxy.core.routing.prompt_memory import PromptMemory
from xpyd_proxy.errors import ConfigError
from xpyd_proxy.io.request_path.live_fleet import Caches, LiveFleet, Loads
from xpyd_proxy.settings import PolicyName, Settings

Dice: TypeAlias = Callable[[int], int]  # dice(n): 0 to n-1


def policies(
    turn: int, dice: Dice, caches: PromptCaches
) -> Mapping[PolicyName, Callable[[Callable[[Instance], float]], Policy]]:
    """Say what each policy is made of: the load of an engine, chance, what is cached, and the turn to begin with."""
    return {
        PolicyName.ROUND_ROBIN: lambda _: RoundRobin(Rotation(turn), Rotation(turn)),
        PolicyName.LEAST_LOADED: lambda load: LeastLoaded(load, turn),
        PolicyName.POWER_OF_TWO: lambda load: PowerOfTwo(load, dice),
        PolicyName.SESSION: lambda load: Session(LeastLoaded(load, turn)),
        PolicyName.PREFIX: lambda load: Prefix(load, LeastLoaded(load, turn), caches),
    }


def fleet_of(
    settings: Settings,
    registry: Registry,
    learned: PushCoordinates,
    clock: Callable[[], float],
    dice: Dice,
    *,
    turn: int = 0,
    index: CacheIndex | None = None,
) -> LiveFleet:
    """Return the engines under the policies of the settings.

    ``turn``: where policies begin, so that several workers do not all begin with the same engine; ``index``: what
    engines tell of their caches. Raises ConfigError.
    """
    if settings.return_kv and settings.decode_policy is not PolicyName.PREFIX:
        raise ConfigError("return_kv needs decode_policy prefix, which remembers what decode engines have cached")
    load, names = Loads(registry, clock).of, (settings.prefill_policy, settings.decode_policy)
    if set(names) == {PolicyName.ROUND_ROBIN}:
        # one for both legs together, or they would advance in step
        choice: PairPolicy = RoundRobin(Rotation(turn), Rotation(turn))
        return LiveFleet(registry, PairSelector(registry, choice), learned, clock)
    caches = Caches(PromptMemory(settings.prefix_lifetime_s), registry, clock, index)
    prefill, decode = (policies(turn, dice, caches)[name](load) for name in names)
    if settings.decode_policy is not PolicyName.PREFIX:
        pairs = PairSelector(registry, PolicyPerLeg(prefill, decode))
        return LiveFleet(registry, pairs, learned, clock, caches)
    prefix = Prefix(load, LeastLoaded(load, turn), caches)
    pairs = PairSelector(registry, PolicyPerLeg(prefill, prefix, decode_first=True), prefix.cached)
    return LiveFleet(registry, pairs, learned, clock, caches, remembers=True)
