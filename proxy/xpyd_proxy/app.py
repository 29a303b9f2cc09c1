"""The composition root: the one place where objects are built and connected."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI
from starlette.routing import Route

from xpyd_proxy.api import problems
from xpyd_proxy.api.admin import admin_routes
from xpyd_proxy.api.models import Models, model_routes
from xpyd_proxy.api.openai import Generation
from xpyd_proxy.api.tracking import Tracking
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.learned import Learned
from xpyd_proxy.core.model import Api, RequestId, Role
from xpyd_proxy.core.policies.round_robin import RoundRobin
from xpyd_proxy.core.push import MANNERS
from xpyd_proxy.core.registry import Registry
from xpyd_proxy.io.engines import HttpEngines
from xpyd_proxy.relay import Relay
from xpyd_proxy.settings import Settings

logger = logging.getLogger(__name__)


def create_app(settings: Settings, *, transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """Build the router. Tests pass a transport that never opens a socket.

    Raises:
        AddressError: an address in the settings cannot be one.
        AlreadyKnown: an address occurs twice under one role.
    """
    registry = _registry(settings)
    engines = HttpEngines(settings, transport=transport)
    models = Models(registry, engines, model=settings.model)
    manner = MANNERS[settings.mode]
    relay = Relay(
        registry,
        engines,
        RoundRobin(),
        Learned(at_once=manner.at_once),
        manner,
        time.monotonic,
        settings.prefill_timeout_s,
        settings.retries,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        for role in Role:
            for instance in registry.known(role):
                logger.info("%s is at %s", instance.id, instance.address.url)  # everything else says only the id
        async with engines:
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Tracking, new_id=_new_id, clock=time.monotonic)
    problems.install(app)
    app.include_router(admin_routes(settings, registry, models))
    app.include_router(model_routes(models))
    app.router.routes.extend(Route(api, Generation(relay, settings), methods=["POST"]) for api in Api)
    return app


def _registry(settings: Settings) -> Registry:
    registry = Registry()
    for role, addresses in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for address in addresses:
            registry.add(role, Address.parse(address))
    return registry


def _new_id() -> RequestId:
    return RequestId(f"xpyd-{uuid.uuid4().hex}")
