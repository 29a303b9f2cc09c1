"""The web sites whose pages may read answers in a browser (CORS, WHATWG Fetch 3.2), where clients
send keys.

Cookies play no part: a page gets its key from its user, and sends it as a header that a preflight
has to name. So no answer has ``Access-Control-Allow-Credentials``.
"""

import re
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.model import Headers, first_header

ANY: Final = "*"
_ORIGIN: Final = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")
_NAMES: Final = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z, \t]{1,4096}")
_READABLE: Final = b"x-request-id, x-pdrelay-request-id, server-timing, retry-after"
_KEPT_S: Final = b"600"  # seconds for which a browser keeps the answer to a preflight


def is_origin(text: str) -> bool:
    """Return whether a text is an origin, or the sign for all of them."""
    return text == ANY or _ORIGIN.fullmatch(text) is not None


class AllowedOrigins:
    """The origins of the settings."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset([origin.lower().encode() for origin in origins])
        self._is_any = ANY in origins

    def headers(self, origin: bytes | None) -> Headers:
        """Return the headers that let the page of an origin read an answer; none: it may not.

        A cache must not give one page's answer to another, so each answer varies with the origin.
        """
        if origin is None or not (self._is_any or origin.lower() in self._origins):
            return () if self._is_any else ((b"vary", b"Origin"),)
        allowed = (b"access-control-allow-origin", b"*" if self._is_any else origin)
        readable = (b"access-control-expose-headers", _READABLE)
        return (allowed, readable) if self._is_any else (allowed, readable, (b"vary", b"Origin"))

    def permission(self, headers: Headers, method: bytes) -> Headers | None:
        """Return the headers of the answer to a preflight; None: the page may not send it."""
        origin = first_header(headers, b"origin")
        if origin is None or not (self._is_any or origin.lower() in self._origins):
            return None
        names = first_header(headers, b"access-control-request-headers") or b""
        return (
            (b"access-control-allow-origin", b"*" if self._is_any else origin),
            (b"access-control-allow-methods", method),
            *([(b"access-control-allow-headers", names)] if _NAMES.fullmatch(names) else ()),
            (b"access-control-max-age", _KEPT_S),
            (b"vary", b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers"),
        )
