"""A relay as one writes it in an afternoon, with FastAPI and httpx: ``toy_proxy.py --prefill URL...
--decode URL...``.

It does what vLLM's demonstration proxy does: both bodies are parsed and written anew, engines take
turns, and what the decode engine sends is passed on as it comes. No retries, no health, no metrics,
no log of requests.
"""

import argparse
import contextlib
import itertools
import uuid

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

NOTHING_YET = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
ASK_FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, **NOTHING_YET}


def build(prefill, decode):
    """Return the application."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async with contextlib.AsyncExitStack() as stack:
            for role, urls in (("prefill", prefill), ("decode", decode)):
                clients = [await stack.enter_async_context(client(url)) for url in urls]
                setattr(app.state, role, itertools.cycle(clients))
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    @app.post("/v1/completions")
    async def completions(request: Request):
        return await relay(request, "/v1/completions")

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        return await relay(request, "/v1/chat/completions")

    return app


def client(url):
    """Return a client for one engine, without limits: many streams run at the same time."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)


async def relay(request, path):
    """Serve a request by two legs."""
    body = await request.json()
    state = request.app.state
    headers = {"X-Request-Id": str(uuid.uuid4())}
    if "authorization" in request.headers:
        headers["Authorization"] = request.headers["authorization"]
    first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK_FOR_PREFILL}
    first.pop("stream_options", None)
    answer = await next(state.prefill).post(path, json=first, headers=headers)
    answer.raise_for_status()
    second = {**body, "kv_transfer_params": answer.json()["kv_transfer_params"]}
    engine = next(state.decode)
    if not body.get("stream"):
        answer = await engine.post(path, json=second, headers=headers)
        return JSONResponse(answer.json(), answer.status_code)
    return StreamingResponse(
        passed_on(engine, path, second, headers), media_type="text/event-stream"
    )


async def passed_on(engine, path, body, headers):
    """Yield what the decode engine sends."""
    async with engine.stream("POST", path, json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for piece in answer.aiter_bytes():
            yield piece


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    # A wave of requests waits for its slowest answer: idle connections must outlive that.
    uvicorn.run(
        build(args.prefill, args.decode),
        port=args.port,
        access_log=False,
        backlog=4096,
        timeout_keep_alive=60,
    )


if __name__ == "__main__":
    main()
