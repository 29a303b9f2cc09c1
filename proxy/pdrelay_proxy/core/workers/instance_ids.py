"""Which engine has which id in all workers of a router, and what an operator has ordered for it.

Every line is written once, after all that were written before, and read by every worker: so all of them come to the
same roster, a worker that is started later too.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import TypeAlias

from pdrelay_proxy.core.model import EngineRole, InstanceId, Role


class Verb(StrEnum):
    """What a line says."""

    NAME = auto()  # an engine that has come gets the next id of its role
    CLOSE = auto()  # nobody wants it any more: if its address comes again, it is another engine
    DRAIN = auto()
    MOVE = auto()  # drain it, and move its streams
    UNDRAIN = auto()
    TURNED = auto()  # it serves a role, and no worker has anything of the old one left, or its time is over
    REMOVE = auto()  # by hand, what the settings name: a worker that starts later does not bring it back


Line: TypeAlias = tuple[Verb, str]  # NAME: the key of an engine; TURNED: its id and its role; else its id


@dataclass(slots=True)
class _NamedEngine:
    key: str
    number: int
    order: Verb | None = None  # DRAIN, MOVE or REMOVE
    role: EngineRole | None = None  # since it has turned


def key_of(role: Role, authority: str, rank: int | None, source: str, identity: str) -> str:
    """Return what makes two engines the same in all workers.

    ``identity``: a pod's uid, or the entry's addition; without it (settings, old entries), an engine that goes and
    comes again is told from the one before by CLOSE alone.
    """
    return f"{role} {authority} {rank} {source} {identity}"


def turned_text(name: InstanceId, role: EngineRole) -> str:
    """Write which engine has turned, and to what."""
    return f"{name} {role}"


def turned_of(text: str) -> tuple[InstanceId, EngineRole]:
    """Read the same."""
    name, _, role = text.partition(" ")
    return InstanceId(name), EngineRole(role)


class InstanceIds:
    """The engines that are named and not closed."""

    def __init__(self) -> None:
        self._keys: dict[str, InstanceId] = {}
        self._entries: dict[InstanceId, _NamedEngine] = {}
        self._counts: Counter[str] = Counter()  # ids ever given, by role

    def apply(self, line: Line) -> None:
        """Take in a line; what it says of an engine that is closed is too late."""
        verb, text = line
        if verb is Verb.NAME:
            role = text.partition(" ")[0]
            number = self._counts[role]
            if (before := self._keys.get(text)) is not None:
                del self._entries[before]
            self._keys[text] = InstanceId(f"{role}-{number}")
            self._entries[self._keys[text]] = _NamedEngine(text, number)
            self._counts[role] += 1
        elif (entry := self._entries.get(name := InstanceId(text.partition(" ")[0]))) is None:
            return
        elif verb is Verb.TURNED:
            entry.role = turned_of(text)[1]
        elif verb is Verb.CLOSE:
            del self._entries[name], self._keys[entry.key]
        else:
            entry.order = None if verb is Verb.UNDRAIN else verb

    def name(self, key: str) -> InstanceId | None:
        """Return the id of an engine; None: it has none yet."""
        return self._keys.get(key)

    def number(self, key: str) -> int | None:
        """Return the number in it."""
        name = self._keys.get(key)
        return None if name is None else self._entries[name].number

    def order(self, name: InstanceId) -> Verb | None:
        """Return what was ordered for it last, if it still holds."""
        entry = self._entries.get(name)
        return None if entry is None else entry.order

    def role(self, name: InstanceId) -> EngineRole | None:
        """Return what it has turned to; None: it has not turned."""
        entry = self._entries.get(name)
        return None if entry is None else entry.role

    def is_removed(self, key: str) -> bool:
        """Tell whether an operator has taken out what the settings name there."""
        name = self._keys.get(key)
        return name is not None and self._entries[name].order is Verb.REMOVE
