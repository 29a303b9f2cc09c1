"""The chart's router in this process, with the arguments of its pod."""

import asyncio
from contextlib import asynccontextmanager

import httpx

from pdrelay_proxy.app import build
from pdrelay_proxy.cli import build_parser
from pdrelay_proxy.options import serve_settings
from support.helm_objects import container, router, templates
from support.sim import InMemory

KEY = {"X-Api-Key": "sesame"}  # its environment must have this ADMIN_API_KEY


@asynccontextmanager
async def serving_chart(objects, engines):
    """Yield a client of its admin port, when it is ready."""
    args = container(templates(router(objects))[0])["args"]
    built = build(serve_settings(build_parser(args).parse_args(args)), fabric=InMemory(engines).fabric)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(built.admin_app), base_url="http://router", headers=KEY)
    async with built.app.router.lifespan_context(built.app), client:
        async with asyncio.timeout(30):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.02)
        yield client
