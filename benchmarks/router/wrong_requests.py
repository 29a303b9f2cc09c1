"""Every tenth request is a wrong one: what the other nine notice of it, and what the engines are
blamed for.

    python -m benchmarks.router.wrong_requests --seconds 60

One prefill and three decode engines (simulated) are behind one router, each in a process of its
own, as are the clients that send what is wrong. First all requests are good, then every tenth is of
a kind of :data:`WRONG`, in turn. The result is JSON on standard output, and the exit status is 1 if
a good request failed, or took longer than one and a half times the median of the first ones, an
engine left the rotation, or the router took more memory than it may.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import httpx
import psutil
import uvicorn
from starlette.responses import JSONResponse

from benchmarks import page
from pdrelay_tools.simulated.engine import Sim
from support.router_process import KEY, RouterProcess
from support.sim import until

MODEL = "sim"
BODY_MOST = 16 << 20
INFLIGHT_MOST = 64 << 20
LEAVES_AFTER_S = 0.05
TOKEN_S = 0.005
MISSING_PATHS = frozenset({"/v1/embeddings", "/v1/score", "/v1/audio/transcriptions"})
JSON_TYPE = {"Content-Type": "application/json"}


def _completion(**fields):
    return json.dumps(
        {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "stream": True, **fields}
    )


# kind: (path, body, headers, whether the client leaves early)
WRONG = {
    "wrong endpoint": (
        "/v1/embeddings",
        json.dumps({"model": MODEL, "input": "x"}),
        JSON_TYPE,
        False,
    ),
    "wrong model": ("/v1/completions", _completion(model="none"), JSON_TYPE, False),
    "oversized": ("/v1/completions", _completion(user="x" * (BODY_MOST + 1)), JSON_TYPE, False),
    "malformed": ("/v1/chat/completions", '{"messages": [', JSON_TYPE, False),
    "left early": ("/v1/completions", _completion(max_tokens=500), JSON_TYPE, True),
    "large array": (
        "/v1/completions",
        _completion(prompt=["x"] * 512, stream=False),  # of two legs each
        JSON_TYPE,
        False,
    ),
    "form": (
        "/v1/audio/transcriptions",
        '--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nnone\r\n--b--\r\n',
        {"Content-Type": "multipart/form-data; boundary=b"},
        False,
    ),
    "wrong endpoint again": (
        "/v1/score",
        json.dumps({"model": MODEL, "text_1": "a", "text_2": "b"}),
        JSON_TYPE,
        False,
    ),
}


class Load:
    """Requests at an even pace, and what came of them."""

    def __init__(self, client, others, per_second):
        self._client = client
        self._others = others  # processes: to write a large body must not hold up those who measure
        self._per_second = per_second
        self.seconds = []  # of each good request
        self.failed = Counter()  # of good requests, by what came
        self.answers = {kind: Counter() for kind in WRONG}

    async def run(self, seconds, *, wrong):
        """Send requests for so long; ``wrong``: every tenth is a wrong one."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        kinds = list(WRONG)
        async with asyncio.TaskGroup() as group:
            for number in range(round(seconds * self._per_second)):
                await asyncio.sleep(begun + number / self._per_second - loop.time())
                if wrong and number % 10 == 9:
                    group.create_task(self._send_wrong(kinds[number // 10 % len(kinds)]))
                else:
                    group.create_task(self._send_good())

    async def _send_good(self):
        begun = time.monotonic()
        try:
            answer = await self._client.post(
                "/v1/completions", content=_completion(), headers=JSON_TYPE
            )
        except httpx.HTTPError as error:
            self.failed[type(error).__name__] += 1
            return
        if (
            answer.status_code != 200
            or not answer.text.endswith("data: [DONE]\n\n")
            or '"error"' in answer.text
        ):
            self.failed[answer.status_code] += 1
            return
        self.seconds.append(time.monotonic() - begun)

    async def _send_wrong(self, kind):
        url = str(self._client.base_url).rstrip("/")
        self.answers[kind][
            await asyncio.get_running_loop().run_in_executor(self._others, send_wrong, url, kind)
        ] += 1


@cache
def client_of_process():
    """Return the client of this process: to make one for each request takes the CPU from those who
    are measured.
    """
    return httpx.Client(timeout=60)


def send_wrong(url, kind):
    """Send a wrong request, and return what came of it."""
    path, body, headers, leaves = WRONG[kind]
    try:
        with client_of_process().stream(
            "POST", url + path, content=body, headers=headers
        ) as answer:
            if leaves:
                time.sleep(LEAVES_AFTER_S)
                return "left"
            answer.read()
            return str(answer.status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


async def watch_memory(process, peak):
    """Note the most resident bytes of a process until cancelled."""
    while True:
        peak.append(max(peak.pop(), process.memory_info().rss))
        await asyncio.sleep(0.05)


async def measure(router, others, seconds, per_second):
    """Return what was seen of good requests alone, and beside wrong ones."""
    process = psutil.Process(router.child.pid)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=router.url, timeout=60, limits=limits) as client:
        await Load(client, others, per_second).run(2, wrong=False)
        alone = Load(client, others, per_second)
        await alone.run(seconds / 3, wrong=False)
        before = process.memory_info().rss
        peak = [before]
        watcher = asyncio.create_task(watch_memory(process, peak))
        beside = Load(client, others, per_second)
        await beside.run(seconds, wrong=True)
        watcher.cancel()
        engines = (await client.get("/instances", headers=KEY)).json()["instances"]
    return {
        "good": len(beside.seconds) + beside.failed.total(),
        "good that failed": dict(beside.failed),
        "good alone that failed": dict(alone.failed),
        "median s alone": round(statistics.median(alone.seconds), 4),
        "median s beside wrong ones": round(statistics.median(beside.seconds), 4),
        "slowest s alone": round(max(alone.seconds), 4),
        "slowest s beside wrong ones": round(max(beside.seconds), 4),
        "MiB before": before >> 20,
        "MiB at most": peak[0] >> 20,
        "engines": {engine["id"]: engine["state"] for engine in engines},
        "wrong": {kind: dict(found) for kind, found in beside.answers.items()},
    }


def serve(role, port):
    """Be a simulated engine of a chat model: other kinds of work have no path there, as in vLLM."""
    sim = Sim(role, model=MODEL, token_s=TOKEN_S)

    async def chat_model(scope, receive, send):
        if scope["type"] == "http" and scope["path"] in MISSING_PATHS:
            await JSONResponse({"detail": "Not Found"}, 404)(scope, receive, send)
        else:
            await sim(scope, receive, send)

    gc.freeze()  # else a collection goes over all that is imported, and everybody waits for 0.1 s
    uvicorn.run(chat_model, host="127.0.0.1", port=port, log_level="warning")


@contextmanager
def engine(role):
    """Run a simulated engine in a process of its own; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(role, port))
    child.start()
    try:
        until(lambda: _answers(port), seconds=60)
        yield f"127.0.0.1:{port}"
    finally:
        child.terminate()
        child.join()


def _answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def main():
    """Run it, print what was seen, and judge it."""
    parser = argparse.ArgumentParser(description="Good requests beside wrong ones.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--per-second", type=float, default=20)
    asked = parser.parse_args()
    page.end_as_by_ctrl_c()
    gc.freeze()  # as in the engines
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args = []
        for role in ("prefill", "decode", "decode", "decode"):
            args += [f"--{role}", stack.enter_context(engine(role))]
        router = RouterProcess(folder / "router.log", *args)
        stack.callback(router.kill)
        others = stack.enter_context(ProcessPoolExecutor(len(WRONG)))
        list(others.map(time.sleep, [0.1] * len(WRONG)))  # they start
        seen = asyncio.run(measure(router.started(), others, asked.seconds, asked.per_second))
        log = router.said
    print(json.dumps(seen, indent=2))
    wrong = [
        what
        for what, is_so in {
            "good requests failed": seen["good that failed"],
            "one took 1.5 medians": seen["slowest s beside wrong ones"]
            > 1.5 * seen["median s alone"],
            "an engine left the rotation": set(seen["engines"].values()) != {"healthy"}
            or "ejected" in log,
            "more memory than max_inflight_bytes": (seen["MiB at most"] - seen["MiB before"]) << 20
            > INFLIGHT_MOST,
        }.items()
        if is_so
    ]
    print(*wrong or ["as promised"], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
