"""How long owners wait for slots of a host buffer while failed ones keep theirs.

Something may still write into the slots of a failed owner, and where a peer hangs that never ends.
So there is a limit for those that wait. A turn costs the same however many they are.
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT", bound=Hashable)


class KeptSlots(Generic[OwnerT]):
    """Who waits, and who keeps slots; ``timeout`` (s) is how long one may wait for the others."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # since when; in the order of asking, emptied from the front
        self._waiting: OrderedDict[OwnerT, float] = OrderedDict()
        self._keepers: set[OwnerT] = set()
        self._kept_since = inf  # for as long as there have been keepers, one or another

    def wait(self, owner: OwnerT, *, now: float) -> None:
        """An owner waits for slots, until :meth:`forget`."""
        self._waiting[owner] = now

    def keep(self, owner: OwnerT) -> None:
        """An owner has failed and keeps its slots, until :meth:`forget`."""
        self._keepers.add(owner)

    def forget(self, owner: OwnerT) -> None:
        """An owner has got its slots, or is over."""
        self._waiting.pop(owner, None)
        self._keepers.discard(owner)

    def take_overdue(self, *, now: float) -> list[OwnerT]:
        """Forget those that have waited for too long, and return them in the order of asking."""
        self._kept_since = min(self._kept_since, now) if self._keepers else inf
        overdue: list[OwnerT] = []
        while (due := self.next()) is not None and due <= now:
            overdue.append(self._waiting.popitem(last=False)[0])
        return overdue

    def next(self) -> float | None:
        """Return when the first will have waited for too long; None: nothing keeps it waiting."""
        since = max(next(iter(self._waiting.values()), inf), self._kept_since)
        return since + self._timeout if since < inf else None
