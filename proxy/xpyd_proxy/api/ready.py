"""Whether requests should be sent here: for the load balancer in front of the router."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter

from xpyd_proxy.api.schemas import ErrorResponse, Health
from xpyd_proxy.core.admission.lifetime import Lifetime, Stage
from xpyd_proxy.core.model import Role
from xpyd_proxy.core.ports import EngineFleet
from xpyd_proxy.errors import ClosingDown


def ready_routes(fleet: EngineFleet, lifetime: Lifetime, needed: Callable[[], Sequence[Role]]) -> APIRouter:
    """Build GET /ready: 200 with an engine of each role that is needed now, else 503; and 503 from SIGTERM on."""
    router = APIRouter(tags=["probes"])

    @router.get("/ready", responses={503: {"model": ErrorResponse, "description": "Send requests elsewhere"}})
    async def ready() -> Health:
        """Tell whether requests should be sent here."""
        if lifetime.stage is not Stage.SERVING:
            raise ClosingDown("the router is about to end", retry_after_s=1)
        for role in needed():
            fleet.usable(role)
        return Health(status="ready")

    return router
