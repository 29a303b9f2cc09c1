"""The process: a listening server, its signals, and its shutdown."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Final, cast

import uvicorn
import uvloop

from pdrelay_proxy.api.guarded import GuardedProtocol
from pdrelay_proxy.app import Router
from pdrelay_proxy.core.admission.lifetime import Step
from pdrelay_proxy.errors import AddressError, ConfigError
from pdrelay_proxy.io.background import meanwhile
from pdrelay_proxy.io.files import of_admin_port, renew_server_tls
from pdrelay_proxy.io.listening import url_of
from pdrelay_proxy.io.worker_place import END, HURRY, READY, WorkerPlace, received
from pdrelay_proxy.known_settings import without_restart
from pdrelay_proxy.listeners import AdminListener, main_config, main_sockets
from pdrelay_proxy.settings import Settings

# new objects, less freed ones, before the garbage collector traverses them
_YOUNG_MOST: Final = 5_000
_TICK_S: Final = 0.05  # seconds between two checks of requests in flight
_DATE_S: Final = 1.0  # seconds between two Date headers
logger = logging.getLogger(__name__)


class _Loop(uvloop.Loop):
    """uvloop's event loop, with a limit for TLS handshakes, which has no other place."""

    def __init__(self, handshake_s: float) -> None:
        super().__init__()
        self._handshake_s = handshake_s

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:  # noqa: ANN401 (asyncio's signature)
        """Listen; a client with a slow handshake is closed like one with a slow head."""
        if kwargs.get("ssl") is not None:
            kwargs.setdefault("ssl_handshake_timeout", self._handshake_s)
        return cast("asyncio.Server", await super().create_server(*args, **kwargs))


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would stop listening at the first.

    ``line`` tells a supervisor that this listens; without one a log line has the address (``url``).
    """

    def __init__(
        self,
        config: uvicorn.Config,
        admin: AdminListener | None,
        line: socket.socket | None,
        *,
        url: str,
    ) -> None:
        super().__init__(config)
        self._admin = admin
        self._line = line
        self._url = url
        self._ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture none."""
        yield

    async def main_loop(self) -> None:
        """Renew the Date header once a second; uvicorn's own loop wakes ten times a second, to
        check whether to end.
        """
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _DATE_S)

    def end(self) -> None:
        """Stop listening, and finish the requests under way."""
        self.should_exit = True
        self._ending.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report it."""
        await super().startup(sockets)
        if self._admin is not None:
            self.servers.extend(await self._admin.listen(self.server_state))
        if self._line is None:
            logger.info("running on %s", self._url)
            return
        with contextlib.suppress(OSError):  # _on_line notices that the supervisor has ended
            self._line.send(READY)


def run(
    router: Router,
    settings: Settings,
    again: Callable[[], Settings],
    place: WorkerPlace | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then finish the requests in flight; return the exit code.

    ``again`` reads the settings once more, for SIGHUP; it raises ConfigError. ``place``: of one of
    several workers, which listen at one address and end with their supervisor.

    Raises:
        ConfigError: the router cannot listen at its address.
    """
    if place is not None:
        logger.info("worker %d is process %d", place.number, os.getpid())
    raise_descriptors()
    sockets = main_sockets(settings, is_shared=place is not None)
    admin = None if router.admin_app is None else AdminListener(router, settings)
    # The garbage collector traverses only objects made from now on, and seldom: the deferred calls
    # of one moment's requests (io/request_path/deferred.py) exceed its usual threshold, and are
    # soon freed without it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_MOST, *gc.get_threshold()[1:])
    url = url_of(settings.host, int(sockets[0].getsockname()[1]), is_tls=router.tls is not None)
    server = _Server(
        main_config(router, settings), admin, None if place is None else place.line, url=url
    )
    process = _Process(server, router, settings, again, sockets=sockets)
    with asyncio.Runner(loop_factory=partial(_Loop, settings.receive_timeout_s)) as runner:
        runner.run(process.run(None if place is None else place.line))
    return 0


def raise_descriptors() -> None:
    """Raise the limit of descriptors to the hard limit; the usual soft limit is for programs that
    call select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as exc:  # macOS reports infinity, and refuses it
        logger.warning("the limit of descriptors stays at %d: %s", soft, exc)


class _Process:
    """One server, from its start to its end."""

    def __init__(
        self,
        server: _Server,
        router: Router,
        settings: Settings,
        again: Callable[[], Settings],
        *,
        sockets: list[socket.socket],
    ) -> None:
        self._server = server
        self._sockets = sockets
        self._lifetime = router.lifetime
        self._live = router.live
        self._tls = router.tls
        self._admin_tls = router.admin_tls
        self._settings = settings
        self._read_settings = again
        self._end_asked = asyncio.Event()
        self._signalled = False
        self._hurry_asked = asyncio.Event()

    async def run(self, line: socket.socket | None) -> None:
        """Serve to the end; ``line``: to a supervisor, whose end ends this process, too."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_end)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        if line is not None:
            loop.add_reader(line, self._on_line, line)
        async with meanwhile(self._end_when_asked()):
            await self._server.serve(self._sockets)

    def _on_end(self) -> None:
        if self._signalled:
            self._hurry()
        self._signalled = True
        self._end_asked.set()

    def _hurry(self) -> None:
        logger.warning(
            "second signal: shutting down now; %d requests are cut off", self._lifetime.in_flight
        )
        self._hurry_asked.set()

    def _on_line(self, line: socket.socket) -> None:
        """Read messages of the supervisor.

        A signal to all processes may ask for the same: the two count as one request to end.
        """
        message = received(line)
        if message is None:
            asyncio.get_running_loop().remove_reader(line)
            logger.warning("the supervisor has gone: this worker ends, too")
            self._end_asked.set()
            return
        if END in message:
            self._end_asked.set()
        if HURRY in message:
            self._hurry()

    def _on_reload(self) -> None:
        """Apply the present settings; those that need a restart stay, and are named."""
        old = self._settings
        try:
            new, fixed = without_restart(old, self._read_settings())
            change = self._live.prepared(old, new)
            if self._tls is not None:
                renew_server_tls(self._tls, old)
            if self._admin_tls is not None:
                renew_server_tls(self._admin_tls, of_admin_port(old))
        except (ConfigError, AddressError) as exc:
            logger.warning("the settings stay as they were: %s", exc)
            return
        change()
        self._settings = new
        logger.info(
            "the settings were read again%s", "".join(f"; {name} needs a restart" for name in fixed)
        )
        logging.getLogger().setLevel(new.log_level.upper())

    async def _end_when_asked(self) -> None:
        await self._end_asked.wait()
        settings = self._settings
        try:
            await self._finish_requests(settings)
        except Exception:  # a bug must not keep a process that was told to end
            logger.exception("the router ends at once")
        self._server.end()

    async def _finish_requests(self, settings: Settings) -> None:
        """Serve on for the grace, then finish what is under way, as far as there is time."""
        lifetime = self._lifetime
        lifetime.on(Step.SHUTDOWN)
        logger.info(
            "shutting down: /ready answers 503; new requests are served for %g s more",
            settings.drain_grace_s,
        )
        await self._unless_hurried(asyncio.sleep(settings.drain_grace_s))
        lifetime.on(Step.GRACE_OVER)
        logger.info(
            "refusing new requests; %d in flight have %g s",
            lifetime.in_flight,
            settings.shutdown_timeout_s,
        )
        await self._unless_hurried(self._idle(settings.shutdown_timeout_s))
        if lifetime.in_flight:
            logger.warning("%d requests are cut off", lifetime.in_flight)
        unread = self._unread()
        if unread:
            logger.warning("%d answers are not read to their end: they are cut off", unread)
        if lifetime.in_flight or unread:
            self._server.config.timeout_graceful_shutdown = 0

    async def _idle(self, seconds: float) -> None:
        """Wait until nothing is in flight, at most ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._lifetime.in_flight or self._unread():  # noqa: ASYNC110 (neither has an event)
                    await asyncio.sleep(_TICK_S)

    def _unread(self) -> int:
        """Count the connections whose clients have not read all that was written.

        A request is over, and not in flight any more, when all of its answer is written; its
        client may need minutes to read tens of megabytes.
        """
        connections = cast("set[GuardedProtocol]", self._server.server_state.connections)
        return sum(connection.is_unread() for connection in connections)

    async def _unless_hurried(self, waiting: Awaitable[None]) -> None:
        async with meanwhile(waiting) as task, meanwhile(self._hurry_asked.wait()) as hurried:
            await asyncio.wait((task, hurried), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
