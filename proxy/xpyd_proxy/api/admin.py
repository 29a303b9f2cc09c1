"""Routes for operators, in the formats of vLLM's own proxy demo; their errors are FastAPI's ``{"detail": ...}``."""

import logging
from typing import Final

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request

from xpyd_proxy.api.adminkey import key_check, onlooker_check
from xpyd_proxy.api.incoming import passed_on, read_body, require_json
from xpyd_proxy.api.models import Models
from xpyd_proxy.core.keys import Keyring
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.core.target import Target
from xpyd_proxy.errors import AddressError, AlreadyKnown, BadPort, BodyTooLarge, UnsupportedMedia
from xpyd_proxy.io.fleet import LiveFleet
from xpyd_proxy.io.stores import StoreDown
from xpyd_proxy.io.workers.changes import Changes
from xpyd_proxy.settings import Settings

logger = logging.getLogger(__name__)
_MEDIA_TYPE: Final = "Unsupported Media Type: Only 'application/json' is allowed"


class _Addition(msgspec.Struct):
    """The body of /instances/add; types are checked by hand, for each has its own answer."""

    type: object = None
    instance: object = None


def admin_routes(settings: Settings, fleet: LiveFleet, models: Models, keyring: Keyring, changes: Changes) -> APIRouter:
    """Build the routes."""
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

    @router.post("/instances/add", dependencies=[Depends(key_check(settings.admin_key))])
    async def add(request: Request) -> dict[str, str]:
        role, text = _wanted(await _body(request, limit=settings.max_body_bytes))
        target = _target(text)
        candidate = Instance(InstanceId("candidate"), role, target.address)
        if not await models.accepts(candidate, passed_on(request.scope)):
            raise HTTPException(400, "Instance validation failed.")
        try:
            await changes.add(role, target)
        except AlreadyKnown as exc:
            raise HTTPException(400, "Instance already exists.") from exc
        except StoreDown as exc:
            logger.warning("%s", exc)
            raise HTTPException(503, f"The instance may or may not have been added: {exc}") from exc
        return {"message": f"Added {text} to {role}_instances."}

    return router


async def _body(request: Request, *, limit: int) -> bytes:
    try:
        require_json(request.scope)
        return await read_body(request.scope, request.receive, limit=limit)
    except UnsupportedMedia as exc:
        raise HTTPException(415, _MEDIA_TYPE) from exc
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


def _target(text: str) -> Target:
    try:
        return Target.parse(text)
    except BadPort as exc:
        raise HTTPException(400, "Invalid port number.") from exc
    except AddressError as exc:
        raise HTTPException(400, "Invalid instance address.") from exc
