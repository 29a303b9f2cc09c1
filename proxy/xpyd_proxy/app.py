"""The composition root: the one place where objects are built and connected."""

import asyncio
import logging
import os
import random
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import httpx
from fastapi import FastAPI
from starlette.routing import WebSocketRoute

from xpyd_proxy.api.admin import admin_routes
from xpyd_proxy.api.applications import Routes, build_applications
from xpyd_proxy.api.audit import Audit
from xpyd_proxy.api.capacity import CapacityMeter, capacity_routes
from xpyd_proxy.api.endpoint_asgi import Endpoints
from xpyd_proxy.api.endpoint_routes import CLIENT_KEYS, endpoint_routes
from xpyd_proxy.api.instances import InstanceAdmin, instance_routes
from xpyd_proxy.api.model_list import ModelCatalog, model_routes
from xpyd_proxy.api.operator_route import OperatorAccess, require_any_key
from xpyd_proxy.api.page import Onlookers, page_routes
from xpyd_proxy.api.pairs import pair_routes
from xpyd_proxy.api.ready import liveness_routes, probe_routes
from xpyd_proxy.api.realtime import realtime_routes
from xpyd_proxy.api.request_context import RequestContextMiddleware
from xpyd_proxy.api.requests import request_routes
from xpyd_proxy.core.admission.admin_key import AdminKey
from xpyd_proxy.core.admission.admission import Admission
from xpyd_proxy.core.admission.cache_salts import Salts
from xpyd_proxy.core.admission.keys import Keyring, Outbound
from xpyd_proxy.core.admission.lifetime import Lifetime
from xpyd_proxy.core.counters import Counters
from xpyd_proxy.core.discovery.pods import read_pod
from xpyd_proxy.core.fleet.cache_index import CacheIndex
from xpyd_proxy.core.fleet.pair_matrix import PairMatrix
from xpyd_proxy.core.fleet.pair_modes import PairModes
from xpyd_proxy.core.fleet.push_coordinates import PushCoordinates
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.fleet.target import EngineSource, Target
from xpyd_proxy.core.http.address_allowlist import AllowList
from xpyd_proxy.core.http.origins import Sites
from xpyd_proxy.core.known_prompts import KnownPrompts
from xpyd_proxy.core.model import EngineRole, InstanceId, Role
from xpyd_proxy.core.ports import SharedText
from xpyd_proxy.core.protocol.canary import CanaryOutcome
from xpyd_proxy.core.protocol.endpoints import ENDPOINTS
from xpyd_proxy.core.protocol.push import TRANSFER_POLICIES
from xpyd_proxy.core.protocol.realtime import REALTIME_PATH
from xpyd_proxy.core.request_history import RequestHistory
from xpyd_proxy.core.request_record import RequestRecord
from xpyd_proxy.core.request_timeline import Timeline
from xpyd_proxy.core.roles.role_controller import RoleController, RoleLimits
from xpyd_proxy.core.roles.work_meter import RoleTargets
from xpyd_proxy.core.routing.explain import Explainer
from xpyd_proxy.core.routing.retries import MOST_RETRIES, RetryBudget
from xpyd_proxy.core.routing.session_ids import SessionIds
from xpyd_proxy.core.workers.instance_ids import Verb
from xpyd_proxy.core.workers.reports import Whole
from xpyd_proxy.errors import ConfigError
from xpyd_proxy.io.discovery.inference_pool import PODS, PoolSource
from xpyd_proxy.io.discovery.kubernetes import Cluster, Kubernetes
from xpyd_proxy.io.discovery.reconciler import Discovery, Entries, Pods, Reconciler
from xpyd_proxy.io.discovery.reflector import Collection, Reflector
from xpyd_proxy.io.discovery.role_turns import LeasedTurns
from xpyd_proxy.io.discovery.shared_texts import FileText, LeaseText, MemoryText
from xpyd_proxy.io.discovery.stores import Store, StoreObserver
from xpyd_proxy.io.discovery.stores.configmap import ConfigMapStore
from xpyd_proxy.io.discovery.stores.file import FileStore
from xpyd_proxy.io.discovery.stores.memory import MemoryStore
from xpyd_proxy.io.engine_spans import EngineSpans
from xpyd_proxy.io.engine_timelines import Timelines
from xpyd_proxy.io.files import admin_tls, client_keys, engine_keys, engine_tls, operator_key, server_tls
from xpyd_proxy.io.metrics import Metrics
from xpyd_proxy.io.peers import RouterPeers, peers_of
from xpyd_proxy.io.probes.checks import HttpChecks
from xpyd_proxy.io.probes.kv_events import KvEventFollower
from xpyd_proxy.io.probes.kv_inflow import InflowWatch
from xpyd_proxy.io.probes.prober import Prober
from xpyd_proxy.io.probes.role_board import RoleBoard
from xpyd_proxy.io.probes.role_watch import RoleWatch
from xpyd_proxy.io.reloads import FileReloads
from xpyd_proxy.io.request_path.ids import new_id, new_transfer
from xpyd_proxy.io.request_path.live_fleet import LiveFleet
from xpyd_proxy.io.request_path.pair_notes import PairNotes
from xpyd_proxy.io.request_path.policies import fleet_of
from xpyd_proxy.io.request_path.telemetry import Telemetry
from xpyd_proxy.io.status import Status
from xpyd_proxy.io.wire import WireEngines
from xpyd_proxy.io.wire.connection_guard import Guard, resolved
from xpyd_proxy.io.wire.engine_tls import EngineTls
from xpyd_proxy.io.wire.pool import Dial
from xpyd_proxy.io.workers.context import WorkerContext
from xpyd_proxy.io.workers.group import worker_group
from xpyd_proxy.live import Live, check
from xpyd_proxy.requests.body_reader import BodyReader
from xpyd_proxy.requests.canaries import Canaries
from xpyd_proxy.requests.gate import Gate
from xpyd_proxy.requests.intake import Intake
from xpyd_proxy.requests.leg_bodies import LegBodies
from xpyd_proxy.requests.realtime.sessions import RealtimeSessions
from xpyd_proxy.requests.release import Releaser
from xpyd_proxy.requests.service import Requests
from xpyd_proxy.settings import KvEvents, PolicyName, RolesMode, Settings

if TYPE_CHECKING:
    from xpyd_proxy.io.traces import Traces

logger = logging.getLogger(__name__)
_TURNS: Final = 1 << 16
_PATHS: Final = frozenset({*ENDPOINTS, "/v1/models", REALTIME_PATH})  # those that metrics and spans tell apart


@dataclass(frozen=True, slots=True)
class Router:
    """A router that is built, and what its process needs of it."""

    app: FastAPI
    admin_app: FastAPI | None  # that of the admin port; None: ``app`` has its routes, too
    requests: Requests
    lifetime: Lifetime
    live: Live
    telemetry: Telemetry
    tls: ssl.SSLContext | None  # what it serves https with; None: http
    admin_tls: ssl.SSLContext | None  # the same at the admin port


@dataclass(frozen=True, slots=True)
class Fabric:
    """How tests have a router reach engines without a network: its probes by a transport, its legs by ``dial``.

    ``clock`` tells the seconds that the router judges by; timers are the event loop's all the same.
    """

    transport: httpx.AsyncBaseTransport
    dial: Dial
    clock: Callable[[], float] = time.monotonic


def build(
    settings: Settings,
    *,
    fabric: Fabric | None = None,
    place: WorkerContext | None = None,
    traces: "Traces | None" = None,
) -> Router:
    """Build the router, or one of several workers of it. Tests pass a fabric, and traces that they can look at.

    Raises:
        AddressError: an address in the settings cannot be one.
        AlreadyKnown: an address occurs twice under one role.
        ConfigError: a file cannot be read, settings contradict each other, the router would be open to others, or
            spans are asked for and their library is missing.
    """
    check(settings)
    transport, dial, clock = (
        (None, None, time.monotonic) if fabric is None else (fabric.transport, fabric.dial, fabric.clock)
    )
    sites, crew = Sites(settings, socket.gethostname()), worker_group(place, settings, clock)
    registry = crew.registry
    for role, addresses in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for address in addresses:
            registry.add_target(role, Target.parse(address), now=clock())
    learned, pairs = (
        PushCoordinates(at_once=TRANSFER_POLICIES[settings.kv_transfer_mode].at_once),
        PairNotes(
            registry,
            PairMatrix(settings.pair_history),
            (crew.number, crew.of),
            PairModes(TRANSFER_POLICIES[settings.kv_transfer_mode].fixed, kind=registry.link),
        ),
    )
    index, known = _cache_knowledge(settings)
    fleet = fleet_of(
        settings,
        registry,
        learned,
        clock,
        random.randrange,
        # Routers that know of each other do not all begin with the same engine.
        turn=random.randrange(_TURNS) if settings.peers else crew.number,
        index=index,
        known=known,
    )
    outbound, tls = (
        Outbound(engine_keys(settings), forwards=settings.forward_client_key),
        EngineTls(engine_tls(settings), settings.engine_server_name),
    )
    resolve = resolved if transport is None else None  # with the transport of a test it connects nowhere
    guard = Guard(AllowList.parse(settings.allowed_instances), registry.is_given, resolve)
    engines = WireEngines(settings, outbound=outbound, tls=tls, guard=guard, dial=dial)
    gate, lifetime, history = Gate(settings, clock), Lifetime(), RequestHistory(settings.request_history)
    keyring, examiner = Keyring(client_keys(settings), settings.min_priority), BodyReader()
    salts, models = (
        _salts(settings, keyring),
        ModelCatalog(registry, engines, outbound, clock, model=settings.required_model),
    )
    telemetry, queue = Telemetry(_counters(fleet, pairs, gate, tls), clock, history, pairs), gate.admission
    traces, releaser = traces or _traces(settings), Releaser(engines, told=(telemetry,))
    requests = Requests(
        intake=Intake(settings, lifetime, keyring, sites, salts, _sessions(settings)),
        fleet=fleet,
        learned=learned,
        handovers=LegBodies(learned, TRANSFER_POLICIES[settings.kv_transfer_mode], telemetry.replaced_host),
        engines=engines.teller,
        releaser=releaser,
        budget=RetryBudget(
            settings.retry_budget_ratio, settings.retry_budget_min_rate, most=max(1.0, MOST_RETRIES / crew.of)
        ),
        gate=gate,
        lifetime=lifetime,
        examiner=examiner,
        telemetry=telemetry,
        settings=settings,
        clock=clock,
        new_id=new_id,
        new_transfer=new_transfer,
        request_over=telemetry.request_over,
        reports=settings.load_reports and settings.prefill_policy != PolicyName.ROUND_ROBIN and not settings.peers,
        spans=traces,
        canaries=_canaries(settings, engines, pairs, registry, counters=telemetry.counters, clock=clock),
        worker=(crew.number, crew.of),
    )
    (fleet.later, fleet.bounds, fleet.modes), (telemetry.legs_under_way, telemetry.stepped), gate.outlook = (
        (telemetry.later, telemetry.counters.lone_prompts_bound, pairs.modes),
        (requests.engines_of_legs, fleet.stepped),
        fleet.outlook,
    )
    checks = HttpChecks(
        timeout_s=settings.health_check_timeout_s,
        headers=lambda role: outbound.headers(role, ()),
        tls=tls,
        transport=transport,
        guard=guard,
    )
    peers = _peers(settings, fleet, queue, keyring, telemetry)
    prober, inflow, followers = (
        Prober(
            registry,
            checks,
            settings,
            clock,
            random.random,
            give_up=engines.give_up,
            looks=peers[0].looks if peers else None,
        ),
        InflowWatch(registry, checks.metrics, telemetry, every_s=settings.engine_metrics_interval_s, clock=clock),
        _followers(registry, checks, index, known, telemetry),
    )
    discovery, board, admin_key, (timelines, rows) = (
        _discovery(crew.stored(settings), registry, clock, crew.tell),
        _role_board(settings, telemetry, clock, crew.number),
        AdminKey(operator_key(settings)),
        _timelines(Timelines(registry, checks, clock), traces, telemetry.counters, clock),
    )
    status = Status(
        telemetry,
        registry,
        clock,
        lambda: requests.settings.decode_only_fallback,
        pairs,
        roles=(lambda: None) if board is None else board.part,
    )
    everybody, access = (
        crew.everybody(telemetry, queue, status.part),
        OperatorAccess(admin_key, Audit(telemetry.admin_action, clock), settings.max_body_bytes),
    )
    deciding = _deciding(
        crew.stored(settings),
        board,
        registry,
        checks,
        discovery,
        everybody=everybody,
        clock=clock,
        wall=time.time if fabric is None else clock,  # noqa: TID251 (hosts have no other clock in common)
    )
    reloads = FileReloads(
        lambda: requests.settings,
        server_tls(settings),
        tls.context,
        keyring,
        outbound,
        admin_key,
        telemetry.counters,
        admin_tls(settings),
    )

    def running() -> Sequence[AbstractAsyncContextManager[object]]:
        looking, others = (
            (discovery.running(), prober.running(), inflow.running(), *[each.running() for each in followers]),
            (*crew.running(), *[each() for each in deciding], *[each.running() for each in peers]),
        )
        return (
            examiner,
            engines,
            releaser,
            *filter(None, [requests.canaries]),
            *[each.running() for each in rows],
            *looking,
            reloads.running(),
            *others,
            requests,
        )

    explainer = Explainer(
        fleet.rehearsal,
        fleet.usable,
        learned,
        lambda: requests.settings,
        SessionIds(settings.session_names),
        fleet.shares_loads,
        fleet.caches,
        fleet.modes,
        fleet.passes_ids,
    )
    keys, browsers = (
        CLIENT_KEYS if keyring.keys is not None else (),
        require_any_key(admin_key, keyring, by_browsers=True),
    )
    onlookers = Onlookers(require_any_key(admin_key, keyring), browsers, keys)
    scrapers = Onlookers() if settings.public_metrics else onlookers
    capacity = CapacityMeter(registry, discovery, lifetime, lambda: requests.settings, everybody=everybody, clock=clock)
    routes = Routes(
        clients=(model_routes(models, keys),),
        probes=(probe_routes(fleet, discovery, lifetime), capacity_routes(capacity, scrapers)),
        operators=(
            liveness_routes(),
            page_routes(status, Metrics(telemetry, registry, discovery.freshness), everybody, scrapers),
            admin_routes(
                fleet,
                models,
                discovery,
                guard=guard,
                access=access,
                onlookers=access.require if _has_open_admin_port(settings) else onlookers.scrapers,
            ),
            instance_routes(
                InstanceAdmin(
                    registry,
                    explainer,
                    clock,
                    discovery,
                    crew.is_drained,
                    resumes=lambda: requests.settings.resume_streams,
                ),
                access,
            ),
            pair_routes(telemetry.settled_pairs, clock, access),
            request_routes(
                lambda: telemetry.history,
                lambda: [(request.record, request.state) for request in requests],
                timelines,
                access,
                workers=crew.of,
            ),
        ),
        endpoints=[*endpoint_routes(Endpoints(requests), keys=keys), *_realtime(requests, outbound, tls, guard)],
        admin_key=admin_key,
        browsers=browsers,
    )
    lifespan = _lifespan(registry, running, traces)
    apps = build_applications(settings, routes, lifespan, lifetime, keyring, own_name=socket.gethostname())
    apps.main.add_middleware(
        RequestContextMiddleware,
        new_id=new_id,
        clock=clock,
        spans=traces,
        request_over=telemetry.request_over,
    )
    live = Live(registry, requests, gate, keyring, outbound, admin_key, clock)
    return Router(apps.main, apps.admin, requests, lifetime, live, telemetry, reloads.server_tls, reloads.admin_tls)


def _has_open_admin_port(settings: Settings) -> bool:
    """Tell whether clients are known by certificates alone, for which the admin port does not ask."""
    return settings.admin_port is not None and settings.tls_client_ca is not None and settings.api_keys_file is None


def _counters(fleet: LiveFleet, pairs: PairNotes, gate: Gate, tls: EngineTls) -> Counters:
    """Return the counters; some of them are counted where pairs are chosen, or remembered, or requests wait."""
    counters = Counters(
        _PATHS,
        pair_failures=pairs.health.failures,
        pairs_dropped=pairs.matrix.counts,
        engine_tls_failures=tls.failures,
        turns=fleet.registry.turns,
    )
    counters.class_waiting = gate.admission.waiting_by_class
    counters.canaries.update({(outcome.value,): 0 for outcome in CanaryOutcome})
    if fleet.crossings is not None:
        counters.slice_crossings = fleet.crossings.counted
    return counters


def _cache_knowledge(settings: Settings) -> tuple[CacheIndex | None, KnownPrompts | None]:
    """Return what engines tell of their caches, and the tokens of texts to look them up there; None: no policy asks."""
    if settings.kv_events is KvEvents.OFF:
        return None, None
    return CacheIndex(), KnownPrompts(settings.prefix_lifetime_s)


def _followers(
    registry: Registry,
    checks: HttpChecks,
    index: CacheIndex | None,
    known: KnownPrompts | None,
    telemetry: Telemetry,
) -> Sequence[KvEventFollower]:
    """Return what asks engines what they have cached; none, if no policy goes by it."""
    if index is None:
        return ()
    return (KvEventFollower(registry, checks, index, telemetry.counters, random.random, known=known),)


def _role_board(settings: Settings, telemetry: Telemetry, clock: Callable[[], float], worker: int) -> RoleBoard | None:
    """Return what shows decisions on roles; None: this worker makes none."""
    if settings.roles is RolesMode.OFF or worker > 0:
        return None
    return RoleBoard(settings.roles, telemetry.counters, settings.turns_per_hour, clock)


def _deciding(
    settings: Settings,
    board: RoleBoard | None,
    registry: Registry,
    checks: HttpChecks,
    discovery: Discovery,
    *,
    everybody: Callable[[], Awaitable[Whole]],
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Sequence[Callable[[], AbstractAsyncContextManager[object]]]:
    """Return what decides on roles, for a board."""
    if board is None or settings.target_ttft_s is None or settings.target_itl_s is None:
        return ()
    targets = RoleTargets(settings.target_ttft_s, settings.target_itl_s, slots=settings.decode_slots)
    limits = RoleLimits(
        settings.min_prefill, settings.min_decode, settings.turn_cooldown_s, turns_per_hour=settings.turns_per_hour
    )
    turns, text = None, None
    if settings.roles is RolesMode.AUTO:
        me, text = f"{socket.gethostname()}-{secrets.token_hex(4)}", _shared_text(settings)

        async def turn(name: InstanceId, role: Role) -> None:
            await discovery.turn(name, EngineRole(role.value))

        turns = LeasedTurns(me, text, turn, clock=clock, wall=wall)

    async def waiting() -> int:
        return sum([one.waiting for one in (await everybody()).all])

    watch = RoleWatch(
        registry,
        checks.metrics,
        RoleController(targets, limits),
        board,
        queued=waiting,
        every_s=settings.roles_interval_s,
        clock=clock,
        turns=turns,
    )
    opened = () if text is None else (partial(aclosing, text),)
    return (*opened, watch.running)


def _shared_text(settings: Settings) -> SharedText:
    """Return the text beside the engines of the store; raises ConfigError: what the store needs is missing."""
    kind, _, where = settings.store.partition(":")
    match kind:
        case "memory":
            return MemoryText()
        case "file":
            return FileText(f"{where}.roles")
        case "kubernetes":
            return LeaseText(Kubernetes(Cluster.around(settings.kubernetes_namespace)), where)
        case _:
            from xpyd_proxy.io.discovery.stores.redis import RedisText  # noqa: PLC0415 (_store has loaded it)

            return RedisText(settings.store, "roles", password=os.environ.get("XPYD_REDIS_PASSWORD"))


def _peers(
    settings: Settings, fleet: LiveFleet, queue: Admission, keyring: Keyring, telemetry: Telemetry
) -> Sequence[RouterPeers]:
    """Return what the fleet's other routers are told by and heard with; none, if there are no others."""
    peers = peers_of(settings, fleet.registry, queue, keyring, telemetry.counters)
    if peers is None:
        return ()
    fleet.changed = peers.changed
    return (peers,)


def _canaries(
    settings: Settings,
    engines: WireEngines,
    pairs: PairNotes,
    registry: Registry,
    *,
    counters: Counters,
    clock: Callable[[], float],
) -> Canaries | None:
    """Return what has requests answered once more; None: nothing shall."""
    if not settings.canary_every:
        return None
    return Canaries(
        settings.canary_every, engines, registry, counters.canaries, differs=pairs.answer_differs, clock=clock
    )


def _salts(settings: Settings, keyring: Keyring) -> Salts | None:
    """Say what keeps the clients apart in the engines' prefix caches; raises ConfigError."""
    if not settings.cache_salt_per_key:
        return None
    if settings.api_keys_file is None:
        raise ConfigError("cache_salt_per_key needs api_keys_file: without keys all clients are one")
    return Salts(keyring, settings.cache_salt_secret)


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


def _sessions(settings: Settings) -> SessionIds | None:
    """Return where sessions' ids are; None: no policy asks for them, so no request is searched."""
    by_session = PolicyName.SESSION in (settings.prefill_policy, settings.decode_policy)
    return SessionIds(settings.session_names) if by_session else None


def _realtime(requests: Requests, outbound: Outbound, tls: EngineTls, guard: Guard) -> Sequence[WebSocketRoute]:
    """Build the route of sessions, if there shall be some; raises ConfigError: their library is missing."""
    if not requests.settings.realtime:
        return ()
    try:
        from xpyd_proxy.io.websocket import EngineSockets  # noqa: PLC0415 (what it imports is an extra)
    except ImportError as exc:
        missing = "/v1/realtime is asked for (realtime), but websockets is not installed"
        raise ConfigError(f"{missing}: pip install 'xpyd[realtime]'") from exc
    intake, telemetry = requests.intake, requests.telemetry
    sessions = RealtimeSessions(
        lambda: requests.settings,
        intake.lifetime,
        intake.keyring,
        intake.sites,
        requests.gate,
        requests.fleet,
        EngineSockets(requests.settings, outbound, tls, guard),
        telemetry,
        requests.clock,
    )
    telemetry.legs_under_way = lambda: (*requests.engines_of_legs(), *sessions.engines)
    return realtime_routes(sessions, requests.new_id)


def _traces(settings: Settings) -> "Traces | None":
    if settings.otlp_endpoint is None:
        return None
    try:
        from xpyd_proxy.io.traces import Traces  # noqa: PLC0415 (what it imports is an extra)
    except ImportError as exc:
        missing = "spans are asked for (otlp_endpoint), but OpenTelemetry is not installed"
        raise ConfigError(f"{missing}: pip install 'xpyd[tracing]'") from exc
    return Traces.to(settings.otlp_endpoint, _PATHS)


def _timelines(
    timelines: Timelines, traces: "Traces | None", counters: Counters, clock: Callable[[], float]
) -> tuple[Timelines, Sequence[EngineSpans]]:
    """Return what asks engines for their rows, and what adds them to traces; nothing, if there are none."""
    if traces is None:
        return timelines, ()

    def ask(record: RequestRecord, without: Set[InstanceId]) -> Awaitable[tuple[float, Timeline]]:
        return timelines.of(record, is_over=True, asks_engines=True, without=without)

    spans = EngineSpans(ask, counters, clock)
    traces.ended = spans.offer
    return timelines, (spans,)


def _discovery(
    settings: Settings, registry: Registry, clock: Callable[[], float], tell: Callable[[Verb, InstanceId], None]
) -> Discovery:
    """Build what the settings ask for; raises ConfigError: this is no pod, or what the store needs is not installed."""
    selector, pool = settings.kubernetes_selector, settings.kubernetes_inference_pool
    pods = selector is not None or pool is not None
    reconciler = Reconciler(registry, [EngineSource.STORE, *([EngineSource.PODS] if pods else [])], clock)
    store = _store(settings, Entries(reconciler), clock)
    feeds: list[Callable[[], AbstractAsyncContextManager[None]]] = []
    if pods:
        cluster, seen = Cluster.around(settings.kubernetes_namespace), Pods(reconciler)
        if pool is not None:
            cluster.tls()  # raises ConfigError now: the clients are made later
            label = settings.slice_label
            source = PoolSource(
                lambda: Kubernetes(cluster), pool, seen, slice_label=label, clock=clock, chance=random.random
            )
            feeds.append(source.running)
        else:
            what = Collection(PODS.format(cluster.namespace), {"labelSelector": selector or ""})
            api, read = Kubernetes(cluster), partial(read_pod, slice_label=settings.slice_label)
            watch = Reflector(api, what, read, seen, clock=clock, chance=random.random, changed=seen.changed)
            feeds.append(watch.running)
    return Discovery(registry, reconciler, store, feeds, tell)


def _store(settings: Settings, told: StoreObserver, clock: Callable[[], float]) -> Store:
    kind, _, where = settings.store.partition(":")
    match kind:
        case "memory":
            return MemoryStore(told)
        case "file":
            return FileStore(where, told)
        case "kubernetes":
            api = Kubernetes(Cluster.around(settings.kubernetes_namespace))
            return ConfigMapStore(api, where, told, clock=clock)
        case _:
            try:
                from xpyd_proxy.io.discovery.stores.redis import RedisStore  # noqa: PLC0415 (its library is an extra)
            except ImportError as exc:
                raise ConfigError("the store is Redis, but redis is not installed: pip install 'xpyd[redis]'") from exc
            return RedisStore(settings.store, told, password=os.environ.get("XPYD_REDIS_PASSWORD"))
