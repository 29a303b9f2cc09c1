"""The connections of the admin port: as well guarded as those of clients, and counted apart from
them.

A flood of the main port leaves probes and Prometheus their connections. The bytes that all
connections may hold together, and the times of heads and bodies, are the same.
"""

import asyncio
from collections.abc import Callable

from pdrelay_proxy.api.clients import Clients
from pdrelay_proxy.api.guarded import GuardedProtocol


def admin_protocol(
    clients: Clients, *, write_timeout_s: float | None, on_write_timeout: Callable[[], None]
) -> type[asyncio.Protocol]:
    """Return the protocol class for ``uvicorn.Config(http=...)``; the arguments are those of
    ``endpoint_protocol``.
    """
    given: dict[str, object] = {"clients": clients, "write_timeout_s": write_timeout_s}
    given["on_write_timeout"] = staticmethod(on_write_timeout)
    return type("AdminProtocol", (GuardedProtocol,), given)
