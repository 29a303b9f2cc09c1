"""Deadlines by key: the next one, and those that have passed, without a scan of all.

A heap holds one entry for each deadline that was ever the earliest known of its key. A later
deadline of the same key only changes the index; its entry moves when it comes to the top. Every
operation costs O(log n), averaged.
"""

import heapq
import itertools
from collections.abc import Hashable
from math import inf
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

FEW = 64  # entries that are never compacted


def earliest(*dues: float | None) -> float | None:
    """Return the earliest of some times; None, and infinity, stand for none."""
    return min((due for due in dues if due is not None and due < inf), default=None)


class Deadlines(Generic[KeyT]):
    """The deadline of each key (s, monotonic clock); one at infinity is none."""

    def __init__(self) -> None:
        self._due: dict[KeyT, float] = {}
        self._heap: list[tuple[float, int, KeyT]] = []  # the number keeps equal deadlines in order
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._due)

    @property
    def entries(self) -> int:
        """How long the heap is, stale entries included."""
        return len(self._heap)

    def set(self, key: KeyT, at: float) -> None:
        """Set or move the deadline of a key."""
        if at == inf:
            self.discard(key)
            return
        was = self._due.get(key)
        self._due[key] = at
        if was is None or at < was:
            heapq.heappush(self._heap, (at, next(self._numbers), key))
            self._compact()

    def discard(self, key: KeyT) -> None:
        """Forget the deadline of a key, if it has one."""
        if self._due.pop(key, None) is not None:
            self._compact()

    def next(self) -> float | None:
        """Return the earliest deadline; None when there is none."""
        self._clean()
        return self._heap[0][0] if self._heap else None

    def take_due(self, *, now: float) -> list[KeyT]:
        """Forget the deadlines that have passed, and return their keys, the earliest first."""
        due: list[KeyT] = []
        while (at := self.next()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            due.append(key)
        return due

    def _clean(self) -> None:
        """Have a true entry at the top."""
        while self._heap:
            at, _, key = self._heap[0]
            due = self._due.get(key)
            if due == at:
                return
            if due is None or due < at:  # forgotten, or an earlier entry stands for it
                heapq.heappop(self._heap)
            else:
                heapq.heapreplace(self._heap, (due, next(self._numbers), key))

    def _compact(self) -> None:
        """Drop stale entries once they are twice as many as the keys: the heap stays small."""
        if len(self._heap) > 3 * len(self._due) + FEW:
            self._heap = [(at, number, key) for number, (key, at) in enumerate(self._due.items())]
            heapq.heapify(self._heap)
            self._numbers = itertools.count(len(self._heap))
