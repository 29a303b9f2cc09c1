"""The operator's key: what it opens, and what is said to those who do not have it."""

import base64
import binascii
import hmac
from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

from fastapi import Header, HTTPException, Request

from xpyd_proxy.api.audit import Audit, fingerprint
from xpyd_proxy.core.admission.keys import Keyring, shown_key
from xpyd_proxy.core.model import Headers
from xpyd_proxy.errors import Unauthorized

ApiKey: TypeAlias = Annotated[str | None, Header()]
_ASKS: Final = {"www-authenticate": "X-Api-Key"}
_MISSING: Final = "This is for operators: send the router's admin key as X-Api-Key."
_UNCONFIGURED: Final = (
    "This router has no admin key, so nobody may do this: start it with ADMIN_API_KEY in its environment."
)


def key_check(admin_key: str | None, audit: Audit) -> Callable[[Request, str | None], None]:
    """Return a dependency that lets only those pass who show the key; keys are compared in constant time."""
    name = None if not admin_key else fingerprint(admin_key)

    def authenticate(request: Request, x_api_key: ApiKey = None) -> None:
        if not admin_key:
            audit.refused(request, "the router has no admin key")
            raise HTTPException(404, _UNCONFIGURED)
        if x_api_key is None:
            audit.refused(request, "no X-Api-Key")
            raise HTTPException(401, _MISSING, _ASKS)
        if not _is_it(x_api_key.encode("latin-1"), admin_key):
            audit.refused(request, "a wrong X-Api-Key")
            raise HTTPException(401, "Forbidden: Invalid API Key.", _ASKS)  # vLLM's demo says so, with 403
        request.state.admin = name

    return authenticate


def onlooker_check(admin_key: str | None, keyring: Keyring, *, by_browsers: bool = False) -> Callable[[Request], None]:
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
    value = next((value for name, value in headers if name == b"authorization"), b"")
    if value[:6].lower() != b"basic ":
        return None
    try:
        return base64.b64decode(value[6:].strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None


def _is_it(shown: bytes, key: str) -> bool:
    return hmac.compare_digest(shown, key.encode())
