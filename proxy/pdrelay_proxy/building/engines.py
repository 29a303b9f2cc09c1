"""Builds the registry of engines, the connections to them, and the choice among them."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from pdrelay_proxy.core.admission.keys import Outbound
from pdrelay_proxy.core.fleet.compatibility import PairsWithin
from pdrelay_proxy.core.fleet.fleet_warnings import FleetWarnings
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.http.address_allowlist import AllowList
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import TRANSFER_POLICIES
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.io.files import engine_keys, engine_tls
from pdrelay_proxy.io.probes.checks import HttpChecks
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.io.request_path.telemetry import log_calls
from pdrelay_proxy.io.wire import WireEngines
from pdrelay_proxy.io.wire.connection_guard import Guard, resolved
from pdrelay_proxy.io.wire.engine_names import EngineNames
from pdrelay_proxy.io.wire.engine_tls import EngineTls
from pdrelay_proxy.io.wire.pool import Dial
from pdrelay_proxy.settings import Settings

_FIRST_ENGINES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Fabric:
    """How a router reaches its engines, and its clock.

    Tests reach them without a network: probes by a transport, legs by ``dial``. ``clock`` returns
    seconds, of which only differences count; timers are the event loop's in any case.
    """

    transport: httpx.AsyncBaseTransport | None = None  # None: over sockets
    dial: Dial | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class EngineSide:
    """The registry of engines, and the connections to them."""

    registry: Registry
    learned: PushCoordinates
    outbound: Outbound
    tls: EngineTls
    guard: Guard
    wire: WireEngines
    checks: HttpChecks
    warnings: FleetWarnings  # of the fleet as a whole
    has_other_routers: bool  # they send requests to the same engines, and report them


def build_engines(
    settings: Settings,
    fabric: Fabric,
    pairs_within: PairsWithin,
    *,
    has_other_routers: bool = False,
) -> EngineSide:
    """Build it. Raises AddressError, AlreadyKnown and ConfigError, as ``build`` does."""
    registry = _registry(settings, pairs_within, fabric.clock)
    learned = PushCoordinates(at_once=TRANSFER_POLICIES[settings.kv_transfer_mode].at_once)
    outbound = Outbound(engine_keys(settings))
    tls = EngineTls(engine_tls(settings), settings.engine_server_name)
    # With a test's transport nothing is connected.
    resolve = EngineNames(resolved).resolve if fabric.transport is None else None
    guard = Guard(AllowList.parse(settings.allowed_instances), registry.is_given, resolve)
    checks = HttpChecks(
        timeout_s=settings.health_check_timeout_s,
        headers=lambda role: outbound.headers(role, ()),
        tls=tls,
        transport=fabric.transport,
        guard=guard,
    )
    wire = WireEngines(settings, outbound=outbound, tls=tls, guard=guard, dial=fabric.dial)
    return EngineSide(
        registry,
        learned,
        outbound,
        tls,
        guard,
        wire,
        checks,
        FleetWarnings(),
        has_other_routers,
    )


def build_fleet(
    settings: Settings,
    engines: EngineSide,
    clock: Callable[[], float],
    added: Sequence[RoutingParts],
) -> LiveFleet:
    """Build the fleet that requests choose from; ``added``: by features. Raises ConfigError."""
    # Routers that know of each other do not all begin with the same engine.
    first_engine = random.randrange(_FIRST_ENGINES) if engines.has_other_routers else 0
    return fleet_of(
        settings,
        engines.registry,
        engines.learned,
        clock,
        random.randrange,
        turn=first_engine,
        added=added,
        later=log_calls(),
    )


def _registry(
    settings: Settings, pairs_within: PairsWithin, clock: Callable[[], float]
) -> Registry:
    """Return a registry with the engines of the settings."""
    registry = Registry(settings, pairs_within)
    for role, addresses in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for address in addresses:
            registry.add_target(role, Target.parse(address), now=clock())
    return registry
