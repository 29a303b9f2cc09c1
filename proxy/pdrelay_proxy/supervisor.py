"""Starts the workers of one router, starts again those that die, and ends when they do. No request comes here."""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.workers.context import END, HURRY, READY, VARIABLE, WorkerContext
from pdrelay_proxy.io.workers.listening import reserved, url_of
from pdrelay_proxy.settings import Settings

_FIRST_PAUSE_S: Final = 0.2  # seconds before a worker that died is started again; doubled every time
_PAUSE_MOST_S: Final = 30.0
_PROVEN_S: Final = 60.0  # seconds after which a worker's death is the first one again
_PATH_MOST: Final = 80  # characters of the folder: a Unix socket's path may have 107
logger = logging.getLogger(__name__)


def run(settings: Settings, arguments: Sequence[str]) -> int:
    """Serve with several processes until SIGTERM or SIGINT; return the exit code, or raise ConfigError."""
    with ExitStack() as stack:
        host, admin_host = settings.host, settings.admin_host or settings.host
        port = stack.enter_context(reserved(host, settings.port))
        where = url_of(host, port, is_tls=settings.tls_cert is not None)
        admin_port = None
        if settings.admin_port is not None:
            admin_port = stack.enter_context(reserved(admin_host, settings.admin_port))
            admin_url = url_of(admin_host, admin_port, is_tls=settings.admin_tls_cert is not None)
            logger.info("the admin port is %s", admin_url)
        folder = stack.enter_context(_folder())
        crew = _Crew(settings.workers, arguments, folder=folder, port=port, admin_port=admin_port, url=where)
        return asyncio.run(crew.run())


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Make what the workers share, for this user alone; what is left there at the end does no harm."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="pdrelay-", ignore_cleanup_errors=True)
    except OSError as exc:
        raise ConfigError(f"workers need a temporary folder, and there is none: {exc.strerror}; set TMPDIR") from exc
    if len(folder.name) > _PATH_MOST:
        folder.cleanup()
        raise ConfigError(f"{folder.name} is too long for the path of a Unix socket: set TMPDIR to a short one")
    return folder


@dataclass(slots=True)
class _Worker:
    process: asyncio.subprocess.Process
    line: socket.socket  # its end of it says when this process has ended
    is_ready: bool = False

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def say(self, word: bytes) -> None:
        """Send it a word, if it is still there."""
        with suppress(OSError):
            self.line.send(word)


class _Crew:
    """All workers, from their start to their end."""

    def __init__(
        self, count: int, arguments: Sequence[str], *, folder: str, port: int, admin_port: int | None, url: str
    ) -> None:
        self._command = (sys.executable, "-m", "pdrelay_proxy.cli", *arguments)
        self._folder = folder
        self._port, self._admin_port = port, admin_port
        self._url = url
        self._workers: list[_Worker | None] = [None] * count
        self._starts = [0] * count
        self._told = asyncio.Event()
        self._said = False

    async def run(self) -> int:
        """Run until all have ended; return 0 if each of them did well."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_end)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        workers = [await self._spawned(number) for number in range(len(self._workers))]
        await self._begin(workers[0])  # alone: what is wrong with the settings is said once
        if not workers[0].is_ready:
            return (await asyncio.gather(*map(self._ended, workers)))[0]
        codes = await asyncio.gather(*(self._keep(number, worker) for number, worker in enumerate(workers)))
        return 1 if any(codes) else 0

    def _on_end(self) -> None:
        """Pass it on, by word: some send the signal to all processes at once, and a second one means to hurry."""
        word = HURRY if self._told.is_set() else END
        self._told.set()
        for worker in filter(None, self._workers):
            if worker.is_ready:
                worker.say(word)
            else:
                worker.signal(signal.SIGTERM)

    def _on_reload(self) -> None:
        """Pass it on to those that serve: one that starts reads the settings anyway, and a signal would kill it."""
        for worker in filter(None, self._workers):
            if worker.is_ready:
                worker.signal(signal.SIGHUP)

    async def _keep(self, number: int, first: _Worker) -> int:
        """Have a worker of this number until all shall end; return how the last one did."""
        loop, pause, worker = asyncio.get_running_loop(), _FIRST_PAUSE_S, first
        while True:
            began = loop.time()
            await self._begin(worker)
            if not self._said and all(each is not None and each.is_ready for each in self._workers):
                self._said = True
                logger.info("running on %s with %d workers", self._url, len(self._workers))
            code = await self._ended(worker)
            if self._told.is_set():
                return code
            if loop.time() - began > _PROVEN_S:
                pause = _FIRST_PAUSE_S
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            logger.warning("worker %d has ended (%s): another one starts in %g s", number, how, pause)
            successor = None
            while successor is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._told.wait(), pause)
                if self._told.is_set():
                    return 0
                pause = min(pause * 2, _PAUSE_MOST_S)
                try:
                    successor = await self._spawned(number)
                except OSError as exc:  # the machine has no room for it now
                    logger.warning("worker %d cannot be started: %s", number, exc.strerror)
            worker = successor

    async def _spawned(self, number: int) -> _Worker:
        """Start a process, which loads what it needs and waits."""
        self._starts[number] += 1
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)  # noqa: FBT003
        with theirs:
            place = WorkerContext(
                number,
                len(self._workers),
                self._folder,
                self._port,
                theirs.fileno(),
                starts=self._starts[number],
                admin_port=self._admin_port,
            )
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, VARIABLE: msgspec.json.encode(place).decode()},
                pass_fds=(theirs.fileno(),),
                process_group=0,  # a terminal's Ctrl-C reaches this process, which passes it on once
            )
        self._workers[number] = worker = _Worker(process, ours)
        return worker

    async def _begin(self, worker: _Worker) -> None:
        """Have it begin, and wait until it serves or has ended."""
        if self._told.is_set():
            worker.signal(signal.SIGTERM)
        if not worker.is_ready:
            with suppress(ConnectionError):  # it has ended
                worker.line.send(READY)
                worker.is_ready = await asyncio.get_running_loop().sock_recv(worker.line, 1) == READY

    async def _ended(self, worker: _Worker) -> int:
        """Wait for its end; return the exit code. One that was told to end before it served has done nothing wrong."""
        if not worker.is_ready:
            worker.line.close()  # then it does not begin
        code = await worker.process.wait()
        worker.line.close()
        return 0 if self._told.is_set() and not worker.is_ready and code < 0 else code
