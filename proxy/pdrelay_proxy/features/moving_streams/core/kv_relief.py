"""Which decode engines have no KV room left, and what share of their streams should go on
elsewhere.

vLLM preempts a request when no block is free, and computes all of it again: each stream of a full
engine stalls in its turn. A stream that moves takes its KV cache along (docs/moving-streams.md).
"""

from collections.abc import Mapping
from math import floor, fsum
from typing import Final

from pdrelay_proxy.core.fleet.engine_metrics import ShownLoad
from pdrelay_proxy.core.model import InstanceId

# of its KV cache an engine has free when it is relieved: what moves must not move back
_CALM: Final = 0.15
_LEAST: Final = 0.02  # of the KV cache of one engine: less room is none
_ROUNDING: Final = 1e-9  # a fifth of five streams is one


class KvRelief:
    """What the latest look at all decode engines has shown."""

    def __init__(self, above: float | None) -> None:
        """``above``: the share of its KV cache in use from which an engine is full; None: none
        is.
        """
        self._above = above
        self._preempted: dict[InstanceId, float] = {}
        # of its streams that should leave a full engine; new in each round
        self.shares: dict[InstanceId, float] = {}

    def full(self) -> frozenset[InstanceId]:
        """Return the engines that are to be relieved: no stream goes there."""
        return frozenset(self.shares)

    def take_loads(self, loads: Mapping[InstanceId, ShownLoad]) -> None:
        """Take in what all engines show that serve; one that does not show its KV cache takes no
        part.
        """
        if self._above is None:
            return
        usage = {
            name: self._usage(name, load)
            for name, load in loads.items()
            if load.kv_usage is not None
        }
        self._preempted = {name: load.preempted for name, load in loads.items()}
        self.shares = shares_to_move(usage, self._above)

    def _usage(self, name: InstanceId, load: ShownLoad) -> float:
        """Return the share of its KV cache that it needs: one that has preempted since the last
        look needs more.
        """
        before = self._preempted.get(name, load.preempted)
        return 1.0 if load.preempted > before else load.kv_usage or 0.0


def shares_to_move(usage: Mapping[InstanceId, float], above: float) -> dict[InstanceId, float]:
    """Return the share of its streams that each full engine should lose, as far as the others have
    room.

    ``usage``: of their KV caches, which are taken to be of one size, from 0 to 1.
    """
    calm = max(0.0, above - _CALM)
    full = {name: used for name, used in usage.items() if used >= above}
    room = fsum(calm - used for used in usage.values() if used < calm)
    if not full or room < _LEAST:
        return {}
    excess = fsum(used - calm for used in full.values())
    part = min(1.0, room / excess)
    return {name: part * (used - calm) / used for name, used in full.items()}


def streams_to_move(count: int, share: float) -> int:
    """Return how many of a router's streams should leave an engine, rounded up: all of them may be
    one router's.
    """
    return floor(count * share + 1 - _ROUNDING)
