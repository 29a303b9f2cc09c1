"""Imports a server and forks into one for every order that comes: ``python -P nursery_process.py SOCKET MODULE``.

What is born leads a session and has arguments, an environment, a log and temporary files of its own, as a program that
was just started. On CPUs its further processes are its forks, too: vLLM would spawn them, and each would import PyTorch
and vLLM anew. On GPUs vLLM forks them itself where it can. And gloo has one thread that looks at sockets in a process,
not one for each of an engine's 13 groups. Nothing else is different here.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path

# What a router imports while it starts: 1.4 CPU seconds.
OF_ROUTERS = (
    "pydantic.v1",  # FastAPI asks it about each class
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
    "pdrelay_proxy.app",
    "pdrelay_proxy.commands.serve",
    "pdrelay_proxy.server",
    "pdrelay_proxy.supervisor",
)
# What an engine on CPUs imports while it starts, and our connector: 1.5 CPU seconds of each.
OF_ENGINES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.serve.elastic_ep.api_router",
    "vllm.distributed.elastic_ep.elastic_execute",
    "model_hosting_container_standards.sagemaker",
    "uvicorn.protocols.http.httptools_impl",
    "pdrelay_connector.shell.connector",
)


def serve(place, program):
    """Bear engines until the tests are gone, or until SIGTERM came and all of them have ended; return to be one."""
    by_import = _import(program)
    terminated, woken, undo = _listen_to_signals()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(1)
        if listening not in select.select([listening, woken], [], [])[0]:
            return None  # SIGTERM, before anybody wanted anything
        tests, _ = listening.accept()
    received = b""
    living = set()
    while living or not terminated:
        readable, _, _ = select.select([tests, woken], [], [])
        if woken in readable:
            os.read(woken, 65536)
        _reap(living, tests)
        if tests in readable:
            data = tests.recv(1 << 20)
            if not data:
                _end(living)  # the tests were killed: nobody else would end what was born for them
                break
            received += data
        while b"\n" in received:
            line, _, received = received.partition(b"\n")
            pid = _fork()
            if pid == 0:
                undo()
                tests.close()
                return json.loads(line), by_import
            living.add(pid)
            _tell(tests, "born", pid, None, 0.0)
    return None


def _import(program):
    """Import it, and return what that did to the environment.

    What is there stays: an engine collects garbage five times while it starts, and looked at all of PyTorch each time.
    """
    before = dict(os.environ)
    for name in (program, *_further(program)):
        importlib.import_module(name)
    if "pdrelay_proxy.app" in sys.modules:
        _look_up_what_stays()
    gc.collect()
    gc.freeze()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "only what has one thread can be forked"
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _further(program):
    if program == "pdrelay_proxy.cli":
        return OF_ROUTERS
    return OF_ENGINES if program.startswith("vllm.") and fork_on_cpus() else ()


def _look_up_what_stays():
    """A router imports its features when it begins, and asks git of which commit it is: 0.06 CPU seconds of each."""
    from pdrelay_proxy.features import features
    from pdrelay_proxy.io.build import find_build

    features()
    find_build()


def _listen_to_signals():
    """Return a list that SIGTERM makes true, a pipe that wakes at it and at the end of a child, and what undoes it."""
    terminated = []
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    handlers = {signal.SIGCHLD: lambda *_: None, signal.SIGTERM: lambda *_: terminated.append(True)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def undo():
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(wakes)

    return terminated, woken, undo


def _reap(living, tests):
    for pid in list(living):
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            living.discard(pid)
            _tell(tests, "ended", pid, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)


def fork_on_cpus():
    """Have vLLM's processes fork, before anybody imports by name what says how; return whether it is a CPU's."""
    from vllm.platforms import current_platform
    from vllm.utils import system_utils

    if current_platform.is_cpu():
        system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
        look_here()
        share_gloo_device()
    return current_platform.is_cpu()


def look_here():
    """Have vLLM look at classes of models here. For each kind that no cache on disk knows, it starts a process.

    That leaves CUDA alone, and imports PyTorch and vLLM: 12 CPU seconds.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def share_gloo_device():
    """Have all groups of a process use one device of gloo: each device has a thread that wakes 100 times a second.

    Twenty engines that wait for their tests took half a core with that.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    begin = ProcessGroupGloo.__init__
    devices = {}

    def begin_with_shared(self, store, rank, size, timeout):
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        if os.getpid() not in devices:
            devices[os.getpid()] = ProcessGroupGloo.create_default_device()
        options._devices = [devices[os.getpid()]]
        begin(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = begin_with_shared


def _end(living):
    """Kill what is left, each with all that it has started: they lead sessions."""
    for pid in living:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _fork():
    """Return 0 in the child, which leads a session; its parent goes on once it does."""
    sys.stdout.flush()
    sys.stderr.flush()
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(there)
        os.setsid()
        os.close(here)
        return 0
    os.close(here)
    os.read(there, 1)  # its end
    os.close(there)
    return pid


def _tell(tests, *what):
    with contextlib.suppress(OSError):  # they are gone
        tests.sendall(json.dumps(what).encode() + b"\n")


def become(program, order, by_import):
    """Be the program, with its own arguments, environment, log and temporary files."""
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    if order["namespace"] is not None:
        enter(order["namespace"])
    if order["descriptors"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, order["descriptors"])
    os.environ.clear()
    os.environ.update(order["environment"] | by_import)
    sys.path[:0] = filter(None, order["environment"].get("PYTHONPATH", "").split(os.pathsep))
    tempfile.tempdir = None  # it remembers ours
    sys.argv = [program, *order["arguments"]]
    sys.modules.pop(program, None)  # it is run once more, as a program
    runpy.run_module(program, run_name="__main__", alter_sys=True)


CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000  # linux/sched.h
MNT_DETACH, MS_REC, MS_SLAVE = 2, 1 << 14, 1 << 19  # sys/mount.h


def enter(namespace):
    """Be on a host of a lab, as ``ip netns exec`` does it: in its network, with that network's devices in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as network:
        for call, *arguments in (
            (libc.setns, network.fileno(), CLONE_NEWNET),
            (libc.unshare, CLONE_NEWNS),
            (libc.mount, b"", b"/", b"none", MS_SLAVE | MS_REC, None),  # what follows is seen here alone
            (libc.umount2, b"/sys", MNT_DETACH),
            (libc.mount, namespace.encode(), b"/sys", b"sysfs", 0, None),
        ):
            if call(*arguments):
                raise OSError(ctypes.get_errno(), f"{call.__name__}{(*arguments,)} for the host {namespace} of a lab")


if __name__ == "__main__":
    _place, _program = sys.argv[1:]
    if (_found := serve(_place, _program)) is not None:
        become(_program, *_found)
