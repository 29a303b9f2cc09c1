"""Builds the routes of both applications: for clients, probes and operators."""

from collections.abc import Callable, Iterator, Sequence

from fastapi import APIRouter

from pdrelay_proxy.api.admin import admin_routes
from pdrelay_proxy.api.applications import Routes
from pdrelay_proxy.api.audit import Audit
from pdrelay_proxy.api.endpoint_asgi import Endpoints
from pdrelay_proxy.api.endpoint_routes import CLIENT_KEYS, endpoint_routes
from pdrelay_proxy.api.instances import InstanceAdmin, instance_routes
from pdrelay_proxy.api.model_list import model_routes
from pdrelay_proxy.api.onlookers import EVERYONE, Onlookers, require_any_key
from pdrelay_proxy.api.operator_route import OPERATOR_KEY, OperatorAccess
from pdrelay_proxy.api.own_engines import OwnEngines
from pdrelay_proxy.api.page import page_routes
from pdrelay_proxy.api.ready import liveness_routes, probe_routes
from pdrelay_proxy.building.engines import EngineSide
from pdrelay_proxy.building.requests import RequestSide
from pdrelay_proxy.core.admission.admin_key import AdminKey
from pdrelay_proxy.core.routing.explain import Explainer
from pdrelay_proxy.core.routing.session_ids import SessionIds
from pdrelay_proxy.io.discovery.discovery import Discovery
from pdrelay_proxy.io.discovery.engine_changes import EngineChanges
from pdrelay_proxy.io.metric_families import Family
from pdrelay_proxy.io.metrics import Metrics
from pdrelay_proxy.io.probes.newcomers import Newcomers
from pdrelay_proxy.io.status import Status
from pdrelay_proxy.settings import Settings


def build_routes(
    settings: Settings,
    engines: EngineSide,
    serving: RequestSide,
    discovery: Discovery,
    status: Status,
    *,
    added: Sequence[Callable[[OperatorAccess], APIRouter]],
    families: Sequence[Callable[[], Iterator[Family | None]]],
    admin_key: AdminKey,
    join_key: AdminKey,
    clock: Callable[[], float],
) -> Routes:
    """Build them; ``added``: features' routes, ``families``: their metrics.

    Raises ConfigError: a required library is missing.
    """
    requests = serving.requests
    keyring = serving.keyring
    keys = CLIENT_KEYS if keyring.keys is not None else ()
    browsers = require_any_key(admin_key, keyring, by_browsers=True)
    onlookers = Onlookers(require_any_key(admin_key, keyring), browsers, keys)
    scrapers = EVERYONE if settings.public_metrics else onlookers
    admission = serving.gate.admission
    metrics = Metrics(serving.telemetry, engines.registry, admission, discovery.freshness, families)
    audit = Audit(serving.telemetry.admin_action, clock)
    access = OperatorAccess(admin_key, join_key, audit, settings.max_body_bytes)
    return Routes(
        clients=(model_routes(serving.models, keys),),
        probes=(probe_routes(serving.fleet, discovery, serving.lifetime, engines.warnings),),
        operators=(
            liveness_routes(),
            page_routes(status, metrics, scrapers),
            *_key_routes(
                settings,
                engines,
                serving,
                discovery.changes,
                access=access,
                onlookers=onlookers,
                clock=clock,
            ),
            *[build(access) for build in added],
        ),
        endpoints=endpoint_routes(Endpoints(requests), keys=keys),
        admin_key=admin_key,
        browsers=browsers,
    )


def _key_routes(
    settings: Settings,
    engines: EngineSide,
    serving: RequestSide,
    changes: EngineChanges,
    *,
    access: OperatorAccess,
    onlookers: Onlookers,
    clock: Callable[[], float],
) -> Sequence[APIRouter]:
    """Return the routes that need the operator's key."""
    requests = serving.requests
    fleet = serving.fleet
    own = OwnEngines(engines.guard.leads_to)
    claims = requests.claims
    explainer = Explainer(
        fleet.rehearsal,
        engines.learned,
        lambda: requests.services.settings.current,
        SessionIds(settings.session_names),
        requests.services.leg_bodies.model_of,
        fleet.caches,
        fleet.passes_ids,
        engines.registry.models.of_unnamed,
        None if claims is None else claims.claim,
    )
    instances = InstanceAdmin(
        engines.registry,
        explainer,
        clock,
        changes,
        own,
        moves_streams=any(watcher.moves_streams for watcher in requests.watchers),
        resumes=lambda: requests.services.settings.current.resume_streams,
        has_other_routers=engines.has_other_routers,
        warnings=engines.warnings,
        preference=fleet.preference,
        pair_history=fleet.pair_history,
    )
    return (
        admin_routes(
            fleet,
            serving.models,
            changes,
            guard=engines.guard,
            own=own,
            newcomers=Newcomers(
                engines.registry,
                engines.checks,
                fleet.pair_history,
                patience_s=settings.health_check_timeout_s,
            ),
            access=access,
            onlookers=Onlookers(access.require, keys=[OPERATOR_KEY])
            if _has_open_admin_port(settings)
            else onlookers,
        ),
        instance_routes(instances, access),
    )


def _has_open_admin_port(settings: Settings) -> bool:
    """Return whether clients are known by certificates alone, which the admin port ignores."""
    return (
        settings.admin_port is not None
        and settings.tls_client_ca is not None
        and settings.api_keys_file is None
    )
