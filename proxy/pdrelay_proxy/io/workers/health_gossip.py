"""Carries bulletins between the workers of one machine: datagrams on Unix sockets in their folder."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from pdrelay_proxy.core.workers.worker_health import HealthUpdate, WorkerHealth, bulletin_of
from pdrelay_proxy.io.background import meanwhile
from pdrelay_proxy.io.request_path.shared_registry import SharedRegistry
from pdrelay_proxy.io.workers.context import WorkerContext

logger = logging.getLogger(__name__)
_TICK_S: Final = 0.1  # seconds between two bulletins, at least
_ANYWAY_S: Final = 1.0  # seconds after which one goes out that says nothing new: for those that missed the last one
_MOST_BYTES: Final = 1 << 18  # of one; the kernel takes some less


class HealthGossip:
    """Sends what has changed here, and takes in what the others send."""

    def __init__(
        self, place: WorkerContext, registry: SharedRegistry, peers: WorkerHealth, clock: Callable[[], float]
    ) -> None:
        self._place = place
        self._registry = registry
        self._peers = peers
        self._clock = clock  # seconds; the one of the registry, and the same in all processes
        self._sent: HealthUpdate | None = None  # the last one that reached all
        self._sent_at = 0.0
        self._trouble = ""  # what was logged last

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Exchange while the block lasts."""
        path, loop = self._path(self._place.number), asyncio.get_running_loop()
        self._registry.begin(now=self._clock())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)  # noqa: FBT003
            path.unlink(missing_ok=True)  # of a worker of this number that was killed
            sock.bind(str(path))
            loop.add_reader(sock, self._take, sock)
            try:
                async with meanwhile(self._beat(sock)):
                    yield
            finally:
                loop.remove_reader(sock)
                path.unlink(missing_ok=True)

    async def _beat(self, sock: socket.socket) -> None:
        while True:
            try:
                self._registry.follow(now=self._clock())
                for worker in self._peers.expire(now=self._clock()):
                    logger.warning("worker %d is silent: what it has in flight is not counted any more", worker)
                self._send(sock)
            except Exception:  # a bug must not end the exchange for good
                logger.exception("the workers could not be told")
            await asyncio.sleep(_TICK_S)

    def _send(self, sock: socket.socket) -> None:
        bulletin, now = bulletin_of(self._place.number, self._registry), self._clock()
        if bulletin == self._sent and now < self._sent_at + _ANYWAY_S:
            return
        data = msgspec.msgpack.encode(bulletin)
        trouble = ""
        for peer in self._place.peers():
            try:
                sock.sendto(data, str(self._path(peer)))
            except (FileNotFoundError, ConnectionRefusedError):
                self._peers.forget(peer)  # it has ended; its successor will say so when it is there
            except OSError as exc:  # it has not read the last ones yet; or there are too many engines for the kernel
                trouble = str(exc)
                if trouble != self._trouble:
                    logger.warning("worker %d could not be told (%s): it hears the next one", peer, exc)
        self._sent, self._sent_at, self._trouble = None if trouble else bulletin, now, trouble

    def _take(self, sock: socket.socket) -> None:
        while True:
            try:
                data = sock.recv(_MOST_BYTES)
            except BlockingIOError:
                return
            try:
                bulletin = msgspec.msgpack.decode(data, type=HealthUpdate)
            except msgspec.DecodeError as exc:
                logger.warning("what a worker said is no bulletin: %s", exc)
                continue
            if self._peers.hear(bulletin, now=self._clock()):
                self._sent = None  # it has heard nothing yet

    def _path(self, worker: int) -> Path:
        return self._place.path / f"{worker}.told"
