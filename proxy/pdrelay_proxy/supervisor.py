"""Starts the workers of one machine, replaces those that die, and ends with them.

It serves no request itself. A worker is a fork of this process, which has imported all modules of a
router. So a worker starts at once, and the modules are in memory once. Only a process with one
thread can be forked safely: this one starts none.
"""

import asyncio
import fcntl
import gc
import logging
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features import for_workers, shared_store
from pdrelay_proxy.io.listening import bound, reserved, url_of
from pdrelay_proxy.io.worker_place import (
    END,
    HURRY,
    LOOPBACK,
    READY,
    WorkerPlace,
    admin_port_of,
    limits_of_each,
)
from pdrelay_proxy.settings import Settings

# seconds before a dead worker is replaced; doubled every time
_FIRST_PAUSE_S: Final = 0.2
_PAUSE_MOST_S: Final = 30.0
_PROVEN_S: Final = 60.0  # seconds after which a worker's death counts as the first again
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
logger = logging.getLogger(__name__)

Serve = Callable[[WorkerPlace], int]  # serves to the end as one worker, and returns the exit code


def run(settings: Settings, serve: Serve) -> int:
    """Serve with several processes until a signal; return the exit code, or raise ConfigError."""
    # One that was started with it ignored would never learn how a worker ended (waitpid(2)).
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with ExitStack() as stack:
        port = stack.enter_context(reserved(settings.host, settings.port))
        _check_admin_ports(settings)
        common = for_workers(settings, lambda: stack.enter_context(_folder()))
        if shared_store(settings.with_features(*common)) is None:
            raise ConfigError(
                f"workers is {settings.workers}, and this router has no feature by which workers "
                f"share the engines that operators add: write workers = 1"
            )
        logger.info(
            "each of %d workers has these limits for itself: %s",
            settings.workers,
            limits_of_each(settings),
        )
        peer_sockets = [stack.enter_context(_peer_socket()) for _ in range(settings.workers)]
        url = url_of(settings.host, port, is_tls=settings.tls_cert is not None)
        gc.collect()
        gc.freeze()  # otherwise a collection in a worker would copy its shared pages
        return asyncio.run(
            _Crew(serve, settings, peer_sockets, port=port, common=common, url=url).run()
        )


@contextmanager
def _folder() -> Generator[str]:
    """Make a folder for this user alone, in which features have files for all workers."""
    with ExitStack() as stack:
        try:
            name = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="pdrelay-", ignore_cleanup_errors=True)
            )
            handle = os.open(name, os.O_RDONLY)
            stack.callback(os.close, handle)
            # systemd removes old files of /tmp, but none of a folder that is locked: tmpfiles.d(5)
            fcntl.flock(handle, fcntl.LOCK_SH)
        except OSError as exc:
            raise ConfigError(
                f"workers need a temporary folder, and there is none: {exc.strerror}; set TMPDIR"
            ) from exc
        yield name


def _peer_socket() -> socket.socket:
    """Bind a socket to a port that the system chooses; both outlive the worker that uses them."""
    peer_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    peer_socket.setblocking(False)  # noqa: FBT003
    peer_socket.bind((LOOPBACK, 0))
    return peer_socket


def _check_admin_ports(settings: Settings) -> None:
    """Raise ConfigError if an admin port is taken, before any worker starts."""
    host = settings.admin_host or settings.host
    for number in range(settings.workers):
        for admin_socket in bound(host, admin_port_of(settings, number) or 0, shared=False):
            admin_socket.close()


@dataclass(slots=True)
class _Worker:
    pid: int
    # to the worker; either side notices the other's end by it
    line: socket.socket
    is_ready: bool = False

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def send(self, word: bytes) -> None:
        """Send it a message, if it is still there."""
        with suppress(OSError):
            self.line.send(word)

    async def wait_ready(self) -> None:
        """Wait until it serves, or has ended."""
        self.is_ready = await self._next_byte() == READY

    async def wait_ended(self) -> int:
        """Wait until it has ended; return its exit code, or minus the signal that killed it."""
        while await self._next_byte():
            pass
        self.line.close()
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222 (it has closed its files, so this takes a moment)
        return os.waitstatus_to_exitcode(status)

    async def _next_byte(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self.line, 1)
        except OSError:
            return b""


class _Crew:
    """All workers, from their start to their end."""

    def __init__(
        self,
        serve: Serve,
        settings: Settings,
        peer_sockets: Sequence[socket.socket],
        *,
        port: int,
        common: Sequence[object],
        url: str,
    ) -> None:
        self._serve = serve
        self._settings = settings
        self._peer_sockets = peer_sockets  # of the workers, by their numbers
        self._port = port
        self._common = common  # settings of features that are for all workers
        self._url = url
        self._secret = secrets.token_urlsafe(32)
        self._workers: list[_Worker | None] = [None] * len(peer_sockets)
        self._shall_end = asyncio.Event()
        self._has_begun = False

    async def run(self) -> int:
        """Run until all workers have ended; return 0 if each of them succeeded."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_end)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        first = self._fork(0)
        await first.wait_ready()  # alone, so that an error of the settings is reported once
        if not first.is_ready or self._shall_end.is_set():
            code = await self._exit_code(first)
            if code >= 0:
                return code
            logger.error("worker 0 has ended before it served (%s)", _cause(code))
            return 1
        others = [self._fork(number) for number in range(1, len(self._workers))]
        codes = await asyncio.gather(
            *(self._keep_running(number, worker) for number, worker in enumerate((first, *others)))
        )
        return 1 if any(codes) else 0

    def _on_end(self) -> None:
        """Send the workers a message, as a signal may go to all processes at once; a second signal
        means to hurry.
        """
        word = HURRY if self._shall_end.is_set() else END
        self._shall_end.set()
        for worker in filter(None, self._workers):
            if worker.is_ready:
                worker.send(word)
            else:
                worker.signal(signal.SIGTERM)

    def _on_reload(self) -> None:
        """Send SIGHUP to serving workers: a starting one reads the settings anyway, and the signal
        would kill it.
        """
        for worker in filter(None, self._workers):
            if worker.is_ready:
                worker.signal(signal.SIGHUP)

    async def _keep_running(self, number: int, first: _Worker) -> int:
        """Replace a worker of this number until all shall end; return the last exit code."""
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        worker = first
        while True:
            began = loop.time()
            if not worker.is_ready:
                await worker.wait_ready()
            self._note_beginning()
            code = await self._exit_code(worker)
            if self._shall_end.is_set():
                return code
            if loop.time() - began > _PROVEN_S:
                pause_s = _FIRST_PAUSE_S
            logger.warning(
                "worker %d has ended (%s): another one starts in %g s",
                number,
                _cause(code),
                pause_s,
            )
            successor = None
            while successor is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._shall_end.wait(), pause_s)
                if self._shall_end.is_set():
                    return 0
                pause_s = min(pause_s * 2, _PAUSE_MOST_S)
                try:
                    successor = self._fork(number)
                except OSError as exc:  # the machine has no room for it now
                    logger.warning("worker %d cannot be started: %s", number, exc.strerror)
            worker = successor

    def _note_beginning(self) -> None:
        if not self._has_begun and all(
            worker is not None and worker.is_ready for worker in self._workers
        ):
            self._has_begun = True
            logger.info("running on %s with %d workers", self._url, len(self._workers))

    async def _exit_code(self, worker: _Worker) -> int:
        """Wait for its end; return the exit code.

        A worker that was asked to end before it served counts as successful.
        """
        code = await worker.wait_ended()
        return 0 if self._shall_end.is_set() and not worker.is_ready and code < 0 else code

    def _fork(self, number: int) -> _Worker:
        """Start a worker; raises OSError."""
        own_end, worker_end = socket.socketpair()
        with worker_end:
            for end in (own_end, worker_end):
                end.setblocking(False)  # noqa: FBT003
            # until the worker has its own handlers
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                pid = os.fork()
                if pid == 0:
                    own_end.close()
                    self._be_worker(number, worker_end)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        worker = self._workers[number] = _Worker(pid, own_end)
        return worker

    def _be_worker(self, number: int, line: socket.socket) -> NoReturn:
        """Serve as a worker in its own process, and end that."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)  # it belongs to the supervisor's event loop
            for number_of_signal in _SIGNALS:
                signal.signal(number_of_signal, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the supervisor, which passes it on once
            for worker in self._workers:
                if worker is not None:
                    worker.line.close()  # otherwise its owner would not notice the supervisor's end
            logging.getLogger().handlers.clear()  # the worker's log has a thread
            code = self._serve(self._place(number, line))
        except BaseException:  # a bug that nothing else would report
            logger.exception("worker %d has failed", number)
        finally:
            logging.shutdown()
            os._exit(code)

    def _place(self, number: int, line: socket.socket) -> WorkerPlace:
        peer_socket = self._peer_sockets[number]
        return WorkerPlace(
            number,
            self._port,
            self._common,
            peer_socket,
            tuple(
                other.getsockname()[1] for other in self._peer_sockets if other is not peer_socket
            ),
            self._secret,
            self._settings,
            line,
        )


def _cause(code: int) -> str:
    """Describe an exit code; a negative one is the number of a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"
