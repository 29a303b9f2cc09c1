"""Limits the engines that a metric names: some clients never forget a label's value."""

import os
from collections.abc import Collection
from typing import Any, Final, TypeVar

from prometheus_client import Counter, Gauge

# engines that a metric shows where it can forget the others: each restarts under another id
PEERS_SHOWN: Final = 64
MOST_NAMED: Final = 1024  # engines, where it cannot

LabelsT = TypeVar("LabelsT")


class PeerNames:
    """Admits every engine where series can be forgotten, and else the first ones.

    Files that several API servers share (``PROMETHEUS_MULTIPROC_DIR``) keep each series, and so
    does Ray. Who reaches the port of a decode engine can name prefill engines without end.
    """

    def __init__(self, metric: Any) -> None:
        is_shared = (
            "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ
        )
        self._has_remove = isinstance(metric, (Counter, Gauge))  # Ray's have none
        self.can_forget = self._has_remove and not is_shared
        self._named = set[str]()

    def admit(self, peer: str) -> bool:
        """Tell whether an engine may be named."""
        if self.can_forget or peer in self._named:
            return True
        if len(self._named) >= MOST_NAMED:
            return False
        self._named.add(peer)
        return True

    def to_remove(self, shown: Collection[LabelsT]) -> LabelsT | None:
        """Return the first of the shown series if they are too many, and one can be removed."""
        is_one_too_many = len(shown) > PEERS_SHOWN and self._has_remove
        return next(iter(shown)) if is_one_too_many else None
