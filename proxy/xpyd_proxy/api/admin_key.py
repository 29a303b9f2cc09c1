"""The operator's key: what it opens, and what is said to those who do not have it."""

import base64
import binascii
import hmac
from collections.abc import Callable
from typing import Any, Final

from fastapi import HTTPException, Request, Security
from fastapi.security import APIKeyHeader

from xpyd_proxy.api.audit import Audit, fingerprint
from xpyd_proxy.core.admission.keys import Keyring, shown_key
from xpyd_proxy.core.model import Headers, first_header
from xpyd_proxy.errors import Unauthorized

_ASKS: Final = {"www-authenticate": "X-Api-Key"}
_MISSING: Final = "This is for operators: send the router's admin key as X-Api-Key."
_UNCONFIGURED: Final = (
    "This router has no admin key, so nobody may do this: start it with ADMIN_API_KEY in its environment."
)

# For the document; the routes that want the key look at it before FastAPI reads a body (api/operator_route.py).
OPERATOR_KEY: Final[Any] = Security(
    APIKeyHeader(name="X-Api-Key", scheme_name="operator", description="The operator's key", auto_error=False)
)


def is_admin(request: Request, admin_key: str | None) -> bool:
    """Tell whether a request shows the operator's key."""
    return bool(admin_key) and _is_it(request.headers.get("x-api-key", "").encode("latin-1"), admin_key or "")


def require_admin_key(admin_key: str | None, audit: Audit) -> Callable[[Request], None]:
    """Return a check that lets only those pass who show the key; keys are compared in constant time."""
    name = None if not admin_key else fingerprint(admin_key)

    def authenticate(request: Request) -> None:
        shown = request.headers.get("x-api-key")
        if not admin_key:
            audit.refused(request, "the router has no admin key")
            raise HTTPException(404, _UNCONFIGURED)
        if shown is None:
            audit.refused(request, "no X-Api-Key")
            raise HTTPException(401, _MISSING, _ASKS)
        if not _is_it(shown.encode("latin-1"), admin_key):
            audit.refused(request, "a wrong X-Api-Key")
            raise HTTPException(401, "Forbidden: Invalid API Key.", _ASKS)  # vLLM's demo says so, with 403
        request.state.admin = name

    return authenticate


def require_any_key(admin_key: str | None, keyring: Keyring, *, by_browsers: bool = False) -> Callable[[Request], None]:
    """Return a dependency for what shows the fleet: where clients need a key, one of theirs or the operator's.

    ``by_browsers``: also as the password of Basic (RFC 7617), for which browsers ask; the name plays no part.
    """
    asks = 'Basic realm="xpyd", Bearer' if by_browsers else "Bearer"

    def authenticate(request: Request) -> None:
        if keyring.keys is None:
            return
        headers = tuple(request.scope["headers"])
        shown = shown_key(headers)
        if shown is None and by_browsers:
            shown = _password(headers)
        if shown is None:
            sentence = "this shows the fleet: send an API key of this router, or its admin key as X-Api-Key"
            raise Unauthorized(sentence, asks=asks)
        if keyring.keys.owner(shown) is None and not (admin_key and _is_it(shown, admin_key)):
            raise Unauthorized("the API key is not one that this router knows", asks=asks)

    return authenticate


def _password(headers: Headers) -> bytes | None:
    """Return the password of Basic; None: there is none."""
    value = first_header(headers, b"authorization") or b""
    if value[:6].lower() != b"basic ":
        return None
    try:
        return base64.b64decode(value[6:].strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None


def _is_it(shown: bytes, key: str) -> bool:
    return hmac.compare_digest(shown, key.encode())
