"""The ``cache_salt`` that keeps one client's prompts out of the prefix cache of all others.

vLLM hashes it into the first block of a prompt, so prompts with different salts share no block
(docs/design/prefix_caching.md in vLLM). Without a salt, a client can tell by the time of its first
token whether another client has sent the same beginning.
"""

import hashlib
import hmac
from typing import Final

import msgspec

from pdrelay_proxy.core.admission.keys import Keyring, Keys
from pdrelay_proxy.core.raw_json import NULL, Fields, NotJson, decode, to_raw
from pdrelay_proxy.errors import BadRequest, Unauthorized

FIELD: Final = "cache_salt"
# vLLM 0.32 takes 128 characters at most (entrypoints/generate/base/protocol.py)
_DIGITS: Final = 64


class Salts:
    """Salts by the names of clients: equal in all routers with the same secret, or the same file of
    keys.

    ``secret``: of the fleet; None: each client's own key is the secret, and its salt changes with
    it. ``always``: a single client gets a salt, too; otherwise the second client begins with an
    empty cache of its own, and the cache of the first stays its own.
    """

    def __init__(self, keyring: Keyring, secret: str | None, *, always: bool = True) -> None:
        self._keyring = keyring
        self._always = always
        self._secret = None if secret is None else secret.encode()
        self._keys: Keys | None = None  # the keys that ``_own`` was computed from
        self._own: dict[str, msgspec.Raw] = {}

    @property
    def apply(self) -> bool:
        """Whether clients are kept apart now: keys may be replaced while requests are served."""
        keys = self._keyring.keys
        return keys is not None and (self._always or keys.has_several)

    def salted(self, fields: Fields, caller: str) -> Fields:
        """Return a request with the client's salt; a salt that the client sends counts within its
        own.

        Raises:
            BadRequest: the salt is not a string, or is empty.
            Unauthorized: the client's key was removed since it was admitted.
        """
        client_salt = fields.get(FIELD, NULL)
        return fields | {
            FIELD: self._own_salt(caller)
            if client_salt == NULL
            else to_raw(self._digest(caller, _read(client_salt)))
        }

    def _own_salt(self, caller: str) -> msgspec.Raw:
        if self._keys is not self._keyring.keys:
            self._keys = self._keyring.keys
            self._own.clear()
        salt = self._own.get(caller)
        if salt is None:
            salt = self._own[caller] = to_raw(self._digest(caller, ""))
        return salt

    def _digest(self, caller: str, client_salt: str) -> str:
        secret = self._key_of(caller) if self._secret is None else self._secret
        message = msgspec.json.encode([FIELD, caller, client_salt])
        return hmac.new(secret, message, hashlib.sha256).hexdigest()[:_DIGITS]

    def _key_of(self, caller: str) -> bytes:
        keys = self._keyring.keys
        if keys is None:
            return b""
        own = [digest for digest, name in keys.owners.items() if name == caller]
        if not own:
            raise Unauthorized("the API key is not one that this router knows any more")
        return min(own)


def _read(raw: msgspec.Raw) -> str:
    try:
        salt = decode(raw, str)
    except NotJson:
        salt = ""
    if not salt:
        raise BadRequest(f"{FIELD} must be a string that is not empty", param=FIELD)
    return salt
