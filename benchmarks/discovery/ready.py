"""``GET /ready`` over HTTP, beside requests, while a real router process probes thousands of null
engines.

Some of them are lost: they accept connections and answer nothing. The engines, the clients and this
page's clock share one core, the router has the other. ``make sim-fleet`` runs it; alone: ``python
-m benchmarks.discovery.ready``.
"""

import contextlib
import http.client
import json
import os
import re
import socket
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.router import words
from benchmarks.router.trial import apart, engines
from support.router_process import KEY, RouterProcess

_CLIENTS = 8  # threads that send requests, each over one connection
_LOOK_S = 0.02  # between two looks
_START_S = 60.0  # for nearly all engines to have been probed, at most
_FOUND_S = 12.0  # until those that answer nothing have missed a probe, and get no requests


def measure(count, *, lost, requests_s, lasts_s):
    """Return the milliseconds that answers to /ready took, by port: without lost engines, and with
    them.
    """
    cores = apart()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdrelay-ready-")))
        _, ports = stack.enter_context(
            engines(cores, {"prefill": (count - lost) // 2, "decode": (count - lost) // 2})
        )
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(lost)]
        mute = [listener.getsockname()[1] for listener in silent]
        before = _beside(folder, stack, cores, ports, (requests_s, lasts_s))
        ports = {
            "prefill": [*ports["prefill"], *mute[: lost // 2]],
            "decode": [*ports["decode"], *mute[lost // 2 :]],
        }
        after = _beside(folder, stack, cores, ports, (requests_s, lasts_s))
    return {
        "engines": count,
        "lost": lost,
        "requests_s": requests_s,
        "whole": before,
        "with_lost": after,
    }


def _beside(folder, stack, cores, ports, plan):
    """Run one router, and look at it while clients send requests."""
    config = folder / "pdrelay.toml"
    listed = {
        role: json.dumps([f"127.0.0.1:{port}" for port in found]) for role, found in ports.items()
    }
    config.write_text(
        f"prefill = {listed['prefill']}\ndecode = {listed['decode']}\nlog_level = 'warning'\n"
    )
    log = folder / f"router-{time.monotonic_ns()}.log"
    router = _Router(log, "--config", str(config), "--log-level", "info", "--admin-port", "0")
    with contextlib.closing(router):
        router.started()
        os.sched_setaffinity(router.child.pid, cores.router)
        _wait_for_probes(router, sum(map(len, ports.values())))
        time.sleep(_FOUND_S)
        return _looks(router, *plan)


class _Router(RouterProcess):
    def close(self):
        self.kill()

    def started(self):
        super().started()
        deadline = time.monotonic() + _START_S
        while "the admin port is" not in self.said and time.monotonic() < deadline:
            time.sleep(0.05)
        return self

    @property
    def port_of(self):
        admin = re.findall(r"the admin port is http://127.0.0.1:(\d+)", self.said)[0]
        return {"main": int(self.url.rpartition(":")[2]), "admin": int(admin)}


def _wait_for_probes(router, count):
    """Wait until all that answer have been probed once: the start is another measurement."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", router.port_of["admin"], timeout=60)
        ) as one:
            one.request("GET", "/instances", headers=KEY)
            rows = json.loads(one.getresponse().read())["instances"]
        healthy = sum(row["state"] == "healthy" for row in rows)
        if healthy >= count * 0.89:
            return
        time.sleep(0.5)


def _looks(router, requests_s, lasts_s):
    ends = time.monotonic() + lasts_s
    served = [0]
    failed = [0]
    lock = threading.Lock()

    def ask(client, turn):
        body = b"".join(
            words.request(turn, host=b"bench", size=512, tokens=8, chat=False, stream=True)
        )
        headers = {"Content-Type": "application/json"}
        client.request("POST", "/v1/completions", body.partition(b"\r\n\r\n")[2], headers)
        answer = client.getresponse()
        answer.read()
        return answer.status == 200

    def send(number):
        client = http.client.HTTPConnection("127.0.0.1", router.port_of["main"], timeout=30)
        for turn in range(number * 1_000_000, (number + 1) * 1_000_000):
            began = time.monotonic()
            is_good = False
            with contextlib.suppress(OSError, http.client.HTTPException):
                is_good = ask(client, turn)
            if not is_good:
                client.close()  # it is opened again with the next request
            with lock:
                served[0] += is_good
                failed[0] += not is_good
            if time.monotonic() >= ends:
                break
            time.sleep(max(0.0, began + _CLIENTS / requests_s - time.monotonic()))
        client.close()

    def look(port, seen):
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        ) as client:
            while time.monotonic() < ends:
                began = time.perf_counter()
                client.request("GET", "/ready")
                answer = client.getresponse()
                answer.read()
                seen.append((time.perf_counter() - began) * 1000)
                assert answer.status == 200, answer.status
                time.sleep(_LOOK_S)

    seen = {name: [] for name in router.port_of}
    threads = [threading.Thread(target=send, args=(number,)) for number in range(_CLIENTS)]
    threads += [
        threading.Thread(target=look, args=(router.port_of[name], found))
        for name, found in seen.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {name: _spread(values) for name, values in seen.items()}
    return found | {"served_s": served[0] / lasts_s, "failed": failed[0]}


def _spread(values):
    ordered = sorted(values)
    at = {"p50": 50, "p99": 99}
    return {name: ordered[len(ordered) * share // 100] for name, share in at.items()} | {
        "most": ordered[-1],
        "looks": len(ordered),
    }


if __name__ == "__main__":
    print(json.dumps(measure(2000, lost=200, requests_s=50, lasts_s=20.0), indent=1))
