"""The composition root: objects are built and connected here alone, in the parts of
``building``.
"""

import logging
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from fastapi import FastAPI

from pdrelay_proxy.api.applications import build_applications
from pdrelay_proxy.api.request_context import RequestContextMiddleware
from pdrelay_proxy.building.background import build_background
from pdrelay_proxy.building.discovery import build_discovery
from pdrelay_proxy.building.engines import Fabric, build_engines, build_fleet
from pdrelay_proxy.building.requests import build_requests
from pdrelay_proxy.building.routes import build_routes
from pdrelay_proxy.consistency import check
from pdrelay_proxy.core.admission.admin_key import AdminKey
from pdrelay_proxy.core.admission.lifetime import Lifetime
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.stream_opening import StreamOpenings
from pdrelay_proxy.core.routing.routing_parts import first_added
from pdrelay_proxy.features import features, has_other_routers, pairs_within, shared_store
from pdrelay_proxy.features.feature import Core, Feature, Ground
from pdrelay_proxy.io.files import admin_tls, join_key, operator_key, server_tls
from pdrelay_proxy.io.reloads import FileReloads
from pdrelay_proxy.io.request_path.ids import new_id
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.io.worker_place import WorkerPlace
from pdrelay_proxy.live import Live
from pdrelay_proxy.requests.request_set import RequestSet
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Router:
    """A built router, with the parts that its process needs."""

    app: FastAPI
    admin_app: FastAPI | None  # the admin port's; None: ``app`` has its routes, too
    requests: RequestSet
    lifetime: Lifetime
    live: Live
    telemetry: Telemetry
    tls: ssl.SSLContext | None  # the main port's; None: it serves http
    admin_tls: ssl.SSLContext | None  # the admin port's


def build(
    settings: Settings,
    *,
    fabric: Fabric | None = None,
    place: WorkerPlace | None = None,
    make_features: Sequence[Callable[[Ground], Feature]] | None = None,
) -> Router:
    """Build the router. Tests pass a fabric, and a choice of features.

    ``place``: the worker's place, if this is one of several.

    Raises:
        AddressError: an address in the settings is not valid.
        AlreadyKnown: an address occurs twice under one role.
        ConfigError: a file cannot be read, settings contradict each other, the router would be open
            to others, or the library for spans is missing.
    """
    check(settings)
    # Only the wall clock is common to several hosts.
    wall = time.time if fabric is None else fabric.clock  # noqa: TID251
    fabric = fabric or Fabric()
    clock = fabric.clock
    has_others = place is not None or has_other_routers(settings)
    engines = build_engines(settings, fabric, pairs_within(settings), has_other_routers=has_others)
    ground = Ground(settings, engines, clock, place)
    added = [
        make_feature(ground)
        for make_feature in (features() if make_features is None else make_features)
    ]
    spans = first_added(feature.spans() for feature in added)
    fleet = build_fleet(settings, engines, clock, [feature.routing() for feature in added])
    serving = build_requests(
        settings,
        engines,
        fleet,
        clock,
        ended=_given(feature.hears_ended() for feature in added),
        spans=spans,
        claims=first_added(feature.claims() for feature in added),
        openings=first_added(feature.openings() for feature in added) or StreamOpenings(),
        watchers=_given(feature.watcher() for feature in added),
    )
    feeds = _given(feature.feed() for feature in added)
    discovery = build_discovery(shared_store(settings), engines.registry, clock, feeds)
    core = Core(serving, discovery, wall)
    parts = [feature.parts(core) for feature in added]
    background = build_background(
        settings,
        engines,
        serving,
        discovery,
        [part.status for part in parts],
        other_probes=first_added(part.other_probes for part in parts),
        metrics_listeners=[listener for part in parts for listener in part.metrics_listeners],
        clock=clock,
    )
    requests = serving.requests
    telemetry = serving.telemetry
    live_settings = requests.services.settings
    admin_key = AdminKey(operator_key(settings))
    joining_key = AdminKey(join_key(settings))
    reloads = FileReloads(
        lambda: live_settings.current,
        server_tls(settings),
        engines.tls.context,
        serving.keyring,
        engines.outbound,
        admin_key,
        telemetry.counters,
        admin_tls(settings),
        joining_key,
    )

    def running() -> Sequence[AbstractAsyncContextManager[object]]:
        return (
            serving.reader,
            engines.wire,
            serving.releaser,
            reloads.running(),
            *background.running(),
            *[part_item() for part in parts for part_item in part.running],
            requests,
        )

    routes = build_routes(
        settings,
        engines,
        serving,
        discovery,
        background.status,
        added=[part_item for part in parts for part_item in part.routes],
        families=[part.families for part in parts],
        admin_key=admin_key,
        join_key=joining_key,
        clock=clock,
    )
    lifespan = _lifespan(engines.registry, running)
    own_name = socket.gethostname()
    app, admin_app = build_applications(
        settings, routes, lifespan, serving.lifetime, serving.keyring, own_name=own_name
    )
    app.add_middleware(
        RequestContextMiddleware,
        new_id=new_id,
        clock=clock,
        ids=requests.services.ids,
        spans=spans,
        request_over=telemetry.request_over,
    )
    live = Live(
        engines.registry,
        live_settings,
        serving.gate,
        serving.keyring,
        engines.outbound,
        admin_key,
        joining_key,
        clock,
        check,
    )
    return Router(
        app,
        admin_app,
        requests,
        serving.lifetime,
        live,
        telemetry,
        reloads.server_tls,
        reloads.admin_tls,
    )


def _given(parts: Iterable[T | None]) -> list[T]:
    return [part for part in parts if part is not None]


def _lifespan(
    registry: Registry, running: Callable[[], Sequence[AbstractAsyncContextManager[object]]]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return the lifespan of the server: its parts end in reverse order."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        for role in Role:
            for instance in registry.known(role):
                # all other lines have only the id
                logger.info("%s is at %s", instance.id, instance.address.url)
        async with AsyncExitStack() as opened:
            for part in running():
                await opened.enter_async_context(part)
            yield

    return lifespan
