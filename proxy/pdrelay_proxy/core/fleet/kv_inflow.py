"""Finds decode engines that get no KV cache at all, by their own counters: they compute what others
have computed.

No single answer tells that in pull mode (core/protocol/kv_transfer_check.py). But an engine counts
where its prompt tokens came from: one that was sent legs with a transfer, and whose count of tokens
from elsewhere stands still, has got nothing.
"""

from dataclasses import dataclass

from pdrelay_proxy.core.model import InstanceId


@dataclass(frozen=True, slots=True)
class _Reading:
    received: float
    promised: int


class KvInflow:
    """Compares looks at engines.

    An engine may count a little before or after we see its answer begin. So of four looks in a row
    it must have counted nothing from the first to the last, for the legs between the middle two to
    have certainly got nothing.
    """

    def __init__(self) -> None:
        self._readings: dict[InstanceId, tuple[_Reading, ...]] = {}  # the last three

    def missing_legs(self, instance: InstanceId, received: float | None, promised: int) -> int:
        """Return how many legs, beside those that were returned before, certainly got nothing.

        ``received``: prompt tokens the engine did not compute, ever; None: it does not say.
        ``promised``: legs with a transfer that it has begun to answer, ever.
        """
        readings = self._readings.pop(instance, ())
        if received is None:
            return 0
        if readings and received < readings[-1].received:  # it was restarted
            readings = ()
        self._readings[instance] = (*readings[-2:], _Reading(received, promised))
        if len(readings) < 3 or readings[0].received != received:
            return 0
        return readings[2].promised - readings[1].promised

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget the instances that are no longer known."""
        for gone in self._readings.keys() - instances:
            del self._readings[gone]
