"""Which engines there should be: the union of what several sources say, against what the router
has.

A source is always heard as a whole, so a lost message costs time and never an engine that is gone.
What a source said last holds until it says something else: one that cannot be reached takes nothing
away.
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

# engines of one source; what is beyond is left out, and said, until others have gone
MOST: Final = 50_000
# engines that are compared with those of before in one step: some tenths of a millisecond
_READ_AT_ONCE: Final = 200
# places that have changed and are taken in at once: what follows takes 20 times as long
_TAKEN_AT_ONCE: Final = 20
_PLAIN: Final = re.compile(r"[A-Za-z0-9.-]")
TEXT_MOST: Final = 64 * 1024  # bytes of an entry of the store; ours have some hundred
_SHOWN_MOST: Final = 200  # characters of what another program has written that a sentence repeats
_NAME_MOST: Final = 200  # characters of an entry's name; Kubernetes takes 253


@dataclass(frozen=True, slots=True)
class View:
    """All that one source has said last. Times are seconds of a clock that only rises."""

    engines: Mapping[Key, Wanted] = field(default_factory=dict[Key, Wanted])
    generation: int = 0  # counts the changes; 0: never heard
    heard: float = 0.0  # when it was last known to be so
    is_synced: bool = False  # the source has been heard as a whole
    # beyond the bound; the first comes next
    left_out: Mapping[Key, Wanted] = field(default_factory=dict[Key, Wanted])


@dataclass(frozen=True, slots=True)
class Freshness:
    """How well a source is known."""

    source: EngineSource
    is_synced: bool
    age_s: float  # for which nobody has known whether its view is still so
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
        """Take in all that a source says; return the places that differ from what it said
        before.
        """
        changed = list[Key]()
        for some in self.replace_in_steps(source, engines, now=now):
            changed.extend(some)
        return changed

    def replace_in_steps(
        self, source: EngineSource, engines: Iterable[Wanted], *, now: float
    ) -> Generator[Sequence[Key]]:
        """Take in the same in steps of a millisecond or so, and yield the places that differ with
        each.

        First go those where no engine is any more, which makes room at an address. The source has
        been heard as a whole when all steps are done; all of them are of one generation.
        """
        old = self.views[source]
        found = yield from _by_key(engines)
        left_out = dict[Key, Wanted]()
        if len(found) > self._most:  # what is there stays
            order = sorted(found, key=lambda key: (key not in old.engines, found[key].leaves))
            left_out = {key: found.pop(key) for key in order[self._most :]}
        gone = [key for key in old.engines if key not in found]
        news = list[Key]()
        generation = old.generation + 1
        for number, (key, wanted) in enumerate(found.items(), start=1):
            before = old.engines.get(key)
            if before is not wanted and before != wanted:
                news.append(key)
            if number % _READ_AT_ONCE == 0:
                yield ()
        taken = dict[Key, Wanted]()
        for keys in (gone, news):
            for begin in range(0, len(keys), _TAKEN_AT_ONCE):
                some = keys[begin : begin + _TAKEN_AT_ONCE]
                # the first step, or one after a change of some places
                if self.views[source].engines is not taken:
                    taken = dict(self.views[source].engines)
                for key in some:
                    if key in found:
                        taken[key] = found[key]
                    else:
                        taken.pop(key, None)
                self.views[source] = replace(
                    self.views[source], engines=taken, generation=generation
                )
                yield some
        is_news = bool(gone or news) or not old.is_synced
        self.views[source] = View(
            self.views[source].engines,
            generation if is_news else old.generation,
            now,
            is_synced=True,
            left_out=left_out,
        )

    def change(
        self, source: EngineSource, engines: Mapping[Key, Wanted | None], *, now: float
    ) -> Sequence[Key]:
        """Take in what a source says of some places (None: no engine is there any more); return
        those that differ.

        What is beyond the bound is left out until there is room.
        """
        old = self.views[source]
        found = dict(old.engines)
        left_out = dict(old.left_out)
        changed = list[Key]()
        for key, wanted in engines.items():
            left_out.pop(key, None)
            if wanted == found.get(key):
                continue
            if wanted is None:
                del found[key]
            elif key not in found and len(found) >= self._most:
                left_out[key] = wanted
                continue
            else:
                found[key] = wanted
            changed.append(key)
        while left_out and len(found) < self._most:
            key = next(iter(left_out))
            found[key] = left_out.pop(key)
            changed.append(key)
        engines_now, generation = (
            (found, old.generation + 1) if changed else (old.engines, old.generation)
        )
        self.views[source] = replace(
            old, engines=engines_now, generation=generation, heard=now, left_out=left_out
        )
        return changed

    def heard(self, source: EngineSource, *, now: float) -> None:
        """Note that what a source said last is still so."""
        self.views[source] = replace(self.views[source], heard=now)

    def freshness(self, *, now: float) -> Sequence[Freshness]:
        """Say of each source how well it is known."""
        return [
            Freshness(
                name, view.is_synced, max(0.0, now - view.heard), view.generation, len(view.engines)
            )
            for name, view in self.views.items()
        ]

    @property
    def missing(self) -> Sequence[EngineSource]:
        """List the sources that have not been heard yet."""
        return [name for name, view in self.views.items() if not view.is_synced]

    def desired(self) -> Mapping[Key, Origin]:
        """Return the union. An engine leaves if any source says that it does."""
        return self.desired_at(
            dict.fromkeys(key for view in self.views.values() for key in view.engines)
        )

    def desired_at(self, keys: Iterable[Key]) -> Mapping[Key, Origin]:
        """Return the same for some places."""
        found: dict[Key, Origin] = {}
        for source, view in self.views.items():
            for key in keys:
                if (wanted := view.engines.get(key)) is None:
                    continue
                if (first := found.get(key)) is None:
                    found[key] = Origin(source, view.generation, wanted)
                elif wanted.leaves and first.wanted is not None:
                    moves = wanted.moves or first.wanted.moves
                    found[key] = replace(
                        first, wanted=replace(first.wanted, leaves=True, moves=moves)
                    )
        return found


def _by_key(engines: Iterable[Wanted]) -> Generator[Sequence[Key], None, dict[Key, Wanted]]:
    """Sort engines by place, in steps: of two at one address the one that stays counts, else the
    one named last.
    """
    leaving = dict[Key, Wanted]()
    staying = dict[Key, Wanted]()
    for number, one in enumerate(engines, start=1):
        (leaving if one.leaves else staying)[one.key] = one
        if number % _READ_AT_ONCE == 0:
            yield ()
    return {**leaving, **staying}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do; ``key`` tells where, ``origin`` what is true afterwards."""

    verb: Literal["add", "drain", "undrain", "adopt", "remove"]
    key: Key
    origin: Origin


def diff(desired: Mapping[Key, Origin], current: Mapping[Key, Origin]) -> Sequence[Action]:
    """Say what makes the registry (``current``: without what retires) what it should be; twice
    changes nothing more.

    Removals come first, so that an address is free for the engine that has taken it. Engines that
    discovery has not brought are left alone, and so is what an operator did to one since.
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
            # it is of the generation in which it came
            if present is not None and present.source is origin.source:
                origin = replace(origin, generation=present.generation)
            rest.append(Action(verb, key, origin))
    return [*gone, *rest]


def _is_other(before: Origin, present: Wanted, origin: Origin | None) -> bool:
    """Tell whether what is there must go: nobody wants it, or something else at its address.

    Of two entries of one source, one that lacks its addition is another than one that has it:
    routers that have seen none of them in between would else keep the engine of before, and those
    that have, not.
    """
    if origin is None or (wanted := origin.wanted) is None:
        return True
    if before.source is origin.source and present.added != wanted.added:
        return True
    if present.identity and wanted.identity and present.identity != wanted.identity:
        return True
    return present.target != wanted.target


def _verb(
    origin: Origin, present: Origin | None
) -> Literal["add", "drain", "undrain", "adopt"] | None:
    if origin.wanted is None:
        return None
    if present is None:
        return None if origin.wanted.leaves else "add"
    if present.wanted is None:  # static: it is there whoever else wants it
        return None
    if origin.wanted.leaves != present.wanted.leaves:
        return "drain" if origin.wanted.leaves else "undrain"
    if origin.wanted.leaves and origin.wanted.moves and not present.wanted.moves:
        return "drain"
    is_known = origin.source is present.source and origin.wanted == present.wanted
    return None if is_known else "adopt"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an engine serves in place of the role that its source names, for all routers of a
    store.
    """

    key: Key  # as its source names it
    serves: EngineRole
    identity: str = ""  # of the engine that is meant (a pod's uid); empty: whatever is there
    is_unnamed: bool = False  # a router knows of no such engine (unnamed_assignments.py)

    def means(self, identity: str) -> bool:
        """Tell whether an engine at its place is meant."""
        return not (self.identity and identity) or self.identity == identity


class _AssignmentEntry(msgspec.Struct, omit_defaults=True):
    """An assignment in the store. Routers that know of none read no engine in it."""

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
    """Name the entry of an engine, in letters that every store takes."""
    plain = "".join(c if _PLAIN.fullmatch(c) else f"_{ord(c):02x}" for c in key.authority)
    name = f"{key.role}.{plain}"
    return (
        name
        if len(name) <= _NAME_MOST
        else f"{key.role}.{sha256(key.authority.encode()).hexdigest()}"
    )


def entry_of(wanted: Wanted) -> str:
    """Write an engine for the store."""
    entry = _StoreEntry(wanted.role, wanted.target.text, wanted.leaves, wanted.moves, wanted.added)
    return msgspec.json.encode(entry).decode()


def assignment_name(key: Key) -> str:
    """Name the entry of an assignment."""
    return f"turn.{entry_name(key)}"


def assignment_of(found: Assignment) -> str:
    """Write an assignment for the store."""
    entry = _AssignmentEntry(
        found.key.role, found.key.authority, found.serves, found.identity, found.is_unnamed
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
    """Return an entry as a text, from which ``bytes_of_entry`` makes the same bytes."""
    return data.decode("utf-8", "surrogateescape")


def shown_name(name: str) -> str:
    """Return the name of an entry as a sentence can repeat it: on one line, in characters that
    every log takes.
    """
    return name if name.isprintable() and len(name) <= _SHOWN_MOST else ascii(name[:_SHOWN_MOST])


def read_entry(text: str) -> Wanted | Assignment:
    """Read an engine, or an assignment, from the store. Raises AddressError: it is neither."""
    data = bytes_of_entry(text)
    try:
        turned = decode(data, _AssignmentEntry)
    except NotJson:
        return _read_engine(data)
    key = Key(turned.declared, Address.parse(turned.at).authority)
    return Assignment(key, turned.serves, turned.identity, turned.unnamed)


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
