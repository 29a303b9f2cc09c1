"""What to change in the registry, so that it has the engines that there should be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pdrelay_proxy.core.fleet.target import Key, Origin, Wanted


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
