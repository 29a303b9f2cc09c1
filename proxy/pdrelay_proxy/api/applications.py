"""The routes of each port: with an admin port, the main one has the clients' routes alone.

Load balancers in front of the main port probe `/health` or `/ready` there, so both ports have
these.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from pdrelay_proxy.api.auth import AuthMiddleware
from pdrelay_proxy.api.cross_origin import CrossOriginMiddleware
from pdrelay_proxy.api.document import document_routes, new_application
from pdrelay_proxy.api.endpoint_routes import operation_id
from pdrelay_proxy.core.admission.admin_key import AdminKey
from pdrelay_proxy.core.admission.keys import Keyring
from pdrelay_proxy.core.admission.lifetime import Lifetime
from pdrelay_proxy.core.http.allowed_origins import AllowedOrigins
from pdrelay_proxy.core.http.origins import Sites
from pdrelay_proxy.settings import Settings


@dataclass(frozen=True, slots=True)
class Routes:
    """All routes of a router, by who uses them."""

    clients: Sequence[APIRouter]
    probes: Sequence[APIRouter]  # at both ports
    operators: Sequence[APIRouter]  # and Prometheus, the status page, and the kubelet
    endpoints: Sequence[BaseRoute]
    admin_key: AdminKey
    # raises Unauthorized unless the caller may see the document
    browsers: Callable[[Request], Awaitable[None]]


def build_applications(
    settings: Settings,
    routes: Routes,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    lifetime: Lifetime,
    keyring: Keyring,
    *,
    own_name: str,
) -> tuple[FastAPI, FastAPI | None]:
    """Build those of the main and the admin port (None: the main one has its routes, too).

    ``lifespan`` is that of the main one, ``own_name`` this machine's name.

    Clients' requests need one more middleware (api/request_context.py), which ``app.py`` adds to
    the main one.
    """
    main = new_application(lifespan)
    main.add_middleware(
        AuthMiddleware, lifetime=lifetime, keyring=keyring, sites=Sites(settings, own_name)
    )
    if settings.allowed_origins:
        main.add_middleware(CrossOriginMiddleware, origins=AllowedOrigins(settings.allowed_origins))
    for router in (*routes.clients, *routes.probes):
        _add(main, router)
    main.router.routes.extend(routes.endpoints)
    if settings.admin_port is None:
        _add_operators(main, routes)
        return main, None
    admin = new_application(_no_lifespan)
    there = replace(settings, host=settings.admin_host or settings.host)
    admin.add_middleware(
        AuthMiddleware, lifetime=lifetime, keyring=keyring, sites=Sites(there, own_name)
    )
    for router in routes.probes:
        _add(admin, router)
    _add_operators(admin, routes, elsewhere=main.routes)
    return main, admin


def _add_operators(app: FastAPI, routes: Routes, *, elsewhere: Sequence[BaseRoute] = ()) -> None:
    for router in routes.operators:
        _add(app, router)
    _add(app, document_routes(app, routes.admin_key, routes.browsers, elsewhere=elsewhere))


def _add(app: FastAPI, router: APIRouter) -> None:
    """Add routes unchanged: ``include_router`` would rebuild each, with its models."""
    for route in router.routes:
        if isinstance(route, APIRoute):
            route.unique_id = operation_id(route)
        app.router.routes.append(route)


@asynccontextmanager
async def _no_lifespan(_: FastAPI) -> AsyncGenerator[None]:
    """Start nothing: the main application does."""
    yield
