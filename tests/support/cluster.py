"""Real engines and the real router for end-to-end tests: how they are started, asked and looked into."""

import dataclasses
import fcntl
import functools
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

from pdrelay_tools.local.processes import Command
from pdrelay_tools.local.recipe import Connector, EngineSpec, Role, engine
from pdrelay_tools.proving.core.holdings import read_holdings
from support import nursery, router_kind

ROOT = Path(__file__).parents[2]
MODEL_NAME = "tiny"
SERVER = "vllm.entrypoints.openai.api_server"
# float32: a decode engine computes the last prompt token alone, a single engine computes it among others. In bfloat16
# those two roundings differ now and then by 0.02 in a logprob; in float32 they are equal to the last bit.
EXACT = ("--dtype", "float32")

# On one host UCX reads another process's memory by itself, even if that process is stopped. Over TCP, as between hosts,
# both ends take part: a stopped engine leaves a read hanging.
OVER_TCP = {"UCX_TLS": "tcp"}
SECRET = "what all engines of the tests share"
FOR_TESTS = {"VLLM_SERVER_DEV_MODE": "1"}  # GET /is_paused, for `settled_metrics`
SOON = 20  # s in which engines at rest show that they hold nothing; a lease that nobody ends lasts 30


# Below the ports that Linux gives to outgoing connections: an engine binds its port seconds after it is chosen.
PORTS, LANE = range(10_000, 32_000), 1_000  # a lane is one process's
ROOM = 4  # engines of one role, and data parallel ranks, take the ports that follow the first one's


def free_ports(count):
    """Return ports that nobody listens on now, and that nobody gets by chance: not even the next caller.

    The `ROOM` - 1 ports behind each are as free.
    """
    found = []
    while len(found) < count:
        first = next(_own_ports())
        if first not in found and all(map(_is_free, range(first, first + ROOM))):
            found.append(first)
    return found


def _is_free(port):
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@functools.cache
def _own_ports():
    """Return the ports of this process, in an order of its own: its lock keeps those of others from choosing them."""
    for first in PORTS[::LANE]:
        lane = os.open(f"{tempfile.gettempdir()}/pdrelay-ports-{os.getuid()}-{first}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lane, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
        except BlockingIOError:
            os.close(lane)
        else:
            return itertools.cycle(random.sample(range(first, first + LANE, ROOM), LANE // ROOM))
    return itertools.cycle(random.sample(PORTS[::ROOM], len(PORTS) // ROOM))


def engine_spec(name, model, **options):
    """Return an engine on free ports."""
    port, side_port = free_ports(2)
    spec = EngineSpec(
        name, port, model, served_name=MODEL_NAME, side_channel_port=side_port, cache_dir=ROOT / ".pdrelay/cache"
    )
    options["extra_env"] = {"PDRELAY_CONNECTOR_SECRET": SECRET, **FOR_TESTS, **options.get("extra_env", {})}
    options["extra_args"] = (*EXACT, "--enable-scale-out", *options.get("extra_args", ()))
    return dataclasses.replace(spec, **options)


def start_engine(fleet, spec):
    """Start an engine; wait for it with ``fleet.wait_ready``."""
    return nursery.start(fleet, engine(spec, os.environ), program=SERVER, prefix=spec.prefix)


@contextmanager
def faulty_decode(fleet, model, name, connector, **env):
    """Yield a decode engine whose connector has a fault (support/corrupting.py)."""
    config = {
        "kv_connector": connector,
        "kv_connector_module_path": "support.corrupting",
        "kv_role": "kv_consumer",
    }
    spec = engine_spec(
        name,
        model,
        role=Role.DECODE,
        connector=Connector.PDRELAY,
        extra_args=("--kv-transfer-config", json.dumps(config)),
        extra_env={"PYTHONPATH": str(ROOT / "tests"), **env},
    )
    child = start_engine(fleet, spec)
    fleet.wait_ready([child], timeout_s=180)
    yield spec
    fleet.stop(child)


def router_command(name, prefill, decode, *, port=None, env=None, args=()):
    """Return how to start our router in front of engine specs; ``support.router_kind`` says which one."""
    port = port or free_ports(1)[0]
    argv = [sys.executable, "-m", "pdrelay_proxy.cli", "serve", "--port", str(port), "--log-level", "info"]
    argv += ["--prefill", *(spec.address for spec in prefill), "--decode", *(spec.address for spec in decode), *args]
    environment = {**os.environ, **router_kind.environment(), **(env or {})}
    return Command(name, argv, environment, f"http://127.0.0.1:{port}/health")


def base_url(command):
    """Return where a router serves."""
    return command.health_url.removesuffix("/health")


def metrics(spec):
    """Return an engine's metrics: name or ``name|source`` -> value."""
    return values(_exposition(spec))


def _exposition(spec):
    return _http().get(f"{spec.base_url}/metrics", timeout=10).text


def values(exposition):
    """Read an exposition: name or ``name|source`` -> value."""
    found = {}
    for line in exposition.splitlines():
        if line.startswith("vllm:"):
            name, _, labels = line.partition("{")
            source = labels.split('source="')[1].split('"')[0] if 'source="' in labels else ""
            found[f"{name}|{source}" if source else name] = float(line.rsplit(" ", 1)[1])
    return found


@functools.cache
def _http():
    """One client for all: a new one takes 30 ms of CPU, and tests look ten times a second. No connection is kept."""
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))


def settled_metrics(spec, *, seconds=30):
    """Wait until an engine is at rest and has published all that it has counted; return its metrics.

    An answer may be with its client before either. VLLM publishes numbers with a step, and a prefill engine counts when
    the decode engine has what it needs. The step in which a lease ends publishes all that was counted of it.
    """
    seen = {}

    def is_settled():
        # The engine's core answers this, and that comes to the API server behind all numbers that the core has sent
        # before: without it, a busy API server may show those of a while ago, when the engine was at rest, too.
        _http().get(f"{spec.base_url}/is_paused", timeout=seconds).raise_for_status()
        exposition = _exposition(spec)
        seen.update(values(exposition))
        return _is_idle(exposition)

    wait_until(is_settled, seconds=seconds, what=f"{spec.name} is at rest")
    return seen


class Watch:
    """How an engine's counters move during a block: ``watch.delta(name)`` once the block is left.

    The engine is at rest at both ends of the block, and all that it has counted is known; ``begins_busy``: at its end.
    """

    def __init__(self, spec, *, begins_busy=False):
        self.spec, self._begins_busy = spec, begins_busy

    def __enter__(self):
        self.before = metrics(self.spec) if self._begins_busy else settled_metrics(self.spec)
        return self

    def __exit__(self, kind=None, *exc):
        if kind is None:
            self.after = settled_metrics(self.spec)

    def delta(self, name):
        return self.after[name] - self.before.get(name, 0.0)


def wait_until(condition, *, seconds, what):
    """Wait for a condition of a running system; fail with a sentence."""
    end = time.monotonic() + seconds
    is_late = False
    while not condition():
        assert not is_late, f"{what}: not within {seconds} s"
        time.sleep(0.1)
        is_late = time.monotonic() >= end  # what is so now is in time: this process may have been kept from looking


def nothing_held(spec):
    """Whether an engine holds no KV block and no request, as ``pdrelay prove`` sees it."""
    return _is_idle(_exposition(spec))


def _is_idle(exposition):
    found = read_holdings(exposition)
    return found is not None and not found.beyond(None)


def run_example(script, *args, env=None, timeout=300):
    """Run an example and return what it printed; it must succeed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *map(str, args)],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def port_flags(*flags):
    """Return each flag followed by a free port."""
    return [item for flag, port in zip(flags, free_ports(len(flags)), strict=True) for item in (flag, port)]
