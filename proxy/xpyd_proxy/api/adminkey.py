"""The operator's key: what it opens, and what is said to those who do not have it."""

import hmac
import logging
from collections.abc import Callable
from typing import Annotated, TypeAlias

from fastapi import Header, HTTPException, Request

from xpyd_proxy.core.keys import Keyring, shown_key
from xpyd_proxy.errors import Unauthorized

ApiKey: TypeAlias = Annotated[str, Header()]
logger = logging.getLogger(__name__)


def key_check(admin_key: str | None) -> Callable[[str], None]:
    """Return a dependency that lets only those pass who show the key; keys are compared in constant time."""

    def authenticate(x_api_key: ApiKey) -> None:
        if not admin_key:
            raise HTTPException(500, "Server configuration error.")
        if not _is_it(x_api_key.encode("latin-1"), admin_key):
            logger.warning("somebody called an admin route with a wrong X-Api-Key")
            raise HTTPException(403, "Forbidden: Invalid API Key.")

    return authenticate


def onlooker_check(admin_key: str | None, keyring: Keyring) -> Callable[[Request], None]:
    """Return a dependency for what names addresses: where clients need a key, one of theirs or the operator's."""

    def authenticate(request: Request) -> None:
        if keyring.keys is None:
            return
        shown = shown_key(tuple(request.scope["headers"]))
        if shown is None:
            raise Unauthorized("this shows addresses: send an API key of this router, or its admin key as X-Api-Key")
        if keyring.keys.owner(shown) is None and not (admin_key and _is_it(shown, admin_key)):
            raise Unauthorized("the API key is not one that this router knows")

    return authenticate


def _is_it(shown: bytes, key: str) -> bool:
    return hmac.compare_digest(shown, key.encode())
