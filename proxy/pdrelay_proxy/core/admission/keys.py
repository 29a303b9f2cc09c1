"""API keys: those that clients send to the router, and those that the router sends to engines.

None is ever printed.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from pdrelay_proxy.core.admission.priority import USUAL
from pdrelay_proxy.core.model import Headers, Role, first_header
from pdrelay_proxy.errors import ConfigError, Unauthorized

ANYBODY: Final = "-"  # the name of all clients of a router without keys
# characters of a client's key: fewer can be guessed, and half a line has fewer
LEAST: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # logs and answers show it
_KEY: Final = re.compile(r"[!-~]+")  # what a header can carry
_DIGEST: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
_PRIORITY: Final = re.compile(r"priority=(-?[0-9]{1,9})")
_EXPECTED: Final = (
    "name:key or name:sha256:<64 hexadecimal digits>, behind it priority=N if it may say so, and a "
    "# before a comment"
)


@dataclass(frozen=True, slots=True)
class Keys:
    """The digests of clients' keys, with the names of their owners."""

    owners: Mapping[bytes, str] = field(repr=False)
    # by owner: the lowest priority value that it may ask for (lower is earlier)
    least: Mapping[str, int] = field(default_factory=dict[str, int])
    has_several: bool = False  # two owners or more: no answer to one may depend on another
    is_whole: bool = True  # the last line has a line break: the file is not half written

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Read a file of keys; an owner may have several, for instance while one replaces another.

        Raises:
            ConfigError: a line is something else, a key is short or occurs twice, there is none, or
                an owner has two priorities.
        """
        owners: dict[bytes, str] = {}
        least: dict[str, int | None] = {}
        for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
            if not line or line.startswith("#"):
                continue
            first, *more = line.split()
            name, _, key = first.partition(":")
            digest = _digest(key)
            priorities = [match for word in more if (match := _PRIORITY.fullmatch(word))]
            is_odd = len(more) != len(priorities) or len(priorities) > 1
            if digest is None or not _NAME.fullmatch(name) or is_odd:
                raise ConfigError(f"{source}, line {number}, is not a key: write {_EXPECTED}")
            if len(key) < LEAST:
                raise ConfigError(
                    f"{source}, line {number}: the key of {name} has {len(key)} characters, and "
                    f"{LEAST} is the least: "
                    "write a longer one"
                )
            if digest in owners:
                raise ConfigError(
                    f"{source}, line {number}, has the key of {owners[digest]} once more"
                )
            owners[digest] = name
            lowest = int(priorities[0][1]) if priorities else None
            if least.setdefault(name, lowest) != lowest:
                raise ConfigError(
                    f"{source}, line {number}, gives {name} another priority: write the same on "
                    f"each"
                )
        if not owners:
            raise ConfigError(f"{source} has no key in it, so nobody could ask: write {_EXPECTED}")
        lowest_of = {name: lowest for name, lowest in least.items() if lowest is not None}
        return cls(
            owners,
            lowest_of,
            has_several=len(set(owners.values())) > 1,
            is_whole=text.endswith("\n"),
        )

    def owner(self, key: bytes) -> str | None:
        """Return the owner of a key; None: it is wrong.

        How long it takes tells nothing of the keys: they are looked up by digests, which cannot be
        chosen.
        """
        return self.owners.get(hashlib.sha256(key).digest())

    def is_line(self, text: bytes) -> bool:
        """Return whether this is a whole line of the file: a name, a colon and a good key."""
        return b":" in text and self.owner(text.partition(b":")[2]) is not None


@dataclass(slots=True)
class Keyring:
    """The present keys; they may be replaced while requests are served.

    None: clients need no key.
    """

    keys: Keys | None = None

    def names(self) -> Collection[str]:
        """Return the names of all clients."""
        return (ANYBODY,) if self.keys is None else frozenset(self.keys.owners.values())

    def least_of(self, owner: str) -> int:
        """Return the lowest priority value that a client may ask for."""
        keys = self.keys
        return USUAL if keys is None else keys.least.get(owner, USUAL)

    def caller(self, headers: Headers) -> str:
        """Return the owner of the key in a client's headers.

        Raises:
            Unauthorized: there is none, or it is not known.
        """
        keys = self.keys
        if keys is None:
            return ANYBODY
        key = key_in(headers)
        if key is None:
            raise Unauthorized("this router wants an API key: send it as Authorization: Bearer")
        owner = keys.owner(key)
        other = first_header(headers, b"x-api-key")
        if owner is None and other is not None:
            owner = keys.owner(other)  # clients configured for both APIs send both headers
        if owner is None and any(
            keys.is_line(candidate) for candidate in (key, other) if candidate is not None
        ):
            raise Unauthorized("the API key has its name before it: send the part after the colon")
        if owner is None:
            raise Unauthorized("the API key is not one that this router knows")
        return owner


class Outbound:
    """The keys for the engines of each role, which replace the client's."""

    def __init__(self, keys: Mapping[Role, str] | None = None) -> None:
        self.change(keys or {})

    def change(self, keys: Mapping[Role, str]) -> None:
        """Send other keys from now on."""
        self._keys = dict(keys)
        self.has_keys = bool(keys)  # otherwise ``headers`` adds none

    def key_of(self, role: Role) -> str | None:
        """Return the key of a role's engines; None: they have none."""
        return self._keys.get(role)

    def headers(self, role: Role, headers: Headers) -> Headers:
        """Return the headers for an engine: with the key of its role, if there is one, and without
        the client's.
        """
        key = self._keys.get(role)
        if key is None and not headers:
            return headers
        kept = self.bare(headers)
        return kept if key is None else (*kept, (b"authorization", b"Bearer " + key.encode()))

    def bare(self, headers: Headers) -> Headers:
        """Return the headers without a key."""
        return tuple([header for header in headers if header[0] != b"authorization"])


def key_in(headers: Headers) -> bytes | None:
    """Return the key in a client's headers; clients of Anthropic's API send x-api-key."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
    return first_header(headers, b"x-api-key")


def outbound_key(text: str, source: str) -> str:
    """Read a key for engines; white space around it is dropped.

    Raises:
        ConfigError: no header can carry it.
    """
    key = text.strip()
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{source} is not an API key: write one line of printable ASCII without spaces"
        )
    return key


def _digest(key: str) -> bytes | None:
    if key.startswith("sha256:"):
        match = _DIGEST.fullmatch(key)
        return bytes.fromhex(match[1]) if match else None
    return hashlib.sha256(key.encode()).digest() if _KEY.fullmatch(key) else None
