"""Routes for operators, in the formats of vLLM's own proxy demo; their errors are FastAPI's
``{"detail": ...}``.
"""

import logging
from typing import Final

from fastapi import APIRouter, Depends, HTTPException, Request

from pdrelay_proxy.api.model_list import ModelCatalog
from pdrelay_proxy.api.onlookers import Onlookers
from pdrelay_proxy.api.operator_route import (
    CHANGE_ERRORS,
    OPERATOR_KEY,
    OPERATORS,
    OperatorAccess,
    not_stored,
    operator_errors,
)
from pdrelay_proxy.api.own_engines import OwnEngines, joining_host
from pdrelay_proxy.api.schemas import FleetStatus, InstanceAdded, NewInstance
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.errors import AddressError, AlreadyKnown, BadPort, NotAccepted, NotAllowed
from pdrelay_proxy.io.discovery.engine_changes import EngineChanges
from pdrelay_proxy.io.discovery.store import StoreDown
from pdrelay_proxy.io.probes.newcomers import Newcomers
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.wire.connection_guard import Guard
from pdrelay_proxy.requests.intake import passed_on

logger = logging.getLogger(__name__)
# The demo's texts: scripts compare them.
_FAULTS: Final = {"type": "Invalid instance type.", "instance": "Invalid instance format."}
# why an engine is not accepted, for operators: the demo's texts have no reason
_REASON: Final = "x-pdrelay-reason"
_REASON_MOST: Final = 300  # characters
_ADD_ERRORS: Final = operator_errors(413, 415, 503) | {
    400: CHANGE_ERRORS[400]
    | {
        "headers": {
            _REASON: {"description": "Why the engine is not accepted", "schema": {"type": "string"}}
        }
    }
}
_NO_OBJECT: Final = "The body is not a JSON object."


def admin_routes(
    fleet: LiveFleet,
    models: ModelCatalog,
    changes: EngineChanges,
    *,
    guard: Guard,
    own: OwnEngines,
    newcomers: Newcomers,
    access: OperatorAccess,
    onlookers: Onlookers,
) -> APIRouter:
    """Build the routes of the demo; ``onlookers``: who may see addresses."""
    router = APIRouter(
        tags=[OPERATORS],
        dependencies=[OPERATOR_KEY],
        # The demo ignores the content type: curl -d sends a form's.
        route_class=access.route(
            sentence=lambda field, _: _FAULTS.get(field, _NO_OBJECT),
            any_media=True,
            takes_join_key=True,
        ),
    )
    open_router = APIRouter(
        tags=[OPERATORS], dependencies=[*onlookers.keys, Depends(onlookers.scrapers)]
    )

    @open_router.get("/status", responses=operator_errors())
    async def status() -> FleetStatus:
        """List the engines' addresses."""
        prefill, decode = ([node.address.authority for node in fleet.known(role)] for role in Role)
        return FleetStatus(
            prefill_node_count=len(prefill),
            decode_node_count=len(decode),
            prefill_nodes=prefill,
            decode_nodes=decode,
        )

    @router.post("/instances/add", responses=_ADD_ERRORS, response_model_exclude_none=True)
    async def add(request: Request, new: NewInstance) -> InstanceAdded:
        """Send requests to one more engine, which must answer."""
        role = new.type
        text = new.instance
        host = joining_host(request)
        request.state.target = f"{role} {text}"
        try:
            target = Target.parse(text)
            await own.check(host, [target.address])
            # checks its IP addresses before anything is sent there
            await guard.ips_of(target.address)
        except BadPort as exc:
            raise HTTPException(400, "Invalid port number.") from exc
        except NotAllowed as exc:
            raise HTTPException(403, f"Instance address not allowed: {exc}.") from exc
        except AddressError as exc:
            raise HTTPException(400, "Invalid instance address.") from exc
        except OSError as exc:
            raise _not_added(new, exc) from exc
        candidate = Instance(InstanceId("candidate"), role, target.address)
        try:
            await newcomers.check(candidate)
            served = await models.accepted(candidate, passed_on(request.headers.raw))
        except NotAccepted as exc:
            raise _not_added(new, exc) from exc
        try:
            await changes.add(role, target)
        except AlreadyKnown as exc:
            raise HTTPException(400, "Instance already exists.") from exc
        except StoreDown as exc:
            logger.warning("%s", exc)
            raise not_stored("The instance", "added", exc) from exc
        fleet.serves(role, target.address, served)  # before a request for another model comes
        # A warning would name engines of others to a host that has joined.
        warning = await newcomers.warning(role, target.address) if host is None else None
        return InstanceAdded(message=f"Added {text} to {role}_instances.", warning=warning)

    router.routes.extend(open_router.routes)  # include_router would add the operator's key to them
    return router


def _not_added(new: NewInstance, why: Exception) -> HTTPException:
    """Log the reason, and put it into a header."""
    logger.warning("%s %s is not added: %s", new.type, new.instance, why)
    reason = str(why)[:_REASON_MOST].encode("ascii", "backslashreplace").decode()
    shown = "".join(letter if letter.isprintable() else "?" for letter in reason)
    return HTTPException(400, "Instance validation failed.", {_REASON: shown})
