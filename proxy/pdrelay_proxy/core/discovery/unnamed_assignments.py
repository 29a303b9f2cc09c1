"""Finds the role assignments of engines that are gone, so that the next engine at such an address
serves its own role.

A router knows only the engines that it names itself; other routers of its store may name more, in
their settings or as pods. So it does not delete such an assignment: it marks it as unnamed. A
router that names the engine removes the mark; an assignment whose mark is ``GRACE_S`` old is
deleted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final, TypeAlias

from pdrelay_proxy.core.discovery.store_entries import Assignment
from pdrelay_proxy.core.fleet.target import Key

# a router that names the engine checks every few seconds, and may wait for its store
GRACE_S: Final = 30.0
AGAIN_S: Final = 600.0  # after another router removed a mark, this one marks again at the earliest
# an assignment in the store, and its new value; None: delete it
Rewrite: TypeAlias = tuple[Assignment, Assignment | None]


class UnnamedAssignments:
    """One router's part. Times are seconds of its clock."""

    def __init__(self) -> None:
        # when this router last marked an assignment as unnamed
        self._doubted: dict[Key, float] = {}
        # since when an assignment has the mark, whichever router set it
        self._since: dict[Key, float] = {}

    def decide(
        self,
        assignments: Mapping[Key, Assignment],
        is_named: Callable[[Assignment], bool | None],
        *,
        now: float,
    ) -> Sequence[Rewrite]:
        """Return the changes to write to the store.

        ``is_named``: whether a source of this router names the engine; None: not known now.
        """
        rewrites = list[Rewrite]()
        since = dict[Key, float]()
        for key, assignment in assignments.items():
            is_known = is_named(assignment)
            if is_known and assignment.is_unnamed:
                rewrites.append((assignment, replace(assignment, is_unnamed=False)))
            elif is_known is False and assignment.is_unnamed:
                # a mark of any router counts as this one's: else each would set it again in turn
                self._doubted[key] = now
                since[key] = self._since.get(key, now)
                if now >= since[key] + GRACE_S:
                    rewrites.append((assignment, None))
            elif is_known is False and now >= self._doubted.get(key, -inf) + AGAIN_S:
                rewrites.append((assignment, replace(assignment, is_unnamed=True)))
        self._since = since
        self._doubted = {key: at for key, at in self._doubted.items() if key in assignments}
        return rewrites

    def written(self, assignment: Assignment, *, now: float) -> None:
        """Note that the store has a change that ``decide`` returned."""
        if assignment.is_unnamed:
            self._doubted[assignment.key] = now
