"""An engine with caches of any kind in a process of its own: as in :mod:`support.cache_kinds`, but with real NIXL.

VLLM's scheduler and managers run, with our whole connector, its threads, its sockets and NIXL over TCP. The model is
played: what a kernel of a layer's kind reads for the next token is compared with what it must be, byte for byte, and an
engine that finds anything else says so and ends. :class:`KindsProcess` is the other end: it forks the engine, and
breaks what an engine may lose.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import time
import traceback
import warnings
from collections import Counter
from multiprocessing import connection
from pathlib import Path

from pdrelay_connector.core.ids import Address
from pdrelay_connector.io.connection import USER_TIMEOUT_MS
from support import cache_kinds, scheduled_engine
from support.engines import FINGERPRINT
from support.proc import wait_stopped

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    from pdrelay_connector.shell.cache_regions import KernelLayout
    from pdrelay_connector.shell.engine_config import WorkerRank
    from pdrelay_connector.shell.worker import PDRelayConnectorWorker

LEASE, TRANSFER, REGISTRATION, REVOKE = 4.0, 4.0, 10.0, 0.5  # s: faults that outlast one should not take long
TIMES = {
    "kv_lease_duration": LEASE,
    "transfer_timeout": TRANSFER,
    "registration_timeout": REGISTRATION,
    "revoke_after": REVOKE,
    "idle_wait": 0.002,
}
ENVIRONMENT = {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "fatal", "PDRELAY_CONNECTOR_SECRET": "of all engines here"}
TURN = 0.002  # s that an engine without work waits for orders
_fork = multiprocessing.get_context("fork")


class _Now:
    """What a played world says to its engines, here of the real one."""

    writes_at_once = False
    compares = False  # with what vLLM's own connector would move: support/cache_kinds.py does

    def __init__(self, address, name):
        self.addresses, self.counts, self.cached = {name: address}, Counter(), {}

    @property
    def now(self):
        """S, on a clock that all processes here share."""
        return time.monotonic()


class NixlKindsEngine(cache_kinds.KindsEngine):
    """The engine, within its process."""

    def __init__(self, name, address, shape):
        self.links = []
        super().__init__(_Now(address, name), name, address, shape)

    def _start_threads(self, engine_config, settings):
        described = self.make_layers(engine_config)
        self.ranks = [PDRelayConnectorWorker(described, settings, WorkerRank(rank)) for rank in range(self.shape.ranks)]
        for worker, caches in zip(self.ranks, self.caches, strict=True):
            worker.register_kv_caches(caches, FINGERPRINT, KernelLayout.ENTRIES)
        self.connector._scheduler.start(
            {rank: each.get_handshake_metadata() for rank, each in enumerate(self.ranks)}, FINGERPRINT
        )
        self.aggregator = KVOutputAggregator(len(self.ranks))

    @property
    def workers(self):
        return self.ranks

    def turn_of_threads(self, _):
        """They have a life of their own; an engine that has nothing to compute hears of it here."""
        self.connector._scheduler.handle_results()
        return []

    def before_computing(self):
        """The transfer thread does what it does."""

    def look(self):
        """Return what it has, and what it has done."""
        self.connector.get_kv_connector_stats()
        for worker in self.ranks:
            if (stats := worker.get_kv_connector_stats()) is not None:
                self.connector.seen.update(stats.data["counters"])
        return {
            "at rest": self.is_at_rest,
            "free": self.pool.get_num_free_blocks(),
            "quarantined": self.quarantined,
            "starves": bool(self.scheduler.requests and self.quarantined) and self._owns_nothing,
            "requests": {name: str(request.status) for name, request in self.scheduler.requests.items()},
            "gauges": self.connector.gauges,
            "counters": dict(self.connector.seen),
            "computed": self.world.counts["computed"],
        }

    @property
    def quarantined(self):
        """Blocks that a P which has ended may still write into: after a reset for 18 minutes (docs/connector.md)."""
        return self.decodes._quarantined.blocks

    @property
    def is_at_rest(self):
        """Whether nothing is held for anybody."""
        return self._owns_nothing and not self.scheduler.requests

    @property
    def _owns_nothing(self):
        return self.pool.get_num_free_blocks() + self.quarantined == self.shape.blocks - 1


def serve(pipe, name, port, shape):
    """Be an engine: take orders, and say what clients see, until the pipe is closed."""
    os.environ |= ENVIRONMENT
    torch.set_num_threads(1)
    scheduled_engine._configured()[0].kv_transfer_config.kv_connector_extra_config.update(TIMES)
    try:
        engine = NixlKindsEngine(name, Address("127.0.0.1", port), shape)
        pipe.send(("ready", engine.agent))
        while True:
            while pipe.poll(0 if engine.scheduler.has_requests() else TURN):
                _obey(engine, pipe, *pipe.recv())
            for output in engine.turn(time.monotonic()):
                pipe.send(("output", tuple(output)))
            if engine.loaded:
                pipe.send(("loaded", len(engine.loaded)))
                engine.loaded.clear()
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("wrong", traceback.format_exc()))
        os._exit(1)


def _obey(engine, pipe, order, *arguments):
    match order:
        case "ask":
            name, prompt, most, params = arguments
            engine.ask(name, prompt, most=most, params=params)
        case "abort":
            engine.abort(*arguments)
        case "cut":
            cut(*arguments)
        case "look":
            pipe.send(("look", engine.look()))


def cut(everything):
    """Break every connection of the side channel, or every TCP connection of this process, NIXL's too.

    As a firewall does it, with a reset to both ends: closed by us, it would look as if the other end had let go.
    """
    for file in list(Path("/proc/self/fd").iterdir()):
        # OSError: no socket, or none that is connected.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as sock:
            if sock.family == socket.AF_INET and (everything or _is_ours(sock)):
                here, there = (f"{host}:{port}" for host, port in (sock.getsockname(), sock.getpeername()))
                subprocess.run(["ss", "-K", "-t", "src", here, "dst", there], stdout=subprocess.DEVNULL, check=False)


def _is_ours(sock):
    """Whether a socket is of the side channel, by an option that UCX does not set."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == USER_TIMEOUT_MS


class KindsProcess:
    """Forks an engine, and talks to it."""

    def __init__(self, name, port, shape):
        self.name = name
        self.port = port
        self.shape = shape
        self.pipe, theirs = _fork.Pipe()
        self.process = _fork.Process(target=serve, args=(theirs, name, port, shape), daemon=True)
        self.process.start()
        theirs.close()
        self.is_frozen = False
        self.agent = self._expect("ready", 60)

    def _expect(self, what, seconds):
        assert self.pipe.poll(seconds), f"engine {self.name} does not say {what}"
        said, content = self.pipe.recv()
        assert said == what, content
        return content

    @property
    def pid(self):
        return self.process.pid

    def order(self, *order):
        """Tell the engine something; one that has died hears nothing."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(order)

    def freeze(self):
        os.kill(self.pid, signal.SIGSTOP)
        wait_stopped(self.pid)
        self.is_frozen = True

    def thaw(self):
        if self.is_frozen:
            os.kill(self.pid, signal.SIGCONT)
            self.is_frozen = False

    def kill(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()


def heard(processes, seconds):
    """Return (process, what it says, content) of what engines say within so long; "died" of those that did."""
    found = []
    for pipe in connection.wait([each.pipe for each in processes], seconds):
        process = next(each for each in processes if each.pipe is pipe)
        try:
            found.append((process, *pipe.recv()))
        except (EOFError, ConnectionResetError):
            process.process.join()
            found.append((process, "died", process.process.exitcode))
    return found
