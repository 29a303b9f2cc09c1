"""Whether requests should be sent here: for the load balancer in front of the router."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter

from xpyd_proxy.core.admission.lifetime import Lifetime, Stage
from xpyd_proxy.core.model import Role
from xpyd_proxy.core.ports import Fleet
from xpyd_proxy.errors import ClosingDown


def ready_routes(fleet: Fleet, lifetime: Lifetime, needed: Callable[[], Sequence[Role]]) -> APIRouter:
    """Build GET /ready: 200 with an engine of each role that is needed now, else 503; and 503 from SIGTERM on."""
    router = APIRouter()

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        if lifetime.stage is not Stage.SERVING:
            raise ClosingDown("the router is about to end", retry_after_s=1)
        for role in needed():
            fleet.usable(role)
        return {"status": "ready"}

    return router
