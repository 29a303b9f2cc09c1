"""Which engines there should be: the union of several sources, compared with the router's.

A source always sends whole views, so a lost message costs time but never keeps an engine that is
gone. A source's latest view holds until its next: one that cannot be reached removes nothing.
"""

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final, Literal

import msgspec

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.target import EngineSource, Key, Origin, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.errors import AddressError

# engines of one source; more are left out, and logged, until others have gone
MOST: Final = 50_000
# engines compared with the old view in one step: some tenths of a millisecond
_READ_AT_ONCE: Final = 200
# changed addresses applied in one step: the changes that follow take 20 times as long
_APPLIED_AT_ONCE: Final = 20
_PLAIN: Final = re.compile(r"[A-Za-z0-9.-]")
TEXT_MOST: Final = 64 * 1024  # bytes of an entry of the store; ours have some hundred
_SHOWN_MOST: Final = 200  # characters of another program's text that an error quotes
_NAME_MOST: Final = 200  # characters of an entry's name; Kubernetes takes 253


@dataclass(frozen=True, slots=True)
class View:
    """The latest view of a source. Times are seconds of a monotonic clock."""

    engines: Mapping[Key, Wanted] = field(default_factory=dict[Key, Wanted])
    generation: int = 0  # counts changes; 0: never heard
    heard: float = 0.0  # when the view was last confirmed
    is_synced: bool = False  # a whole view has been received
    # beyond the limit; the first is next when there is room
    left_out: Mapping[Key, Wanted] = field(default_factory=dict[Key, Wanted])


@dataclass(frozen=True, slots=True)
class Freshness:
    """How recent the view of a source is."""

    source: EngineSource
    is_synced: bool
    age_s: float  # since its view was last confirmed
    generation: int
    engines: int


class Sources:
    """The views of all sources of this router."""

    def __init__(self, names: Iterable[EngineSource], *, now: float, most: int = MOST) -> None:
        self._most = most  # engines of one source
        self.views = {
            name: View(heard=now) for name in sorted(names, key=tuple(EngineSource).index)
        }

    def replace(
        self, source: EngineSource, engines: Iterable[Wanted], *, now: float
    ) -> Sequence[Key]:
        """Replace the view of a source; return the addresses that differ from the old view."""
        changed = list[Key]()
        for keys in self.replace_in_steps(source, engines, now=now):
            changed.extend(keys)
        return changed

    def replace_in_steps(
        self, source: EngineSource, engines: Iterable[Wanted], *, now: float
    ) -> Generator[Sequence[Key]]:
        """Replace a view in steps of about a millisecond, and yield the addresses that differ with
        each.

        Addresses that lost their engine come first, which makes room. After the last step the
        source counts as received; all steps are of one generation.
        """
        old = self.views[source]
        engines_by_key = yield from _by_key(engines)
        left_out = dict[Key, Wanted]()
        if len(engines_by_key) > self._most:  # present engines stay
            order = sorted(
                engines_by_key, key=lambda key: (key not in old.engines, engines_by_key[key].leaves)
            )
            left_out = {key: engines_by_key.pop(key) for key in order[self._most :]}
        gone = [key for key in old.engines if key not in engines_by_key]
        differing = list[Key]()
        generation = old.generation + 1
        for number, (key, wanted) in enumerate(engines_by_key.items(), start=1):
            before = old.engines.get(key)
            if before is not wanted and before != wanted:
                differing.append(key)
            if number % _READ_AT_ONCE == 0:
                yield ()
        applied = dict[Key, Wanted]()
        for keys in (gone, differing):
            for begin in range(0, len(keys), _APPLIED_AT_ONCE):
                step_keys = keys[begin : begin + _APPLIED_AT_ONCE]
                # the first step, or a step after ``change``
                if self.views[source].engines is not applied:
                    applied = dict(self.views[source].engines)
                for key in step_keys:
                    if key in engines_by_key:
                        applied[key] = engines_by_key[key]
                    else:
                        applied.pop(key, None)
                self.views[source] = replace(
                    self.views[source], engines=applied, generation=generation
                )
                yield step_keys
        is_changed = bool(gone or differing) or not old.is_synced
        self.views[source] = View(
            self.views[source].engines,
            generation if is_changed else old.generation,
            now,
            is_synced=True,
            left_out=left_out,
        )

    def change(
        self, source: EngineSource, engines: Mapping[Key, Wanted | None], *, now: float
    ) -> Sequence[Key]:
        """Change a view at some addresses (None: the engine is gone); return those that differ.

        Engines beyond the limit are left out until there is room.
        """
        old = self.views[source]
        engines_by_key = dict(old.engines)
        left_out = dict(old.left_out)
        changed = list[Key]()
        for key, wanted in engines.items():
            left_out.pop(key, None)
            if wanted == engines_by_key.get(key):
                continue
            if wanted is None:
                del engines_by_key[key]
            elif key not in engines_by_key and len(engines_by_key) >= self._most:
                left_out[key] = wanted
                continue
            else:
                engines_by_key[key] = wanted
            changed.append(key)
        while left_out and len(engines_by_key) < self._most:
            key = next(iter(left_out))
            engines_by_key[key] = left_out.pop(key)
            changed.append(key)
        engines_now, generation = (
            (engines_by_key, old.generation + 1) if changed else (old.engines, old.generation)
        )
        self.views[source] = replace(
            old, engines=engines_now, generation=generation, heard=now, left_out=left_out
        )
        return changed

    def heard(self, source: EngineSource, *, now: float) -> None:
        """Note that the latest view of a source is still right."""
        self.views[source] = replace(self.views[source], heard=now)

    def freshness(self, *, now: float) -> Sequence[Freshness]:
        """Return for each source how recent its view is."""
        return [
            Freshness(
                name, view.is_synced, max(0.0, now - view.heard), view.generation, len(view.engines)
            )
            for name, view in self.views.items()
        ]

    @property
    def missing(self) -> Sequence[EngineSource]:
        """The sources that have not been received yet."""
        return [name for name, view in self.views.items() if not view.is_synced]

    def desired(self) -> Mapping[Key, Origin]:
        """Return the union of all views. An engine leaves if any source says so."""
        return self.desired_at(
            dict.fromkeys(key for view in self.views.values() for key in view.engines)
        )

    def desired_at(self, keys: Iterable[Key]) -> Mapping[Key, Origin]:
        """Return the same for some addresses."""
        origins: dict[Key, Origin] = {}
        for source, view in self.views.items():
            for key in keys:
                if (wanted := view.engines.get(key)) is None:
                    continue
                if (first := origins.get(key)) is None:
                    origins[key] = Origin(source, view.generation, wanted)
                elif wanted.leaves and first.wanted is not None:
                    moves = wanted.moves or first.wanted.moves
                    origins[key] = replace(
                        first, wanted=replace(first.wanted, leaves=True, moves=moves)
                    )
        return origins


def _by_key(engines: Iterable[Wanted]) -> Generator[Sequence[Key], None, dict[Key, Wanted]]:
    """Index engines by address, in steps. Of two at one address, the one that stays counts, else
    the later.
    """
    leaving = dict[Key, Wanted]()
    staying = dict[Key, Wanted]()
    for number, engine in enumerate(engines, start=1):
        (leaving if engine.leaves else staying)[engine.key] = engine
        if number % _READ_AT_ONCE == 0:
            yield ()
    return {**leaving, **staying}


@dataclass(frozen=True, slots=True)
class Action:
    """One change of the registry; ``key``: where, ``origin``: the origin of the engine after it."""

    verb: Literal["add", "drain", "undrain", "adopt", "remove"]
    key: Key
    origin: Origin


def diff(desired: Mapping[Key, Origin], current: Mapping[Key, Origin]) -> Sequence[Action]:
    """Return the actions that make the registry (``current``: without retiring engines) as desired;
    a second call returns none.

    Removals come first, so that an address is free for its new engine. Engines of the settings are
    left alone, and so are an operator's later changes to an engine.
    """
    gone = list[Action]()
    rest = list[Action]()
    for key, origin in current.items():
        if origin.wanted is not None and _is_other(origin, origin.wanted, desired.get(key)):
            gone.append(Action("remove", key, origin))
    removed = {action.key for action in gone}
    for key, origin in desired.items():
        present = None if key in removed else current.get(key)
        if (verb := _verb(origin, present)) is not None:
            # it keeps the generation in which it came
            if present is not None and present.source is origin.source:
                origin = replace(origin, generation=present.generation)
            rest.append(Action(verb, key, origin))
    return [*gone, *rest]


def _is_other(before: Origin, current: Wanted, origin: Origin | None) -> bool:
    """Return whether the present engine must go: no source names it, or another one is at its
    address.

    Entries of one source with and without an addition's id are different engines: otherwise routers
    that missed the state in between would keep the old engine, and others would not.
    """
    if origin is None or (wanted := origin.wanted) is None:
        return True
    if before.source is origin.source and current.added != wanted.added:
        return True
    if current.identity and wanted.identity and current.identity != wanted.identity:
        return True
    return current.target != wanted.target


def _verb(
    origin: Origin, present: Origin | None
) -> Literal["add", "drain", "undrain", "adopt"] | None:
    if origin.wanted is None:
        return None
    if present is None:
        return None if origin.wanted.leaves else "add"
    if present.wanted is None:  # of the settings: it stays, whatever sources say
        return None
    if origin.wanted.leaves != present.wanted.leaves:
        return "drain" if origin.wanted.leaves else "undrain"
    if origin.wanted.leaves and origin.wanted.moves and not present.wanted.moves:
        return "drain"
    is_known = origin.source is present.source and origin.wanted == present.wanted
    return None if is_known else "adopt"


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
        if len(name) <= _NAME_MOST
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
    if len(data) > TEXT_MOST:
        raise AddressError(f"it has more than {TEXT_MOST} bytes, and no engine has so many")
    return data


def text_of_entry(data: bytes) -> str:
    """Return an entry as text, which ``bytes_of_entry`` turns into the same bytes."""
    return data.decode("utf-8", "surrogateescape")


def shown_name(name: str) -> str:
    """Return an entry's name for an error: on one line, in characters that every log can have."""
    return name if name.isprintable() and len(name) <= _SHOWN_MOST else ascii(name[:_SHOWN_MOST])


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
