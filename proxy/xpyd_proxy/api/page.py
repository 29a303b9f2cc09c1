"""What people and machines look at: the status page, the numbers behind it, and the metrics. Ids, never addresses."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from xpyd_proxy.core.workers.reports import Whole
from xpyd_proxy.io.metrics import Metrics
from xpyd_proxy.io.status import Status
from xpyd_proxy.io.workers.crew import nobody

_INLINE: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
_HEADERS: Final = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def anybody(_: Request) -> None:
    """Let everybody see it."""


def page_routes(
    status: Status,
    metrics: Metrics,
    everybody: Callable[[], Awaitable[Whole | None]] = nobody,
    *,
    onlookers: Callable[[Request], None] = anybody,
    browsers: Callable[[Request], None] = anybody,
) -> APIRouter:
    """Build the routes; the page is read once, here. ``everybody``: asks all workers, if there are several.

    ``onlookers`` and ``browsers`` raise Unauthorized for who may not see the metrics, and the page with its numbers.
    """
    router = APIRouter()
    html = Path(__file__).with_name("status.html").read_text(encoding="utf-8")
    headers = _HEADERS | {"content-security-policy": content_policy(html)}

    @router.get("/", dependencies=[Depends(browsers)])
    async def page() -> Response:
        return Response(html, headers=headers, media_type="text/html")

    @router.get("/status.json", dependencies=[Depends(browsers)])
    async def numbers() -> Response:
        body = msgspec.json.encode(status.now(await everybody()))
        return Response(body, headers=_HEADERS, media_type="application/json")

    @router.get("/metrics", dependencies=[Depends(onlookers)])
    async def exposition(request: Request) -> Response:
        body, content_type = metrics.exposition(request.headers.get("accept", ""), await everybody())
        return Response(body, headers={"content-type": content_type})

    return router


def content_policy(html: str) -> str:
    """Allow a page nothing but its own style, its own script, the icon in it, and requests to where it came from."""
    sources: Mapping[str, str] = {kind: _hash(text) for kind, text in _INLINE.findall(html)}
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


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
