"""The entries of a store: engines that operators added, and roles that they assigned."""

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import msgspec

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.target import Key, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.errors import AddressError

MAX_ENTRY_BYTES: Final = 64 * 1024  # bytes of an entry; ours have some hundred
_PLAIN: Final = re.compile(r"[A-Za-z0-9.-]")
_MAX_SHOWN_CHARS: Final = 200  # characters of another program's text that an error quotes
_MAX_NAME_CHARS: Final = 200  # characters of an entry's name; Kubernetes takes 253


@dataclass(frozen=True, slots=True)
class Assignment:
    """The role that an engine serves in place of its source's, for all routers of a store."""

    key: Key  # by its source's name and role
    serves: EngineRole
    identity: str = ""  # of the engine (a pod's uid); empty: any engine at the address
    is_unnamed: bool = False  # a router knows no such engine (unnamed_assignments.py)

    def means(self, identity: str) -> bool:
        """Return whether the assignment is for the engine with this identity at its address."""
        return not (self.identity and identity) or self.identity == identity


class _AssignmentEntry(msgspec.Struct, omit_defaults=True):
    """An assignment in the store. A router without this feature reads no engine in it."""

    declared: Role
    at: str
    serves: EngineRole
    identity: str = ""
    unnamed: bool = False


class _StoreEntry(msgspec.Struct, omit_defaults=True):
    """An engine in the store; unknown fields are another version's."""

    role: Role
    target: str
    leaves: bool = False
    moves: bool = False
    added: str = ""


def entry_name(key: Key) -> str:
    """Return the name of an engine's entry, in letters that every store allows."""
    plain = "".join(c if _PLAIN.fullmatch(c) else f"_{ord(c):02x}" for c in key.authority)
    name = f"{key.role}.{plain}"
    return (
        name
        if len(name) <= _MAX_NAME_CHARS
        else f"{key.role}.{sha256(key.authority.encode()).hexdigest()}"
    )


def entry_of(wanted: Wanted) -> str:
    """Return the entry of an engine."""
    entry = _StoreEntry(wanted.role, wanted.target.text, wanted.leaves, wanted.moves, wanted.added)
    return msgspec.json.encode(entry).decode()


def assignment_name(key: Key) -> str:
    """Return the name of an assignment's entry."""
    return f"turn.{entry_name(key)}"


def assignment_of(assignment: Assignment) -> str:
    """Return the entry of an assignment."""
    entry = _AssignmentEntry(
        assignment.key.role,
        assignment.key.authority,
        assignment.serves,
        assignment.identity,
        assignment.is_unnamed,
    )
    return msgspec.json.encode(entry).decode()


def bytes_of_entry(text: str) -> bytes:
    """Return the bytes of an entry, which another program may have written; raises AddressError: it
    is too long.

    Bytes that are not UTF-8 are lone surrogates in the text (PEP 383).
    """
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > MAX_ENTRY_BYTES:
        raise AddressError(f"it has more than {MAX_ENTRY_BYTES} bytes, and no engine has so many")
    return data


def text_of_entry(data: bytes) -> str:
    """Return an entry as text, which ``bytes_of_entry`` turns into the same bytes."""
    return data.decode("utf-8", "surrogateescape")


def shown_name(name: str) -> str:
    """Return an entry's name for an error: on one line, in characters that every log can have."""
    return (
        name
        if name.isprintable() and len(name) <= _MAX_SHOWN_CHARS
        else ascii(name[:_MAX_SHOWN_CHARS])
    )


def read_entry(text: str) -> Wanted | Assignment:
    """Parse an engine, or an assignment, of the store. Raises AddressError: it is neither."""
    data = bytes_of_entry(text)
    try:
        entry = decode(data, _AssignmentEntry)
    except NotJson:
        return _read_engine(data)
    key = Key(entry.declared, Address.parse(entry.at).authority)
    return Assignment(key, entry.serves, entry.identity, entry.unnamed)


def _read_engine(data: bytes) -> Wanted:
    try:
        entry = decode(data, _StoreEntry)
    except NotJson as exc:
        example = '{"role":"decode","target":"http://10.0.0.7:8000"}'
        raise AddressError(f"it is no engine ({exc}): an entry looks like {example}") from exc
    return Wanted(
        entry.role,
        Target.parse(entry.target),
        leaves=entry.leaves,
        moves=entry.moves,
        added=entry.added,
    )
