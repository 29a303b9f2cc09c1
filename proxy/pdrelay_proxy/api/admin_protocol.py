"""The connections of the admin port: guarded like those of clients, and counted apart from them.

A flood of the main port leaves probes and Prometheus their connections. All connections share the
limit of held bytes, and have the same time limits for heads and bodies.
"""

import asyncio

from pdrelay_proxy.api.clients import Clients
from pdrelay_proxy.api.guarded import GuardedProtocol
from pdrelay_proxy.api.unread_answers import UnreadAnswers


def admin_protocol(clients: Clients, unread_answers: UnreadAnswers) -> type[asyncio.Protocol]:
    """Return the protocol class for ``uvicorn.Config(http=...)``."""
    attributes: dict[str, object] = {"clients": clients, "unread_answers": unread_answers}
    return type("AdminProtocol", (GuardedProtocol,), attributes)
