"""Routes for operators, in the formats of vLLM's own proxy demo; their errors are FastAPI's ``{"detail": ...}``."""

import hmac
import logging
from typing import Annotated, Final, TypeAlias

import msgspec
from fastapi import APIRouter, Depends, Header, HTTPException, Request

from xpyd_proxy.api.incoming import passed_on, read_body, require_json
from xpyd_proxy.api.models import Models
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.core.registry import Registry
from xpyd_proxy.errors import AddressError, AlreadyKnown, BadPort, BodyTooLarge, UnsupportedMedia
from xpyd_proxy.settings import Settings

ApiKey: TypeAlias = Annotated[str, Header()]
logger = logging.getLogger(__name__)
_MEDIA_TYPE: Final = "Unsupported Media Type: Only 'application/json' is allowed"


class _Addition(msgspec.Struct):
    """The body of /instances/add; types are checked by hand, for each has its own answer."""

    type: object = None
    instance: object = None


def admin_routes(settings: Settings, registry: Registry, models: Models) -> APIRouter:
    """Build the routes; the key is compared in constant time."""
    router = APIRouter()

    def authenticate(x_api_key: ApiKey) -> None:
        if not settings.admin_key:
            raise HTTPException(500, "Server configuration error.")
        if not hmac.compare_digest(x_api_key.encode("latin-1"), settings.admin_key.encode()):
            logger.warning("somebody tried to add an engine with a wrong X-Api-Key")
            raise HTTPException(403, "Forbidden: Invalid API Key.")

    @router.get("/health")
    async def health() -> dict[str, str]:
        for role in Role:
            registry.usable(role)
        return {"status": "ok"}

    @router.get("/status")
    async def status() -> dict[str, int | list[str]]:
        prefill, decode = ([node.address.authority for node in registry.known(role)] for role in Role)
        return {
            "prefill_node_count": len(prefill),
            "decode_node_count": len(decode),
            "prefill_nodes": prefill,
            "decode_nodes": decode,
        }

    @router.post("/instances/add", dependencies=[Depends(authenticate)])
    async def add(request: Request) -> dict[str, str]:
        role, text = _wanted(await _body(request, limit=settings.max_body_bytes))
        address = _address(text)
        candidate = Instance(InstanceId("candidate"), role, address)
        if not await models.accepts(candidate, passed_on(request.scope)):
            raise HTTPException(400, "Instance validation failed.")
        try:
            added = registry.add(role, address)
        except AlreadyKnown as exc:
            raise HTTPException(400, "Instance already exists.") from exc
        logger.info("%s is at %s", added.id, address.url)
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


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except BadPort as exc:
        raise HTTPException(400, "Invalid port number.") from exc
    except AddressError as exc:
        raise HTTPException(400, "Invalid instance address.") from exc
