"""Engines and routers that have imported everything when they are born: forks of ``support.nursery_process``.

Importing takes an engine 12 CPU seconds, and a router 1.4. There is one such process for each environment that an
import may see. That of engines ends with the fleet whose engines it bears, on this host or in a lab; that of routers
with the tests. ``pdrelay up`` and the examples start engines as vLLM does.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from pdrelay_tools.local import guard
from pdrelay_tools.local.processes import Child, Command
from support import nursery_process

IMPORT_S, POLL_S = 120, 0.02
# What a module may read when it is imported; of those, what is an engine's own is read when it starts. What vLLM sets
# when it is imported (TORCHINDUCTOR_..., LD_LIBRARY_PATH) it sets there as well as in a test that imports it.
SEEN_BY_IMPORTS = ("VLLM_", "TORCH_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "HF_", "XDG_", "PYTHON")
OWN = (
    "VLLM_NIXL_SIDE_CHANNEL_", "VLLM_PLUGINS", "PYTHONPATH",
    "VLLM_API_KEY", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_V1_MULTIPROCESSING",
)  # fmt: skip
IN_NAMESPACE = ("ip", "netns", "exec")  # what starts a program on a host of a lab; a fork goes there by itself
BORN = "support.nursery.born"  # event for audit hooks
_spent = []  # CPU seconds of each that has ended
_nurseries = weakref.WeakKeyDictionary()  # fleet -> (program, environment) -> nursery


def start(fleet, command, *, program, prefix=()):
    """Start an engine: what ``fleet.start`` does, but for the fork; ``program`` is a module with a server in it.

    The command line is the prefix (what starts it on a host of a lab), Python, -P, -m, the module, arguments.
    """
    assert not prefix or tuple(prefix[:-1]) == IN_NAMESPACE, f"a fork cannot be started by {prefix}"
    at = command.argv.index(program)
    nursery = _nursery(fleet, command, program)
    log, temp = fleet._log_dir / f"{command.name}.log", fleet._temp / str(next(fleet._numbers))
    temp.mkdir()
    with log.open("ab" if log in fleet._logs else "wb"):  # a name that is started again continues its log
        pass
    fleet._logs.add(log)
    environment = {**command.environment, "TMPDIR": str(temp)}
    process = nursery.bear(command.argv[at + 1 :], environment, log, namespace=prefix[-1] if prefix else None)
    fleet._tell_guard(f"+{process.pid}")
    child = Child(command, process, log, temp)
    fleet.children.append(child)
    return child


def _nursery(fleet, command, program):
    environment = {name: value for name, value in command.environment.items() if not name.startswith(OWN)}
    seen = frozenset((name, value) for name, value in environment.items() if name.startswith(SEEN_BY_IMPORTS))
    found = _nurseries.setdefault(fleet, {})
    key = (program, seen)
    if key not in found or not found[key].child.alive:
        found[key] = of_fleet(fleet, program, environment, f"nursery-{len(found)}")
    return found[key]


def of_fleet(fleet, program, environment, name):
    """Start one that ends with a fleet."""
    place = str(fleet._temp / f"n{next(fleet._numbers)}")
    return Nursery(fleet.start(_command(name, place, program, environment)), place)


def _command(name, place, program, environment):
    if "PYTHONPATH" in os.environ:  # the sources that are tested, where these are not the installed ones
        environment = {**environment, "PYTHONPATH": os.environ["PYTHONPATH"]}
    argv = [sys.executable, "-P", nursery_process.__file__, place, program]
    return Command(name, argv, environment, "")


def cpu_seconds():
    """Return what all have used that have ended."""
    return sum(_spent)


def start_router(arguments, environment, log, *, descriptors=None):
    """Fork a router; ``descriptors``: its limits, the soft one and the hard one."""
    log.write_text("")
    return _routers().bear(arguments, environment, log, descriptors=descriptors)


@functools.cache
def _routers():
    folder = tempfile.TemporaryDirectory(prefix="nursery-")
    log = Path(folder.name, "log")
    place = str(Path(folder.name, "s"))
    command = _command("nursery", place, "pdrelay_proxy.cli", dict(os.environ))
    with log.open("wb") as file:
        process = subprocess.Popen(command.argv, env=command.environment, stdout=file, stderr=file)
    found = Nursery(Child(command, process, log, Path(folder.name)), place)

    @atexit.register
    def end():
        process.terminate()
        found.close()
        process.wait()
        folder.cleanup()

    return found


class Nursery:
    """The process, as the tests see it."""

    def __init__(self, child, place):
        self.child = child
        self._place = place
        self._codes = {}  # pid -> exit code
        self._gone = False
        self._received = b""
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        self._connected = False
        weakref.finalize(self, self._socket.close)

    def bear(self, arguments, environment, log, *, namespace=None, descriptors=None):
        """Fork one; it has a session of its own when this returns."""
        sys.audit(BORN)
        order = {"arguments": list(arguments), "environment": environment, "log": str(log)}
        order |= {"namespace": namespace, "descriptors": descriptors}
        with self._lock:
            self._connect()
            self._socket.sendall(json.dumps(order).encode() + b"\n")
            while (pid := self._read(wait=True)) is None:
                assert not self._gone, f"the nursery has ended:\n{self.child.tail()}"
        return Borne(self, pid)

    def close(self):
        """Say that nobody wants anything more."""
        self._socket.close()

    def code_of(self, pid):
        """Return the exit code of an engine; None while it runs."""
        with self._lock:
            while self._read(wait=False) is not None or self._received.count(b"\n"):
                pass
            if self._gone and pid not in self._codes and not guard.runs(pid):
                self._codes[pid] = -signal.SIGKILL  # who would have told is gone, too
            return self._codes.get(pid)

    def _connect(self):
        end = time.monotonic() + IMPORT_S
        while not self._connected:
            self._connected = self._socket.connect_ex(self._place) == 0
            self.child.raise_if_dead()
            assert time.monotonic() < end, f"nothing was imported within {IMPORT_S} s:\n{self.child.tail()}"
            time.sleep(0 if self._connected else POLL_S)

    def _read(self, *, wait):
        """Read what there is; return the pid of what was born, if that was told."""
        if b"\n" not in self._received and not self._gone and (wait or select.select([self._socket], [], [], 0)[0]):
            try:
                data = self._socket.recv(65536)
            except ConnectionResetError:
                data = b""
            self._gone = not data
            self._received += data
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        what, pid, code, cpu_s = json.loads(line)
        if what == "born":
            return pid
        self._codes[pid] = code
        _spent.append(cpu_s)
        return None


@dataclass(frozen=True)
class Borne:
    """What was born, as a ``subprocess.Popen`` of it would be."""

    nursery: Nursery
    pid: int

    def poll(self):
        """Return its exit code, None while it runs."""
        return self.nursery.code_of(self.pid)

    def wait(self, timeout=None):
        """Return its exit code; raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return code

    @property
    def returncode(self):
        """Its exit code, None while it runs."""
        return self.poll()

    def send_signal(self, number):
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)
