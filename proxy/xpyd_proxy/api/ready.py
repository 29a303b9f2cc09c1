"""Routes for probes: whether the router has engines, and whether requests should be sent here."""

from collections.abc import Callable

from fastapi import APIRouter

from xpyd_proxy.api.schemas import ErrorResponse, Health
from xpyd_proxy.core.admission.lifetime import Lifetime, Stage
from xpyd_proxy.core.model import Role
from xpyd_proxy.errors import ClosingDown, NoInstance
from xpyd_proxy.io.discovery.reconciler import Discovery
from xpyd_proxy.io.request_path.live_fleet import LiveFleet
from xpyd_proxy.settings import Settings


def probe_routes(
    fleet: LiveFleet, discovery: Discovery, lifetime: Lifetime, settings: Callable[[], Settings]
) -> APIRouter:
    """Build GET /health, and GET /ready for the load balancer in front of the router.

    /ready is 200 when every source of engines was heard and there is an engine of each role that is needed by
    the settings of now, else 503; and 503 from SIGTERM on.
    """
    router = APIRouter(tags=["probes"])

    @router.get("/health", responses={503: {"model": ErrorResponse, "description": "No engine of one role"}})
    async def health() -> Health:
        """Tell whether there is an engine of each role."""
        for role in Role:
            fleet.usable(role)
        return Health(status="ok")

    @router.get("/ready", responses={503: {"model": ErrorResponse, "description": "Send requests elsewhere"}})
    async def ready() -> Health:
        """Tell whether requests should be sent here."""
        if lifetime.stage is not Stage.SERVING:
            raise ClosingDown("the router is about to end", retry_after_s=1)
        if missing := discovery.missing:
            raise NoInstance(f"the router has not heard yet which instances there are: {', '.join(missing)} is silent")
        for role in (Role.DECODE,) if settings().decode_only_fallback else Role:
            fleet.usable(role)
        return Health(status="ready")

    return router
