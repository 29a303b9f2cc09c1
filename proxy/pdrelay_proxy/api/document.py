"""The OpenAPI document of every path, and a page that shows it without scripts from other sites.

FastAPI's own /docs loads Swagger UI from a CDN: a cluster may not reach it, and operators type the
router's key there.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from pdrelay_proxy.api import exception_handlers
from pdrelay_proxy.api.error_answers import add_schemas
from pdrelay_proxy.api.onlookers import anybody
from pdrelay_proxy.api.operator_route import OPERATORS, is_admin
from pdrelay_proxy.api.page import PAGE_HEADERS, content_policy
from pdrelay_proxy.core.admission.admin_key import AdminKey

# marks a path of the document that is at the main port alone
OTHER_PORT: Final = "x-pdrelay-main-port"
_ABOUT: Final = (
    "A router for vLLM engines that prefill and engines that decode. Bodies go to the engines as "
    "they are: fields that "
    "are not named here are the engine's to accept or to refuse."
)


def new_application(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """Build the application to which all routes are added."""
    app = FastAPI(
        title="pdrelay",
        version=version("pdrelay"),
        description=_ABOUT,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    exception_handlers.install(app)
    return app


def document_routes(
    app: FastAPI,
    admin_key: AdminKey,
    browsers: Callable[[Request], Awaitable[None]] = anybody,
    *,
    elsewhere: Sequence[BaseRoute] = (),
) -> APIRouter:
    """Build the routes of the document and its page; ``browsers`` raises Unauthorized unless the
    caller may see them.

    Callers with the operator's key also get the operators' routes. ``elsewhere``: routes of another
    port, which are included, too.
    """
    router = APIRouter(include_in_schema=False, dependencies=[Depends(browsers)])
    html = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
    headers = PAGE_HEADERS | {"content-security-policy": content_policy(html)}
    documents: dict[bool, bytes] = {}  # built once: the routes do not change while the router runs

    @router.get("/docs")
    async def docs() -> Response:
        return Response(html, headers=headers, media_type="text/html")

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        operators = is_admin(request, admin_key)
        if operators not in documents:
            routes = [
                route
                for route in app.routes
                if operators or OPERATORS not in getattr(route, "tags", ())
            ]
            here = {getattr(route, "path", "") for route in routes}
            others = [route for route in elsewhere if getattr(route, "path", "") not in here]
            shown = [*others, *routes]
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=shown
            )
            add_schemas(document)
            for path in {getattr(route, "path", "") for route in others} & document["paths"].keys():
                document["paths"][path][OTHER_PORT] = True
            documents[operators] = msgspec.json.encode(document)
        return Response(
            documents[operators],
            headers={"cache-control": "no-store"},
            media_type="application/json",
        )

    return router
