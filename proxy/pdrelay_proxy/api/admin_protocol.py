"""The connections of the admin port: guarded like those of clients, and counted apart from them.

A flood of the main port leaves probes and Prometheus their connections. All connections share the
limit of held bytes, and have the same time limits for heads and bodies.
"""

import asyncio
from collections.abc import Callable

from pdrelay_proxy.api.clients import Clients
from pdrelay_proxy.api.guarded import GuardedProtocol


def admin_protocol(
    clients: Clients, *, write_timeout_s: float | None, on_write_timeout: Callable[[], None]
) -> type[asyncio.Protocol]:
    """Return the protocol class for ``uvicorn.Config(http=...)``; its arguments are those of
    ``endpoint_protocol``.
    """
    attributes: dict[str, object] = {"clients": clients, "write_timeout_s": write_timeout_s}
    attributes["on_write_timeout"] = staticmethod(on_write_timeout)
    return type("AdminProtocol", (GuardedProtocol,), attributes)
