"""Finds decode engines that get no KV cache at all, by their own counters: they compute what others
have computed.

No single answer tells that in pull mode (core/protocol/kv_transfer_check.py). But an engine counts
where its prompt tokens came from: one that was sent legs with a transfer, and whose count of tokens
from elsewhere stands still, has got nothing.
"""

from dataclasses import dataclass

from pdrelay_proxy.core.model import InstanceId


@dataclass(frozen=True, slots=True)
class _Look:
    received: float
    promised: int


class KvInflow:
    """Compares looks at engines.

    An engine may count a little before or after we see its answer begin. So of four looks in a row
    it must have counted nothing from the first to the last, for the legs between the middle two to
    have certainly got nothing.
    """

    def __init__(self) -> None:
        self._looks: dict[InstanceId, tuple[_Look, ...]] = {}  # the last three

    def look(self, instance: InstanceId, received: float | None, promised: int) -> int:
        """Return how many legs, beside those that were told before, certainly got nothing.

        ``received``: prompt tokens the engine did not compute, ever; None: it does not say.
        ``promised``: legs with a transfer that it has begun to answer, ever.
        """
        looks = self._looks.pop(instance, ())
        if received is None:
            return 0
        if looks and received < looks[-1].received:  # it was restarted
            looks = ()
        self._looks[instance] = (*looks[-2:], _Look(received, promised))
        if len(looks) < 3 or looks[0].received != received:
            return 0
        return looks[2].promised - looks[1].promised

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget the instances that are no longer known."""
        for gone in self._looks.keys() - instances:
            del self._looks[gone]
