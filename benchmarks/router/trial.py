"""One run: engines, a router in front of them on a core of its own, and a load; started and ended
here.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import NamedTuple

from benchmarks.router import words
from benchmarks.router.contestants import ROOT, environment
from support import proc
from support.cluster import free_ports

# Long prompts without a system call and fresh pages for each; for what measures, not for what is
# measured.
FRUGAL = {"MALLOC_MMAP_THRESHOLD_": "67108864", "MALLOC_TRIM_THRESHOLD_": "268435456"}
LOGS = ROOT / ".pdrelay/bench/router"
_START_S = 60.0  # seconds a router may take to start
_END_S = 10.0  # seconds it may take to end


class Failed(Exception):
    """A run that says nothing about a router; the message says why."""


class Cores(NamedTuple):
    """Those of the router, and those of engines and load."""

    router: set
    rest: set


def apart():
    """Return a core for the router and another one for the rest; the same one, if there is only
    one.
    """
    allowed = sorted(os.sched_getaffinity(0))
    return Cores({allowed[0]}, {allowed[-1]})


def _pinned(cores):
    """Return what a child does before it runs."""
    return lambda: os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def engines(cores, options):
    """Run null engines; yield their process and {role: ports}."""
    argv = [sys.executable, "-m", "benchmarks.router.engines", json.dumps(options)]
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment() | FRUGAL,
        start_new_session=True,
        preexec_fn=_pinned(cores.rest),
    ) as child:
        try:
            yield child, json.loads(child.stdout.readline())
        finally:
            child.kill()


@contextlib.contextmanager
def router(cores, contestant, ports, scenario):
    """Run a router; yield its process, its port and the seconds until it accepted a connection."""
    found = free_ports(2)
    argv = [str(part) for part in contestant.command(ports["prefill"], ports["decode"], found)]
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{contestant.name}-{scenario}.log"
    start = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment(),
            start_new_session=True,
            preexec_fn=_pinned(cores.router),
            cwd=LOGS,
        )
    try:
        wait_for(child, found[0], contestant.name, log)
        yield child, found[0], time.monotonic() - start
    finally:
        stop(child)


def wait_for(child, port, name, log):
    """Wait until a router accepts a connection."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise Failed(f"{name} ended with {child.returncode} while it started: see {log}")
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1.0),
        ):
            return
        time.sleep(0.005)
    raise Failed(f"{name} did not accept a connection within {_START_S:g} s: see {log}")


def stop(child):
    """End a router as its operator does; kill what is left."""
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def get(port, path):
    """Return the JSON that an engine answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())


def serves(port, name):
    """Wait until a router serves a request."""
    ask = words.request(0, host=b"bench", size=64, tokens=2, chat=False, stream=False)
    body = b"".join(ask).partition(b"\r\n\r\n")[2]
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
            with contextlib.closing(connection):
                connection.request(
                    "POST", "/v1/completions", body, {"Content-Type": "application/json"}
                )
                answer = connection.getresponse()
                said = answer.read()
                if answer.status == 200:
                    return
        if time.monotonic() > deadline:
            raise Failed(f"{name} did not serve a request within {_START_S:g} s: {said[:300]!r}")
        time.sleep(0.05)


def carry_out(cores, contestant, ports, plan):
    """Run the load generator; return what it and the engines have seen."""
    before = get(ports["decode"][0], "/bench/counts")
    found = _load(cores, plan)
    found["legs"] = legs(ports["decode"][0], before)
    check(found, contestant)
    return found


def _load(cores, plan):
    argv = [sys.executable, "-m", "benchmarks.router.load", json.dumps(plan)]
    done = subprocess.run(
        argv,
        stdout=subprocess.PIPE,
        env=environment() | FRUGAL,
        preexec_fn=_pinned(cores.rest),
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout)


def run(cores, contestant, name, plan, options):
    """Measure a router (None: no router, the load goes to a decode engine) and return what was
    seen.
    """
    with engines(cores, options) as (process, ports), contextlib.ExitStack() as stack:
        if contestant is None:
            plan = plan | {"port": ports["decode"][0]}
        else:
            child, port, _ = stack.enter_context(router(cores, contestant, ports, name))
            serves(port, contestant.name)
            plan = plan | {"port": port, "router": child.pid}
        return carry_out(cores, contestant, ports, plan | {"engines": process.pid})


def legs(port, before):
    """Return what the engines have seen since; answers that were left may take a moment to be
    closed.
    """
    deadline = time.monotonic() + 5.0
    while (now := get(port, "/bench/counts"))["open"] and time.monotonic() < deadline:
        time.sleep(0.02)
    return {
        key: value if key in ("open", "said") else value - before[key] for key, value in now.items()
    }


def check(found, contestant):
    """Add to the faults what the engines know: every request must have had both legs, and none may
    be left open.
    """
    seen = found["legs"]
    faults = found["faults"]
    said = found["said"]
    if contestant is not None and seen["prefill"] + seen["decode"] == 0:
        raise Failed(f"{contestant.name} did not send two legs: {seen}")
    if contestant is not None and (
        seen["alone"] or not seen["prefill"] == seen["decode"] == found["asked"]
    ):
        faults["legs"] = max(1, seen["alone"])
        said.append(f"legs: {seen}")
    if seen["wrong"]:
        faults["bodies"] = seen["wrong"]
        said.append(seen["said"])
    if seen["open"]:
        faults["left open at the engines"] = seen["open"]


def idle(cores, contestant, seconds):
    """Return what a router costs that has nothing to do.

    It has been started before: nothing is compiled any more.
    """
    with engines(cores, {}) as (_, ports), router(cores, contestant, ports, "idle"):
        pass
    with (
        engines(cores, {}) as (_, ports),
        router(cores, contestant, ports, "idle") as (child, port, start),
    ):
        start_cpu = proc.cpu_seconds(child.pid)
        serves(port, contestant.name)
        time.sleep(1.0)
        before = proc.cpu_seconds(child.pid)
        begin = time.monotonic()
        time.sleep(seconds)
        cores_used = (proc.cpu_seconds(child.pid) - before) / (time.monotonic() - begin)
        who = SimpleNamespace(pid=child.pid)
        return {
            "start": start,
            "start_cpu": start_cpu,
            "cores": cores_used,
            "rss": proc.memory(who),
            "sockets": proc.sockets(who),
        }
