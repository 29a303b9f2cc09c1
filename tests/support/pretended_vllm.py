"""``vllm serve`` as far as what starts engines can tell: it takes the real flags, and serves a simulated engine.

With VLLM_API_KEY it refuses requests without that key, as vLLM does, and it writes what it was given to $PRETENDED_LOG.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import uvicorn
from starlette.responses import JSONResponse

from pdrelay_tools.simulated.engine import Sim

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
OPEN = ("/health", "/metrics", "/version")
NAMED = ("VLLM_", "PDRELAY_", "CUDA_", "ROCR_")


def main(argv):
    given = dict(pairwise(argv))  # each flag with what stands behind it
    transfer = json.loads(given["--kv-transfer-config"])
    noted = {"argv": argv, "env": {k: v for k, v in os.environ.items() if k.startswith(NAMED)}, "pid": os.getpid()}
    if "PRETENDED_LOG" in os.environ:
        Path(os.environ["PRETENDED_LOG"], f"{given['--port']}.json").write_text(json.dumps(noted))
    token_s = float(os.environ.get("PRETENDED_TOKEN_S", "0"))
    sim = Sim(ROLES[transfer["kv_role"]], model=given["--served-model-name"], token_s=token_s)
    app = _guarded(sim, os.environ.get("VLLM_API_KEY"))
    uvicorn.run(app, host=given["--host"], port=int(given["--port"]), log_level="warning", timeout_keep_alive=5)


def _guarded(app, key):
    async def guarded(scope, receive, send):
        shown = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
        if scope["type"] == "http" and key and scope["path"] not in OPEN and shown != f"Bearer {key}":
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guarded


if __name__ == "__main__":
    main(sys.argv[1:])
