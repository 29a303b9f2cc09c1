"""Routes for operators, in the formats of vLLM's own proxy demo; their errors are FastAPI's ``{"detail": ...}``."""

import logging
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request

from xpyd_proxy.api.adminkey import key_check, onlooker_check
from xpyd_proxy.api.audit import Act, Audit
from xpyd_proxy.api.incoming import passed_on, read_body
from xpyd_proxy.api.models import Models
from xpyd_proxy.core.admission.keys import Keyring
from xpyd_proxy.core.fleet.target import Target
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.errors import AddressError, AlreadyKnown, BadPort, BodyTooLarge, NotAllowed
from xpyd_proxy.io.discovery.stores import StoreDown
from xpyd_proxy.io.request_path.live_fleet import LiveFleet
from xpyd_proxy.io.wire.connection_guard import Guard
from xpyd_proxy.io.workers.changes import Changes
from xpyd_proxy.settings import Settings

logger = logging.getLogger(__name__)


class _Addition(msgspec.Struct):
    """The body of /instances/add; types are checked by hand, for each has its own answer."""

    type: object = None
    instance: object = None


@dataclass(frozen=True, slots=True)
class Gatekeeping:
    """Who may do what, and where engines may be."""

    keyring: Keyring
    audit: Audit
    guard: Guard


def admin_routes(
    settings: Settings, fleet: LiveFleet, models: Models, changes: Changes, gatekeeping: Gatekeeping
) -> APIRouter:
    """Build the routes."""
    audit, keyring = gatekeeping.audit, gatekeeping.keyring
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        for role in Role:
            fleet.usable(role)
        return {"status": "ok"}

    @router.get("/status", dependencies=[Depends(onlooker_check(settings.admin_key, keyring))])
    async def status() -> dict[str, int | list[str]]:
        prefill, decode = ([node.address.authority for node in fleet.known(role)] for role in Role)
        return {
            "prefill_node_count": len(prefill),
            "decode_node_count": len(decode),
            "prefill_nodes": prefill,
            "decode_nodes": decode,
        }

    @router.post("/instances/add", dependencies=[Depends(key_check(settings.admin_key, audit))])
    async def add(request: Request) -> dict[str, str]:
        with audit.act(request) as act:
            return await adding(request, act)

    async def adding(request: Request, act: Act) -> dict[str, str]:
        role, text = _wanted(await _body(request, limit=settings.max_body_bytes))
        act.target = f"{role} {text}"
        target = _target(text)
        await _check_place(gatekeeping.guard, target)
        candidate = Instance(InstanceId("candidate"), role, target.address)
        served = await models.accepted(candidate, passed_on(request.scope))
        if served is None:
            raise HTTPException(400, "Instance validation failed.")
        try:
            await changes.add(role, target)
        except AlreadyKnown as exc:
            raise HTTPException(400, "Instance already exists.") from exc
        except StoreDown as exc:
            logger.warning("%s", exc)
            raise HTTPException(503, f"The instance may or may not have been added: {exc}") from exc
        fleet.serves(role, target.address, served)  # before a request for another model comes
        return {"message": f"Added {text} to {role}_instances."}

    return router


async def _body(request: Request, *, limit: int) -> bytes:
    """Read what is sent, of whatever content type: vLLM's demo does not look at it."""
    try:
        return await read_body(request.scope, request.receive, limit=limit)
    except BodyTooLarge as exc:
        raise HTTPException(413, str(exc)) from exc


def _wanted(body: bytes) -> tuple[Role, str]:
    """Read the role and the address, in the order in which the demo complains about them."""
    try:
        addition = decode(body, _Addition)
    except NotJson as exc:
        raise HTTPException(400, "The body is not a JSON object.") from exc
    if addition.type not in tuple(Role):
        raise HTTPException(400, "Invalid instance type.")
    if not isinstance(addition.instance, str) or ":" not in addition.instance:
        raise HTTPException(400, "Invalid instance format.")
    return Role(str(addition.type)), addition.instance


async def _check_place(guard: Guard, target: Target) -> None:
    """Look where the address leads before anything is sent there."""
    try:
        await guard.places(target.address)
    except NotAllowed as exc:
        raise HTTPException(403, f"Instance address not allowed: {exc}.") from exc
    except OSError as exc:
        raise HTTPException(400, "Instance validation failed.") from exc


def _target(text: str) -> Target:
    try:
        return Target.parse(text)
    except BadPort as exc:
        raise HTTPException(400, "Invalid port number.") from exc
    except AddressError as exc:
        raise HTTPException(400, "Invalid instance address.") from exc
