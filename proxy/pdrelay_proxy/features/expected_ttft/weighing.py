"""Adds the policy, and its costs, to the choice of engines."""

from collections.abc import Callable
from functools import partial
from typing import Final

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.routing.policy_parts import PolicyParts
from pdrelay_proxy.core.routing.routing_parts import RoutingParts, Weighing
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.expected_ttft.core.engine_costs import EngineCosts
from pdrelay_proxy.features.expected_ttft.core.engine_speed import EngineSpeeds
from pdrelay_proxy.features.expected_ttft.core.expected_ttft import ExpectedTtft
from pdrelay_proxy.features.expected_ttft.settings import (
    EXPECTED_TTFT,
    POLICIES,
    ExpectedTtftSettings,
)
from pdrelay_proxy.settings import PolicyName, Settings

# tokens for which the time between tokens counts beside the time to first token
ITL_WEIGHT: Final = 4.0


def routing_parts(
    settings: Settings, registry: Registry, speeds: EngineSpeeds, clock: Callable[[], float]
) -> RoutingParts:
    """Return the parts; ``speeds``: keeps the measurements."""
    return RoutingParts(policies=POLICIES, weigh=partial(_weigh, settings, registry, speeds, clock))


def _weigh(
    settings: Settings,
    registry: Registry,
    speeds: EngineSpeeds,
    clock: Callable[[], float],
    parts: PolicyParts,
) -> Weighing | None:
    """Return the policy, or for ``prefix`` the prices of pauses in streams; None: no need.

    Raises ConfigError: only one leg names the policy.
    """
    names = settings.prefill_policy, settings.decode_policy
    itl_s = settings.for_feature(ExpectedTtftSettings).max_decode_itl_s or None
    if EXPECTED_TTFT not in names and (
        itl_s is None or settings.decode_policy != PolicyName.PREFIX
    ):
        return None
    costs = EngineCosts(registry, speeds, parts.caches, clock, weight=ITL_WEIGHT, itl_most_s=itl_s)
    spares = costs.spares_alone if costs.may_be_alone else None
    if EXPECTED_TTFT not in names:
        return Weighing(costs, spares)
    if len(set(names)) > 1:
        raise ConfigError(
            "expected_ttft chooses both engines: write it as prefill_policy and as decode_policy"
        )
    return Weighing(costs, spares, ExpectedTtft(costs, parts.dice))
