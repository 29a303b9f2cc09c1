"""The process's listeners: uvicorn's configuration for each port, and the second port beside its
server.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from pdrelay_proxy.api.clients import Bounds, Clients
from pdrelay_proxy.api.guarded import connection_class
from pdrelay_proxy.api.unread_answers import UnreadAnswers
from pdrelay_proxy.app import Router
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.descriptors import OWN_DESCRIPTORS
from pdrelay_proxy.io.listening import bound, url_of
from pdrelay_proxy.requests.request_set import RequestSet
from pdrelay_proxy.settings import CONNECTIONS, Settings

# seconds in which a client must read some of its response; then its connection is reset
WRITE_TIMEOUT_S: Final = 300.0
# seconds of an idle client connection: longer than load balancers keep theirs, usually 60 s
KEEPALIVE_S: Final = 75
_ADMIN_CONNECTIONS: Final = 256  # of the admin port: the kubelet, some Prometheus, some operators
_ADMIN_PER_ADDRESS: Final = 64  # a caller that holds its connections leaves some for the kubelet
logger = logging.getLogger(__name__)


def main_protocol(
    router: Router, settings: Settings, *, write_timeout_s: float = WRITE_TIMEOUT_S
) -> type[asyncio.Protocol]:
    """Return the protocol class for connections of the main port."""
    bounds = Bounds(
        settings.receive_timeout_s,
        settings.receive_timeout_s,
        _connections(settings),
        settings.max_connections_per_address,
        settings.overload_status,
    )
    return _bounded(router, bounds, write_timeout_s, router.requests)


def _bounded(
    router: Router, bounds: Bounds, write_timeout_s: float, requests: RequestSet | None = None
) -> type[asyncio.Protocol]:
    """Return the protocol class of a port; ``requests``: of endpoints, if it has them."""
    admission = router.live.gate.admission
    telemetry = router.telemetry
    clients = Clients(bounds, on_refused=telemetry.refused_connection, charge=admission.charge)
    unread_answers = UnreadAnswers(write_timeout_s, telemetry.stalled_client)
    return connection_class(clients, unread_answers, requests)


def main_config(
    router: Router,
    settings: Settings,
    *,
    write_timeout_s: float = WRITE_TIMEOUT_S,
    keepalive_s: float = KEEPALIVE_S,
) -> uvicorn.Config:
    """Return uvicorn's configuration for the main port."""
    tls = router.tls
    return uvicorn.Config(
        _failing_in_a_sentence(router.app),
        host=settings.host,
        port=settings.port,
        http=main_protocol(router, settings, write_timeout_s=write_timeout_s),
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        **_common(keepalive_s),
    )


def _failing_in_a_sentence(app: ASGIApp) -> ASGIApp:
    """Have the log say in a sentence which setting keeps the router from starting; Starlette sends
    uvicorn the traceback.
    """
    mark = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return

        async def send_short(message: Message) -> None:
            _, found, sentence = message.get("message", "").rpartition(f"\n{mark}")
            await send({**message, "message": sentence.strip()} if found else message)

        await app(scope, receive, send_short)

    return run


class AdminListener:
    """The admin port, whose connections are guarded like those of clients, and counted apart from
    them.

    A flood of the main port leaves probes and Prometheus their connections. All connections share
    the limit of held bytes, and have the same time limits for heads and bodies.

    It is bound when this is built, so a port that is taken is noticed before anything starts.
    """

    def __init__(self, router: Router, settings: Settings) -> None:
        """Bind; raises ConfigError: it cannot listen there."""
        bounds = Bounds(
            settings.receive_timeout_s,
            settings.receive_timeout_s,
            min(_ADMIN_CONNECTIONS, _wanted(settings)),
            min(_ADMIN_PER_ADDRESS, _wanted(settings)),
        )
        protocol = _bounded(router, bounds, WRITE_TIMEOUT_S)
        app = cast("Any", router.admin_app)
        self._config = uvicorn.Config(app, http=protocol, lifespan="off", **_common(KEEPALIVE_S))
        self._tls = router.admin_tls
        self._host = settings.admin_host or settings.host
        self._sockets = bound(self._host, settings.admin_port or 0, shared=False)

    async def listen(self, state: ServerState) -> Sequence[asyncio.Server]:
        """Start listening; ``state``: of the main port's server, which ends all connections."""
        self._config.load()
        loop = asyncio.get_running_loop()
        protocol_class = cast("Any", self._config.http_protocol_class)
        make_protocol: Callable[[], asyncio.Protocol] = partial(
            protocol_class, config=self._config, server_state=state, app_state={}
        )
        servers = [
            await loop.create_server(
                make_protocol, sock=listener, ssl=self._tls, backlog=self._config.backlog
            )
            for listener in self._sockets
        ]
        logger.info(
            "the admin port is %s", url_of(self._host, self._port, is_tls=self._tls is not None)
        )
        return servers

    @property
    def _port(self) -> int:
        return int(self._sockets[0].getsockname()[1])


def _common(keepalive_s: float) -> dict[str, Any]:
    return {
        "ws": "none",
        "log_config": None,
        "access_log": False,  # the router writes its own line for every request
        "server_header": False,
        "timeout_keep_alive": keepalive_s,
        # requests had their time before; this is for connections to close
        "timeout_graceful_shutdown": 1,
    }


def _connections(settings: Settings) -> int:
    """Return the limit of clients' connections, each of which may need one to an engine.

    Too few descriptors are worth a warning only if the operator asks for a number of connections.
    """
    wanted = _wanted(settings)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = OWN_DESCRIPTORS + (0 if settings.admin_port is None else min(_ADMIN_CONNECTIONS, wanted))
    limit = max(1, (descriptors - own) // 2)
    if descriptors == resource.RLIM_INFINITY or wanted <= limit:
        return wanted
    text = (
        "max_connections is %d, and %d descriptors are enough for %d: more are refused (raise "
        "ulimit -n)"
    )
    logger.log(
        logging.DEBUG if settings.max_connections is None else logging.WARNING,
        text,
        wanted,
        descriptors,
        limit,
    )
    return limit


def _wanted(settings: Settings) -> int:
    if settings.max_connections is not None:
        return settings.max_connections
    return CONNECTIONS


def main_sockets(settings: Settings, *, is_shared: bool) -> list[socket.socket]:
    """Bind the sockets of the main port, which workers share.

    Raises ConfigError: it cannot listen there. uvicorn itself would end the process with a line of
    its own, and accept only IPv6 clients at ``::``.
    """
    return list(bound(settings.host, settings.port, shared=is_shared))
