"""FastAPI's document of every path, and a page that shows it without a script from elsewhere.

FastAPI's own /docs loads Swagger UI from a CDN: a cluster may have no way there, and operators type
the router's key.
"""

from collections.abc import Callable, Sequence
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
from pdrelay_proxy.api.operator_route import OPERATORS, is_admin
from pdrelay_proxy.api.page import PAGE_HEADERS, anybody, content_policy
from pdrelay_proxy.core.admission.admin_key import AdminKey

# marks a path of the document that is at the main port alone
OTHER_PORT: Final = "x-pdrelay-main-port"
_ABOUT: Final = (
    "A router for vLLM engines that prefill and engines that decode. Bodies go to the engines as "
    "they are: fields that "
    "are not named here are the engine's to accept or to refuse."
)


def new_application(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """Build the application that all routes are added to."""
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
    browsers: Callable[[Request], None] = anybody,
    *,
    elsewhere: Sequence[BaseRoute] = (),
) -> APIRouter:
    """Build the routes of the document and its page; ``browsers`` raises Unauthorized for who may
    not see them.

    What is for operators is in the document for those who show their key. ``elsewhere``: routes of
    another port, which are in it, too.
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
            routes = [
                one for one in app.routes if operators or OPERATORS not in getattr(one, "tags", ())
            ]
            here = {getattr(one, "path", "") for one in routes}
            others = [one for one in elsewhere if getattr(one, "path", "") not in here]
            shown = [*others, *routes]
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=shown
            )
            add_schemas(document)
            for path in {getattr(one, "path", "") for one in others} & document["paths"].keys():
                document["paths"][path][OTHER_PORT] = True
            made[operators] = msgspec.json.encode(document)
        return Response(
            made[operators], headers={"cache-control": "no-store"}, media_type="application/json"
        )

    return router
