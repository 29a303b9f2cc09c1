"""Limits the engines that a metric names: some clients never forget a label's value."""

import os
from typing import Any, Final

from prometheus_client import Counter, Gauge

MOST_NAMED: Final = 1024  # engines, each of which restarts under another id


class PeerNames:
    """Admits every engine where series can be forgotten, and else the first ones.

    Files that several API servers share (``PROMETHEUS_MULTIPROC_DIR``) keep each series, and so
    does Ray. Who reaches the port of a decode engine can name prefill engines without end.
    """

    def __init__(self, metric: Any) -> None:
        is_shared = (
            "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ
        )
        self.can_forget = isinstance(metric, (Counter, Gauge)) and not is_shared
        self._named = set[str]()

    def admit(self, peer: str) -> bool:
        """Tell whether an engine may be named."""
        if self.can_forget or peer in self._named:
            return True
        if len(self._named) >= MOST_NAMED:
            return False
        self._named.add(peer)
        return True
