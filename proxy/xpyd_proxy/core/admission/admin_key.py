"""The key of operators that is good now. It is never printed."""

import hashlib
import hmac


class AdminKey:
    """What operators show as X-Api-Key; it may be replaced while the router serves. None, or empty: there is no key."""

    __slots__ = ("_key",)

    def __init__(self, key: str | None = None) -> None:
        self._key = (key or "").encode()

    @property
    def exists(self) -> bool:
        """Tell whether there is a key at all."""
        return bool(self._key)

    @property
    def fingerprint(self) -> str:
        """Return what tells keys apart in a log, and says nothing of a key that cannot be guessed."""
        return f"sha256:{hashlib.sha256(self._key).hexdigest()[:8]}"

    def change(self, key: str | None) -> None:
        """Accept this key from now on, and no longer the one before."""
        self._key = (key or "").encode()

    def matches(self, shown: bytes) -> bool:
        """Tell whether this is the key; the time that it takes says nothing of it. Without a key nothing is."""
        return hmac.compare_digest(shown, self._key) and bool(self._key)
