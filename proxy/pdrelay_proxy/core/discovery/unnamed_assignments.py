"""Which assignments are of engines that are gone, so that the next engine at such an address serves
its own role.

A router knows only what it names itself, and other routers of its store may name more: in their
settings, or as pods. So it does not delete such an assignment. It writes down that it knows of no
such engine, any router that names the engine takes that back, and what has stood there for
``GRACE_S`` is deleted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from pdrelay_proxy.core.discovery.reconcile import Assignment
from pdrelay_proxy.core.fleet.target import Key

# a router that names the engine looks every few seconds, and may wait for its store
GRACE_S: Final = 30.0
AGAIN_S: Final = 600.0  # until a router doubts an assignment again that another one has spoken for
# what is in the store, and what shall be: None: nothing
Rewrite: TypeAlias = tuple[Assignment, Assignment | None]


class UnnamedAssignments:
    """One router's part. Times are seconds of its clock."""

    def __init__(self) -> None:
        # when this router has written last that it does not know the engine
        self._doubted: dict[Key, float] = {}
        # since when that, by whichever router, has stood in the store
        self._since: dict[Key, float] = {}

    def look(
        self,
        assignments: Mapping[Key, Assignment],
        is_named: Callable[[Assignment], bool | None],
        *,
        now: float,
    ) -> Sequence[Rewrite]:
        """Say what to write.

        ``is_named``: by a source of this router; None: that is not known now.
        """
        found = list[Rewrite]()
        since = dict[Key, float]()
        for key, one in assignments.items():
            named = is_named(one)
            if named and one.is_unnamed:
                found.append((one, replace(one, is_unnamed=False)))
            elif named is False and one.is_unnamed:
                # somebody's doubt is everybody's: else they take turns in it
                self._doubted[key] = now
                since[key] = self._since.get(key, now)
                if now >= since[key] + GRACE_S:
                    found.append((one, None))
            elif named is False and now >= self._doubted.get(key, now - AGAIN_S) + AGAIN_S:
                found.append((one, replace(one, is_unnamed=True)))
        self._since = since
        self._doubted = {key: at for key, at in self._doubted.items() if key in assignments}
        return found

    def written(self, one: Assignment, *, now: float) -> None:
        """What ``look`` said of an assignment is in the store."""
        if one.is_unnamed:
            self._doubted[one.key] = now
