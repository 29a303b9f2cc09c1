"""FastAPI's document of every path, and a page that shows it without a script from elsewhere.

FastAPI's own /docs loads Swagger UI from a CDN: a cluster may have no way there, and operators type the router's key.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from xpyd_proxy.api import exception_handlers
from xpyd_proxy.api.endpoint_routes import operation_id
from xpyd_proxy.api.operator_route import OPERATORS, is_admin
from xpyd_proxy.api.page import PAGE_HEADERS, anybody, content_policy

Part: TypeAlias = dict[str, Any]  # of the document

_ABOUT: Final = (
    "A router for vLLM engines that prefill and engines that decode. Bodies go to the engines as they are: fields that "
    "are not named here are the engine's to accept or to refuse."
)


def new_application(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """Build the application that all routes are added to."""
    app = FastAPI(
        title="xpyd",
        version=version("xpyd"),
        description=_ABOUT,
        lifespan=lifespan,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    exception_handlers.install(app)
    return app


def document_routes(app: FastAPI, admin_key: str | None, browsers: Callable[[Request], None] = anybody) -> APIRouter:
    """Build the routes of the document and its page; ``browsers`` raises Unauthorized for who may not see them.

    What is for operators is in the document for those who show their key.
    """
    router = APIRouter(include_in_schema=False, dependencies=[Depends(browsers)])
    html = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
    headers = PAGE_HEADERS | {"content-security-policy": content_policy(html)}
    made: dict[bool, bytes] = {}  # the routes do not change while the router runs

    @router.get("/docs")
    async def docs() -> Response:
        return Response(html, headers=headers, media_type="text/html")

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        operators = is_admin(request, admin_key)
        if operators not in made:
            made[operators] = msgspec.json.encode(describe(app, operators=operators))
        return Response(made[operators], headers={"cache-control": "no-store"}, media_type="application/json")

    return router


def describe(app: FastAPI, *, operators: bool) -> Part:
    """Return the document; ``operators``: with the routes that are for them."""
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    return found if operators else _for_clients(found)


def _for_clients(document: Part) -> Part:
    """Leave out the routes of operators, and the schemas and keys that nothing else names."""
    paths: dict[str, Part] = {
        path: item
        for path, item in document["paths"].items()
        if not any(OPERATORS in operation.get("tags", ()) for operation in item.values())
    }
    components: Part = document.get("components", {})
    needed, left = set[str](), list(_references(paths))
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += _references(components["schemas"][name])
    operations: list[Part] = [operation for item in paths.values() for operation in item.values()]
    keys = {name for operation in operations for one in operation.get("security", ()) for name in one}
    kept = {
        "schemas": {name: schema for name, schema in components.get("schemas", {}).items() if name in needed},
        "securitySchemes": {name: one for name, one in components.get("securitySchemes", {}).items() if name in keys},
    }
    return document | {"paths": paths, "components": kept}


def _references(part: object) -> Iterator[str]:
    """Yield the name of each schema that is referred to."""
    if isinstance(part, dict):
        for name, value in cast("Part", part).items():
            if name == "$ref":
                yield str(value).rpartition("/")[2]
            else:
                yield from _references(value)
    elif isinstance(part, list):
        for value in cast("list[object]", part):
            yield from _references(value)
