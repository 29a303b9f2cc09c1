"""A router that knows nothing of pdrelay: the pull rules of vLLM's wire and no more.

One prefill and one decode engine; ``python plain_router.py PORT PREFILL_URL DECODE_URL``.
"""

import sys
import uuid

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

ONE_TOKEN = {"max_tokens": 1, "min_tokens": 1, "stream": False}
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def build(prefill, decode):
    """Return the application."""
    client = httpx.AsyncClient(timeout=120, trust_env=False)

    async def serve(request):
        body = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        first = {key: value for key, value in body.items() if key not in ("stream_options", "logprobs", "top_logprobs")}
        first |= {**ONE_TOKEN, "kv_transfer_params": REMOTE_DECODE}
        reply = await client.post(prefill + request.url.path, json=first, headers=headers)
        second = {**body, "kv_transfer_params": reply.json()["kv_transfer_params"]}
        answer = await client.post(decode + request.url.path, json=second, headers=headers)
        return Response(answer.content, answer.status_code, media_type=answer.headers["content-type"])

    async def health(_):
        return JSONResponse({})

    paths = [Route(path, serve, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")]
    return Starlette(routes=[*paths, Route("/health", health)])


if __name__ == "__main__":
    uvicorn.run(build(*sys.argv[2:]), port=int(sys.argv[1]), log_level="warning")
