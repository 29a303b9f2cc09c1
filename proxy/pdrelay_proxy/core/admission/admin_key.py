"""The operators' keys: one, or two while one replaces the other.

None is ever printed.
"""

import hashlib
import hmac


class AdminKey:
    """The key that operators send as X-Api-Key; it may be replaced while the router serves.

    None, or empty: there is no key. Two lines are two keys, of which either is good.
    """

    __slots__ = ("_keys",)

    def __init__(self, key: str | None = None) -> None:
        self._keys = _keys_in(key)

    @property
    def exists(self) -> bool:
        """Whether there is a key at all."""
        return bool(self._keys)

    @property
    def text(self) -> str | None:
        """The text that ``change`` takes, a key a line; None: there is no key."""
        return b"\n".join(self._keys).decode() or None

    def change(self, key: str | None) -> None:
        """Accept this key from now on, and no longer the one before."""
        self._keys = _keys_in(key)

    def matches(self, candidate: bytes) -> bool:
        """Return whether this is a key; how long it takes reveals nothing of the keys.

        Without a key, nothing matches.
        """
        results = [hmac.compare_digest(candidate, key) for key in self._keys]
        return any(results)


def fingerprint(key: bytes) -> str:
    """Return what tells keys apart in a log, and reveals nothing of one that is not weak."""
    return f"sha256:{hashlib.sha256(key).hexdigest()[:8]}"


def _keys_in(text: str | None) -> tuple[bytes, ...]:
    return tuple([line.encode() for line in (text or "").split("\n") if line])
