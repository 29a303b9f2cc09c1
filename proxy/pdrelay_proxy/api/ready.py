"""Routes for probes: whether the process lives, has engines, and should get requests."""

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from pdrelay_proxy.api.error_answers import ANY_ROUTE, error_answers
from pdrelay_proxy.api.schemas import ErrorResponse, FleetHealth, Health
from pdrelay_proxy.core.admission.lifetime import Lifetime, Stage
from pdrelay_proxy.core.fleet.fleet_warnings import FleetWarnings
from pdrelay_proxy.core.http.response_head import VERSION_HEADER
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.errors import ClosingDown, NoInstance
from pdrelay_proxy.io.build import find_build
from pdrelay_proxy.io.discovery.discovery import Discovery
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet


class _VersionedRoute(APIRoute):
    """Adds a header with the router's version to each answer, also of an error."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with one more header."""
        version = VERSION_HEADER.encode(), str(find_build()).encode()

        async def send_versioned(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], version]
            await send(message)

        await super().handle(scope, receive, send_versioned)


def probe_routes(
    fleet: LiveFleet, discovery: Discovery, lifetime: Lifetime, warnings: FleetWarnings
) -> APIRouter:
    """Build GET /health, and GET /ready for the load balancer in front of the router.

    /ready is 200 from the first view of every source of engines until SIGTERM, otherwise 503. It
    does not depend on engines: all routers lose those at once, and with all routers out of their
    Service clients would get refused connections in place of a 503 with a reason.
    """
    router = APIRouter(tags=["probes"], route_class=_VersionedRoute)
    find_build()  # fills its cache now: it may run git

    @router.get(
        "/health",
        responses=error_answers(ErrorResponse, {503: "No engine of one role", **ANY_ROUTE}),
        response_model_exclude_none=True,
    )
    async def health() -> FleetHealth:
        """Tell whether there is an engine of each role, and what is wrong with the fleet."""
        for role in Role:
            fleet.usable(role)
        return FleetHealth(status="ok", warnings=list(warnings.texts) or None)

    @router.get("/readiness", include_in_schema=False)
    @router.get(
        "/ready",
        responses=error_answers(ErrorResponse, {503: "Send requests elsewhere", **ANY_ROUTE}),
    )
    async def ready() -> Health:
        """Tell whether requests should be sent here: engines are known, and it does not end."""
        if lifetime.stage is not Stage.SERVING:
            raise ClosingDown("the router is about to end", retry_after_s=1)
        if missing := discovery.missing:
            raise NoInstance(
                f"the router has not heard yet which instances there are: {', '.join(missing)} is "
                f"silent"
            )
        return Health(status="ready")

    return router


def liveness_routes() -> APIRouter:
    """Build GET /live: a router that does not answer it hangs, and a restart helps.

    Engines play no part.
    """
    router = APIRouter(tags=["probes"])

    @router.get("/liveness", include_in_schema=False)
    @router.get("/live", responses=error_answers(ErrorResponse, ANY_ROUTE))
    async def live() -> Health:
        """Tell that the router answers."""
        return Health(status="ok")

    return router
