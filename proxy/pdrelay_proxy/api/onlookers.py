"""Who may see the fleet: anybody, or callers with an API key of a client or the operator's."""

import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request

from pdrelay_proxy.core.admission.admin_key import AdminKey
from pdrelay_proxy.core.admission.keys import Keyring, key_in
from pdrelay_proxy.core.model import Headers, first_header
from pdrelay_proxy.errors import Unauthorized


async def anybody(_: Request) -> None:
    """Accept every caller."""


@dataclass(frozen=True, slots=True)
class Onlookers:
    """Who may see the metrics, and the page with its numbers; the checks raise Unauthorized for
    others. They are coroutines: FastAPI runs a plain function in a thread.
    """

    scrapers: Callable[[Request], Awaitable[None]] = anybody
    browsers: Callable[[Request], Awaitable[None]] = anybody
    keys: Sequence[Any] = ()  # the document's security entries


EVERYONE: Final = Onlookers()


def require_any_key(
    admin_key: AdminKey, keyring: Keyring, *, by_browsers: bool = False
) -> Callable[[Request], Awaitable[None]]:
    """Return a dependency for routes that show the fleet: if clients need a key, it accepts theirs
    or the operator's.

    ``by_browsers``: also as the password of Basic authentication (RFC 7617), for which browsers
    prompt; the user name is ignored.
    """
    asks = 'Basic realm="pdrelay", Bearer' if by_browsers else "Bearer"

    async def authenticate(request: Request) -> None:
        if keyring.keys is None:
            return
        headers = tuple(request.scope["headers"])
        key = key_in(headers)
        if key is None and by_browsers:
            key = _password(headers)
        if key is None:
            sentence = (
                "this shows the fleet: send an API key of this router, or its admin key as "
                "X-Api-Key"
            )
            raise Unauthorized(sentence, asks=asks)
        others = [value for name, value in headers if name == b"x-api-key"][:1]
        if all(
            keyring.keys.owner(known_key) is None and not admin_key.matches(known_key)
            for known_key in (key, *others)
        ):
            raise Unauthorized("the API key is not one that this router knows", asks=asks)

    return authenticate


def _password(headers: Headers) -> bytes | None:
    """Return the password of Basic authentication; None: there is none."""
    value = first_header(headers, b"authorization") or b""
    if value[:6].lower() != b"basic ":
        return None
    try:
        return base64.b64decode(value[6:].strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None
