"""The routes of everything that engines do for clients."""

from typing import Final

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from xpyd_proxy.core.protocol.endpoints import ENDPOINTS

_NOT_FOUND: Final[tuple[Match, Scope]] = (Match.NONE, {})


class _Exactly(Route):
    """A route of one path: the regular expression of an ordinary one lets a line break pass behind it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Tell whether it is this path."""
        return super().matches(scope) if scope.get("path") == self.path else _NOT_FOUND


def endpoint_routes(endpoints: ASGIApp) -> list[Route]:
    """Build the routes of all paths in the table."""
    return [_Exactly(path, endpoints, methods=["POST"]) for path in ENDPOINTS]


def is_endpoint(scope: Scope) -> bool:
    """Tell a request that is judged and followed elsewhere (requests/request.py)."""
    return scope["path"] in ENDPOINTS and scope["method"] == "POST"
