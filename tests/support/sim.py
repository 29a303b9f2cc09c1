"""Routers in front of pretended engines: in memory, and over real sockets."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from pdrelay_proxy.app import Fabric, build
from pdrelay_proxy.features.feature import Feature, Ground
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import Sim

Answering = Callable[[httpx.Request], Awaitable[httpx.Response]]


class InMemory(httpx.AsyncBaseTransport):
    """Reaches engines by the host of their address, without a network."""

    def __init__(self, engines: dict[str, ASGIApp | Answering], clock: Callable[[], float] = time.monotonic) -> None:
        self.engines = engines
        self._clock = clock
        self._served = ServerState()

    @property
    def fabric(self) -> Fabric:
        return Fabric(self, self.dial, self._clock)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a probe."""
        engine = self.engines.get(request.url.host)
        if engine is None:
            raise httpx.ConnectError("nobody listens there", request=request)
        if isinstance(engine, Sim):
            return await httpx.ASGITransport(engine).handle_async_request(request)
        return await engine(request)

    async def dial(self, protocol: Callable[[], asyncio.Protocol], host: str, port: int) -> None:
        """Open a connection for legs: a pair of sockets, and a server of the engine at one end."""
        engine = self.engines.get(host)
        if engine is None or not getattr(engine, "takes_legs", True):
            raise ConnectionRefusedError("nobody listens there")
        app = engine if isinstance(engine, Sim) else _answering(engine, host)
        config = uvicorn.Config(app, log_config=None, ws="none", http="httptools", access_log=False)
        config.load()
        served = partial(config.http_protocol_class, config=config, server_state=self._served, app_state={})
        await connect(protocol, served)

    async def close(self) -> None:
        """Close all connections, none of which has a request: as engines do that end. Routers see it."""
        for connection in tuple(self._served.connections):
            connection.shutdown()
        await until_async(lambda: not self._served.connections)
        await asyncio.sleep(0.01)

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncGenerator[None]:
        """Run a router; at the end the engines see that all connections are closed, and the event loop may end."""
        async with app.router.lifespan_context(app):
            yield
        await until_async(lambda: not self._served.connections and not self._served.tasks)


async def connect(protocol: Callable[[], asyncio.Protocol], served: Callable[[], asyncio.Protocol]) -> None:
    """Connect a client and a server of this event loop by a pair of sockets."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    try:
        await loop.connect_accepted_socket(served, theirs)
    except BaseException:  # the leg is given up meanwhile
        theirs.close()
        ours.close()
        raise
    try:
        await loop.create_connection(protocol, sock=ours)
    except BaseException:
        ours.close()
        raise


def _answering(engine: Answering, host: str) -> ASGIApp:
    """An application of a function that answers as httpx would."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        url = f"http://{host}{scope['path']}"
        response = await engine(httpx.Request(scope["method"], url, headers=scope["headers"], content=body))
        headers = [(name.lower(), value) for name, value in response.headers.raw]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async for piece in response.aiter_raw():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    return app


_FLAGS = {"p": "--prefill", "d": "--decode"}


def sims(x: int = 1, y: int = 1, **options: object) -> dict[str, Sim]:
    """Pretend x prefill and y decode engines, named p0, p1, ... and d0, d1, ...; ``mode="push"`` connects them.

    With ``kv_both`` each of them takes legs of both kinds.
    """
    kv_both = options.pop("kv_both", False)
    if options.get("mode") in ("push", "auto"):
        options.setdefault("pushed", {})
    counts = ("prefill", x), ("decode", y)
    return {f"{role[0]}{i}": Sim("both" if kv_both else role, **options) for role, n in counts for i in range(n)}


def _knowing(at: dict[str, str], settings: Settings | None) -> Settings:
    """Settings that name these engines, where they are; tests call the router by any name."""
    settings = settings or Settings()
    prefill, decode = (tuple(at[name] for name in at if name.startswith(role)) for role in "pd")
    return replace(settings, prefill=prefill, decode=decode, allowed_hosts=settings.allowed_hosts or ("*",))


@asynccontextmanager
async def router(
    engines: dict[str, ASGIApp | Answering],
    settings: Settings | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a router that knows these engines."""
    network = InMemory(engines, clock)
    known = _knowing({name: f"{name}:80" for name in engines}, settings)
    app = build(known, fabric=network.fabric).app
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        network.running(app),
        httpx.AsyncClient(transport=transport, base_url="http://router") as client,
    ):
        yield client


@contextmanager
def serving(app: ASGIApp, **options: object) -> Generator[str]:
    """Serve an application on a free port of this machine; yields host:port. The options are uvicorn's."""
    with serving_at(1, app, **options) as (at,):
        yield at


@contextmanager
def serving_at(count: int, app: ASGIApp, **options: object) -> Generator[list[str]]:
    """Serve an application on many ports: a simulated engine is as many engines, to a router."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    fixed = {"log_config": None, "ws": "none", "loop": "uvloop", "http": "httptools", "access_log": False}
    config = uvicorn.Config(app, **fixed, **options)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": listeners})
    thread.start()
    try:
        until(lambda: server.started)
        yield [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    finally:
        server.should_exit = True
        thread.join()


@dataclass(frozen=True)
class Cluster:
    """A router and its engines, over real sockets."""

    router: str  # host:port
    engines: dict[str, Sim]

    def open(self, path: str, body: dict[str, object]) -> socket.socket:
        """Send a request as a client that means to hang up."""
        host, port = self.router.split(":")
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(raw)}\r\n\r\n"
        client = socket.create_connection((host, int(port)), timeout=10)
        client.sendall(head.encode() + raw)
        return client


@contextmanager
def fleet(x: int = 1, y: int = 1, **options: object) -> Generator[tuple[dict[str, Sim], dict[str, str], list[str]]]:
    """Serve x prefill and y decode sims; yields them, where each is, and the flags that name them to a router."""
    engines = sims(x, y, **options)
    with ExitStack() as stack:
        at = {name: stack.enter_context(serving(sim)) for name, sim in engines.items()}
        yield engines, at, [word for name, where in at.items() for word in (_FLAGS[name[0]], where)]


@contextmanager
def cluster(
    x: int = 1,
    y: int = 1,
    settings: Settings | None = None,
    *,
    make_features: Sequence[Callable[[Ground], Feature]] | None = None,
    **options: object,
) -> Generator[Cluster]:
    """Start x prefill sims, y decode sims and a router."""
    with fleet(x, y, **options) as (engines, at, _):
        built = build(_knowing(at, settings), make_features=make_features)
        with serving(built.app) as address:
            yield Cluster(address, engines)


def until(true: Callable[[], bool], *, seconds: float = 30) -> None:
    """Wait for something another thread does."""
    deadline = time.monotonic() + seconds
    is_late = False
    while not true():
        assert not is_late, "it did not happen"
        time.sleep(0.005)
        is_late = (
            time.monotonic() >= deadline
        )  # what is true now is in time: this thread may have been kept from looking


async def until_async(true: Callable[[], bool], *, seconds: float = 30) -> None:
    """Wait for something another task does."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.001)
