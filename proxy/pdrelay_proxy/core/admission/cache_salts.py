"""The ``cache_salt`` that keeps what one client has sent out of the prefix cache of all others.

vLLM hashes it into the first block of a prompt, so prompts with different salts share no block
(docs/design/prefix_caching.md in vLLM). Without one a client can tell by the time of its first
token whether another client has sent the same beginning.
"""

import hashlib
import hmac
from typing import Final

import msgspec

from pdrelay_proxy.core.admission.keys import Keyring, Keys
from pdrelay_proxy.core.raw_json import NULL, Fields, NotJson, decode, text
from pdrelay_proxy.errors import BadRequest, Unauthorized

FIELD: Final = "cache_salt"
# vLLM 0.32 takes 128 characters at most (entrypoints/generate/base/protocol.py)
_DIGITS: Final = 64


class Salts:
    """Salts by the names of clients: equal in all routers that have the same secret, or the same
    file of keys.

    ``secret``: of the fleet; None: the client's own key is, and its salt changes with it.
    ``always``: also a single client gets one; else a second client begins with caches of its own,
    and what the first one has sent stays its own.
    """

    def __init__(self, keyring: Keyring, secret: str | None, *, always: bool = True) -> None:
        self._keyring = keyring
        self._always = always
        self._secret = None if secret is None else secret.encode()
        self._keys: Keys | None = None  # those that ``_own`` was made with
        self._own: dict[str, msgspec.Raw] = {}

    @property
    def apply(self) -> bool:
        """Tell whether clients are kept apart now: keys may be replaced while requests are
        served.
        """
        keys = self._keyring.keys
        return keys is not None and (self._always or keys.has_several)

    def salted(self, fields: Fields, caller: str) -> Fields:
        """Return a request with the salt of a client; one that it sends itself counts within its
        own.

        Raises:
            BadRequest: what it sends is none.
            Unauthorized: its key was taken away since it was let in.
        """
        given = fields.get(FIELD, NULL)
        return fields | {
            FIELD: self._of(caller) if given == NULL else text(self._digest(caller, _read(given)))
        }

    def _of(self, caller: str) -> msgspec.Raw:
        if self._keys is not self._keyring.keys:
            self._keys = self._keyring.keys
            self._own.clear()
        found = self._own.get(caller)
        if found is None:
            found = self._own[caller] = text(self._digest(caller, ""))
        return found

    def _digest(self, caller: str, given: str) -> str:
        secret = self._key_of(caller) if self._secret is None else self._secret
        said = msgspec.json.encode([FIELD, caller, given])
        return hmac.new(secret, said, hashlib.sha256).hexdigest()[:_DIGITS]

    def _key_of(self, caller: str) -> bytes:
        keys = self._keyring.keys
        if keys is None:
            return b""
        own = [digest for digest, name in keys.owners.items() if name == caller]
        if not own:
            raise Unauthorized("the API key is not one that this router knows any more")
        return min(own)


def _read(given: msgspec.Raw) -> str:
    try:
        found = decode(given, str)
    except NotJson:
        found = ""
    if not found:
        raise BadRequest(f"{FIELD} must be a string that is not empty", param=FIELD)
    return found
