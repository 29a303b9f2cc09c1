"""The composition root: the one place where objects are built and connected."""

import asyncio
import logging
import random
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import httpx
from fastapi import FastAPI, Request

from xpyd_proxy.api import problems
from xpyd_proxy.api.admin import Gatekeeping, admin_routes
from xpyd_proxy.api.adminkey import onlooker_check
from xpyd_proxy.api.audit import Audit
from xpyd_proxy.api.door import Door
from xpyd_proxy.api.instances import Desk, instance_routes
from xpyd_proxy.api.models import Models, model_routes
from xpyd_proxy.api.openapi import openapi_routes
from xpyd_proxy.api.page import page_routes
from xpyd_proxy.api.ready import ready_routes
from xpyd_proxy.api.routes import endpoint_routes
from xpyd_proxy.api.tracking import Tracking
from xpyd_proxy.core.admission.cache_salts import Salts
from xpyd_proxy.core.admission.keys import Keyring, Outbound
from xpyd_proxy.core.admission.lifetime import Lifetime
from xpyd_proxy.core.fleet.health import Limits
from xpyd_proxy.core.fleet.instance_states import Roll
from xpyd_proxy.core.fleet.push_coordinates import Learned
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.fleet.target import Target
from xpyd_proxy.core.http.address_allowlist import AllowList
from xpyd_proxy.core.http.origins import Sites, check_open
from xpyd_proxy.core.measures import Measures
from xpyd_proxy.core.model import Instance, Role
from xpyd_proxy.core.protocol.endpoints import ENDPOINTS
from xpyd_proxy.core.protocol.push import MANNERS
from xpyd_proxy.core.routing.explain import Explainer
from xpyd_proxy.core.routing.pairing import Choice, Pairs, Policy
from xpyd_proxy.core.routing.pairing import Legs as EachLeg
from xpyd_proxy.core.routing.policies.least_loaded import LeastLoaded
from xpyd_proxy.core.routing.policies.power_of_two import PowerOfTwo
from xpyd_proxy.core.routing.policies.prefix import Prefix
from xpyd_proxy.core.routing.policies.round_robin import RoundRobin, Turns
from xpyd_proxy.core.routing.policies.session import Session
from xpyd_proxy.core.routing.request_rules import rules_of
from xpyd_proxy.core.routing.retry_budget import Budget
from xpyd_proxy.errors import ConfigError
from xpyd_proxy.io.discovery.build import discovery_of
from xpyd_proxy.io.discovery.reconciler import Synced
from xpyd_proxy.io.files import client_keys, engine_keys, engine_tls, server_tls
from xpyd_proxy.io.metrics import Metrics
from xpyd_proxy.io.probes.checks import HttpChecks
from xpyd_proxy.io.probes.kv_inflow import InflowWatch
from xpyd_proxy.io.probes.prober import Prober, Rhythm
from xpyd_proxy.io.request_path.ids import new_id, new_transfer
from xpyd_proxy.io.request_path.live_fleet import LiveFleet, Loads
from xpyd_proxy.io.sight import Sight
from xpyd_proxy.io.status import Status
from xpyd_proxy.io.wire import WireEngines
from xpyd_proxy.io.wire.connection_guard import Guard, resolved
from xpyd_proxy.io.wire.pool import Dial
from xpyd_proxy.io.workers.crew import company
from xpyd_proxy.io.workers.place import Place
from xpyd_proxy.live import Live, limits_of
from xpyd_proxy.requests.asgi import Endpoints
from xpyd_proxy.requests.examiner import Examiner
from xpyd_proxy.requests.gate import Gate
from xpyd_proxy.requests.handovers import Handovers
from xpyd_proxy.requests.intake import Intake
from xpyd_proxy.requests.release import Releaser
from xpyd_proxy.requests.service import Requests
from xpyd_proxy.settings import PolicyName, Settings

if TYPE_CHECKING:
    from xpyd_proxy.io.traces import Traces

logger = logging.getLogger(__name__)
_PATHS: Final = frozenset({*ENDPOINTS, "/v1/models"})  # those that metrics and spans tell apart


@dataclass(frozen=True, slots=True)
class Router:
    """A router that is built, and what its process needs of it."""

    app: FastAPI
    requests: Requests
    lifetime: Lifetime
    live: Live
    on_stalled: Callable[[], None]  # to be called for each client that is given up because it reads nothing
    on_refused: Callable[[str], None]  # the same for each connection that is closed before its request is served
    tls: ssl.SSLContext | None  # what it serves https with; None: http


@dataclass(frozen=True, slots=True)
class Fabric:
    """How tests have a router reach engines without a network: its probes by a transport, its legs by ``dial``."""

    transport: httpx.AsyncBaseTransport
    dial: Dial


def create_app(settings: Settings, *, fabric: Fabric | None = None) -> FastAPI:
    """Build the router, as an ASGI application; raises what ``build`` raises."""
    return build(settings, fabric=fabric).app


def build(settings: Settings, *, fabric: Fabric | None = None, place: Place | None = None) -> Router:
    """Build the router, or one of several workers of it. Tests pass a fabric.

    Raises:
        AddressError: an address in the settings cannot be one.
        AlreadyKnown: an address occurs twice under one role.
        ConfigError: a file cannot be read, settings contradict each other, the router would be open to others, or
            spans are asked for and their library is missing.
    """
    sites, crew = _sites(settings), company(place, _limits(settings), time.monotonic)
    registry = _filled(crew.registry, settings)
    learned = Learned(at_once=MANNERS[settings.mode].at_once)
    fleet = _fleet(settings, registry, learned, crew.number)
    outbound, tls = Outbound(engine_keys(settings), forwards=settings.forward_client_key), engine_tls(settings)
    transport, dial = (None, None) if fabric is None else (fabric.transport, fabric.dial)
    guard = _guard(settings, registry, transport)
    engines = WireEngines(settings, outbound=outbound, tls=tls, guard=guard, dial=dial)
    gate, lifetime = Gate(limits_of(settings), time.monotonic), Lifetime()
    keyring, examiner = Keyring(client_keys(settings), settings.min_priority), Examiner()
    salts, models = _salts(settings, keyring), Models(registry, engines, model=settings.model)
    sight, census, queue = Sight(Measures(_PATHS), time.monotonic), Roll(registry), gate.admission
    traces = _traces(settings)
    releaser = Releaser(engines, told=(sight,))
    requests = Requests(
        intake=Intake(settings, lifetime, keyring, sites, salts),
        rules=rules_of(settings),
        fleet=fleet,
        learned=learned,
        handovers=Handovers(learned, MANNERS[settings.mode], sight.replaced_host),
        engines=engines.teller,
        releaser=releaser,
        budget=_budget(settings, crew.of),
        gate=gate,
        lifetime=lifetime,
        examiner=examiner,
        sight=sight,
        settings=settings,
        clock=time.monotonic,
        new_id=new_id,
        new_transfer=new_transfer,
        finished=sight.finished,
        reports=settings.load_reports and settings.prefill_policy is not PolicyName.ROUND_ROBIN,
        spans=traces,
    )
    fleet.later = sight.later
    sight.legs.riding = requests.engines_of_legs
    checks = _checks(settings, outbound, transport, tls, guard)
    rhythm = Rhythm(settings.probe_interval_s, settings.hung_timeout_s, settings.drain_patience_s)
    prober = Prober(registry, checks, rhythm, time.monotonic, random.random, give_up=engines.give_up)
    inflow = InflowWatch(registry, checks.metrics, sight)
    discovery = discovery_of(crew.stored(settings), registry, time.monotonic)
    metrics, status = Metrics(sight, census, queue, discovery.freshness), Status(sight, census, time.monotonic, queue)
    everybody = crew.everybody(sight, queue, status.part)

    def running() -> Sequence[AbstractAsyncContextManager[object]]:
        parts = examiner, engines, releaser, checks, discovery.running(), prober.running(), inflow.running()
        return *parts, *crew.running(), requests

    desk = Desk(registry, _explainer(requests), time.monotonic, crew.changes(discovery), crew.is_drained)
    keeping = Gatekeeping(keyring, Audit(sight.admin_action, time.monotonic), guard)
    routes = (
        page_routes(status, metrics, everybody, **_onlookers(settings, keyring)),
        admin_routes(settings, fleet, models, desk.changes, keeping),
        instance_routes(settings, desk, keeping.audit),
        ready_routes(Synced(fleet, discovery), lifetime, lambda: requests.rules.needed),
        model_routes(models),
    )
    app = FastAPI(lifespan=_lifespan(registry, running, traces), openapi_url=None, redirect_slashes=False)
    app.add_middleware(Door, lifetime=lifetime, keyring=keyring, sites=sites)
    app.add_middleware(
        Tracking,
        new_id=new_id,
        clock=time.monotonic,
        spans=traces,
        finished=sight.finished,
        times=settings.server_timing,
    )
    problems.install(app)
    for each in routes:
        app.include_router(each)
    app.router.routes.extend(endpoint_routes(Endpoints(requests)))
    app.include_router(openapi_routes(app, settings.admin_key, keyring, open_metrics=settings.open_metrics))
    live = Live(registry, requests, gate, keyring, outbound, time.monotonic)
    return Router(app, requests, lifetime, live, sight.stalled_client, sight.refused_connection, server_tls(settings))


def _onlookers(settings: Settings, keyring: Keyring) -> Mapping[str, Callable[[Request], None]]:
    """Say who may see the metrics and the status page."""
    if settings.open_metrics:
        return {}
    return {
        "onlookers": onlooker_check(settings.admin_key, keyring),
        "browsers": onlooker_check(settings.admin_key, keyring, by_browsers=True),
    }


def _guard(settings: Settings, registry: Registry, transport: httpx.AsyncBaseTransport | None) -> Guard:
    """Say where the router may connect to; with the transport of a test it connects nowhere."""
    resolve = resolved if transport is None else None
    return Guard(AllowList.parse(settings.instances_allow), registry.is_given, resolve)


def _salts(settings: Settings, keyring: Keyring) -> Salts | None:
    """Say what keeps the clients apart in the engines' prefix caches; raises ConfigError."""
    if not settings.cache_salt_per_key:
        return None
    if settings.api_keys_file is None:
        raise ConfigError("cache_salt_per_key needs api_keys_file: without keys all clients are one")
    return Salts(keyring, settings.cache_salt_secret)


def _sites(settings: Settings) -> Sites:
    check_open(settings)
    return Sites(settings, socket.gethostname())


def _checks(
    settings: Settings,
    outbound: Outbound,
    transport: httpx.AsyncBaseTransport | None,
    tls: ssl.SSLContext,
    guard: Guard,
) -> HttpChecks:
    return HttpChecks(
        timeout_s=settings.probe_timeout_s,
        headers=lambda role: outbound.headers(role, ()),
        verify=tls,
        transport=transport,
        guard=guard,
    )


def _lifespan(
    registry: Registry, running: Callable[[], Sequence[AbstractAsyncContextManager[object]]], traces: "Traces | None"
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return what starts and ends with the server: what is named last ends first, and the spans go off at last."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        for role in Role:
            for instance in registry.known(role):
                logger.info("%s is at %s", instance.id, instance.address.url)  # everything else says only the id
        try:
            async with AsyncExitStack() as opened:
                for part in running():
                    await opened.enter_async_context(part)
                yield
        finally:
            if traces is not None:
                await asyncio.to_thread(traces.close)

    return lifespan


def _limits(settings: Settings) -> Limits:
    return Limits(
        in_a_row=settings.break_after,
        probes=settings.break_probes,
        share=settings.break_share,
        window_s=settings.break_window_s,
        window_least=settings.break_window_least,
        rest_s=settings.rest_s,
        rest_most_s=settings.rest_most_s,
    )


def _filled(registry: Registry, settings: Settings) -> Registry:
    """Add the engines that the settings name."""
    for role, addresses in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for address in addresses:
            registry.add_target(role, Target.parse(address), now=time.monotonic())
    return registry


def _budget(settings: Settings, workers: int) -> Budget:
    """Return a worker's part of the retries; its rate is a share already."""
    budget = Budget(settings.retry_share, settings.retry_floor)
    return Budget(settings.retry_share, settings.retry_floor, most=max(1.0, budget.most / workers))


def policies(turn: int) -> Mapping[PolicyName, Callable[[Callable[[Instance], float]], Policy]]:
    """Say what each policy is made of: the load of an engine, and the turn to begin with."""
    return {
        PolicyName.ROUND_ROBIN: lambda _: RoundRobin(Turns(turn), Turns(turn)),
        PolicyName.LEAST_LOADED: lambda load: LeastLoaded(load, turn),
        PolicyName.POWER_OF_TWO: lambda load: PowerOfTwo(load, random.randrange),
        PolicyName.SESSION: lambda load: Session(LeastLoaded(load, turn)),
        PolicyName.PREFIX: lambda load: Prefix(load, LeastLoaded(load, turn)),
    }


POLICIES: Final = policies(0)


def _fleet(settings: Settings, registry: Registry, learned: Learned, turn: int) -> LiveFleet:
    """``turn``: where policies begin, so that several workers do not all begin with the same engine."""
    load = Loads(registry, time.monotonic).of
    names = settings.prefill_policy, settings.decode_policy
    if set(names) == {PolicyName.ROUND_ROBIN}:
        # one for both legs together, or they would advance in step
        choice: Choice = RoundRobin(Turns(turn), Turns(turn))
    else:
        choice = EachLeg(*(policies(turn)[name](load) for name in names))
    return LiveFleet(registry, Pairs(registry, choice), learned, time.monotonic)


def _explainer(requests: Requests) -> Callable[[], Explainer]:
    def explainer() -> Explainer:
        rules, fleet = requests.rules, requests.fleet
        return Explainer(
            fleet.rehearsal(), fleet.usable, requests.learned, rules.min_prompt_chars, rules.alone_without_prefill
        )

    return explainer


def _traces(settings: Settings) -> "Traces | None":
    if settings.otlp_endpoint is None:
        return None
    try:
        from xpyd_proxy.io.traces import Traces  # noqa: PLC0415 (what it imports is an extra)
    except ImportError as exc:
        missing = "spans are asked for (otlp_endpoint), but OpenTelemetry is not installed"
        raise ConfigError(f"{missing}: pip install 'xpyd[tracing]'") from exc
    return Traces.to(settings.otlp_endpoint, _PATHS)
