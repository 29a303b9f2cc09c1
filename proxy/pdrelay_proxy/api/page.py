"""The status page, its numbers, and the metrics.

They show ids, never addresses.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse

from pdrelay_proxy.api.error_answers import ANY_ROUTE, error_answers
from pdrelay_proxy.api.onlookers import EVERYONE, Onlookers
from pdrelay_proxy.api.schemas import ErrorResponse
from pdrelay_proxy.api.stepped import finish_in_steps, in_steps
from pdrelay_proxy.io.metrics import Metrics
from pdrelay_proxy.io.status import Snapshot, Status

_ERRORS: Final = error_answers(
    ErrorResponse,
    {401: "No API key and no admin key, or one that the router does not know", **ANY_ROUTE},
)
_INLINE: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
PAGE_HEADERS: Final = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def page_routes(status: Status, metrics: Metrics, onlookers: Onlookers = EVERYONE) -> APIRouter:
    """Build the routes; the page's file is read once, here."""
    router = APIRouter(tags=["status"], dependencies=onlookers.keys)
    html = Path(__file__).with_name("status.html").read_text(encoding="utf-8")
    headers = PAGE_HEADERS | {"content-security-policy": content_policy(html)}

    @router.get(
        "/",
        dependencies=[Depends(onlookers.browsers)],
        response_class=HTMLResponse,
        responses=_ERRORS,
    )
    async def page() -> Response:
        """Show the status page."""
        return Response(html, headers=headers, media_type="text/html")

    @router.get(
        "/stats",
        dependencies=[Depends(onlookers.browsers)],
        response_model=Snapshot,
        responses=_ERRORS,
    )
    async def stats() -> Response:
        """Give the numbers of the status page."""
        body = msgspec.json.encode(await finish_in_steps(status.in_steps()))
        return Response(body, headers=PAGE_HEADERS, media_type="application/json")

    @router.get(
        "/metrics",
        dependencies=[Depends(onlookers.scrapers)],
        response_class=PlainTextResponse,
        responses=_ERRORS,
    )
    async def exposition(request: Request) -> Response:
        """Give the metrics, for Prometheus."""
        pieces, content_type = metrics.pieces(request.headers.get("accept", ""))
        return StreamingResponse(in_steps(pieces), headers={"content-type": content_type})

    return router


def content_policy(html: str) -> str:
    """Allow a page its own style, script and icon, and requests to its own origin."""
    digests = {kind: hashlib.sha256(text.encode()).digest() for kind, text in _INLINE.findall(html)}
    sources = {
        kind: f"'sha256-{base64.b64encode(digest).decode()}'" for kind, digest in digests.items()
    }
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {sources['style']}",
            f"script-src {sources['script']}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
