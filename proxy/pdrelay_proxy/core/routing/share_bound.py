"""A bound for what one engine gets while revisions are mixed, whatever a cache or a session asks
for.

``group_weights`` bounds what a revision gets. Within it, a policy that looks for caches or sessions
sends some engines more than others. So each engine has a token bucket: of any R requests in a row
it gets at most ``EACH`` times its fair share, R divided by the engines of its role, and ``BURST``
more. An engine that has no request now is not overloaded by the next one, which may go there in any
case.
"""

from collections.abc import Sequence, Set
from typing import Final, TypeVar

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId
from pdrelay_proxy.core.routing.group_weights import FairRates

# requests; sessions come unevenly, and with 4 three times as many leave their engine
BURST: Final = 8.0
# names that something is kept for, also if engines serve fewer, or do not say
_LEAST_MODELS: Final = 64
_MOST_MODELS: Final = 512  # however many engines serve: clients can think of models without end
T = TypeVar("T")
_NONE: Final = frozenset[InstanceId]()


class ShareBound:
    """What each engine that serves a model has got of its share."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._total = 0.0  # requests so far
        # at how many requests an engine's bucket is full again
        self._full_at = dict[InstanceId, float]()
        # at how many requests one that has nothing left has something
        self._free_at = dict[InstanceId, float]()

    def exhausted(self) -> Set[InstanceId]:
        """Return the engines that may get no request now."""
        if not self._free_at:
            return _NONE
        for name in [name for name, at in self._free_at.items() if at <= self._total]:
            del self._free_at[name]
        return {name for name in self._free_at if not self._is_idle(name)}

    def count(self, rates: FairRates, chosen: Sequence[Instance | None]) -> None:
        """Count a request that goes to these engines; ``rates``: the part of all requests that an
        engine may get.
        """
        self._total += 1.0
        for instance in chosen:
            rate = None if instance is None else rates.get(instance.id)
            if instance is not None and rate is not None:
                full_at = max(self._full_at.get(instance.id, 0.0), self._total) + 1.0 / rate
                # One that had nothing left, and no request, owes nothing for this one.
                self._full_at[instance.id] = full_at = min(full_at, self._total + BURST / rate)
                if full_at - self._total > (BURST - 1.0) / rate:
                    self._free_at[instance.id] = full_at - (BURST - 1.0) / rate
        if len(self._full_at) > 2 * len(rates):  # engines that were removed
            self._full_at = {name: at for name, at in self._full_at.items() if name in rates}
            self._free_at = {name: at for name, at in self._free_at.items() if name in rates}

    def copy(self) -> "ShareBound":
        """Return one that decides alike, and counts for itself."""
        copied = ShareBound(self._registry)
        copied._total = self._total
        copied._full_at = dict(self._full_at)
        copied._free_at = dict(self._free_at)
        return copied

    def _is_idle(self, name: InstanceId) -> bool:
        member = self._registry.get(name)
        return member is not None and not member.load.in_flight and not member.load.at_other_routers


class ShareBounds:
    """The bounds of all models: an engine's fair share is one of the requests that it could
    serve.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._models = dict[str | None, ShareBound]()

    def of(self, model: str | None) -> ShareBound:
        """Return what engines have got of the requests for a model."""
        found = self._models.get(model)
        if found is None:
            make_room(self._models, self._registry)
            found = self._models[model] = ShareBound(self._registry)
        return found

    def copy(self) -> "ShareBounds":
        """Return those that decide alike, and count for themselves."""
        copied = ShareBounds(self._registry)
        copied._models = {model: bound.copy() for model, bound in self._models.items()}
        return copied


def make_room(kept: dict[str | None, T], registry: Registry) -> None:
    """Drop the oldest of what is kept by model, if there is no room for one more.

    All that engines serve has room: what is dropped is found anew, and a bound that is dropped
    begins anew.
    """
    if len(kept) >= _LEAST_MODELS and len(kept) >= min(
        len(registry.models.names) + 1, _MOST_MODELS
    ):
        del kept[next(iter(kept))]


def without(among: Sequence[Instance], exhausted: Set[InstanceId]) -> Sequence[Instance]:
    """List the engines that may get a request."""
    return [instance for instance in among if instance.id not in exhausted] if exhausted else among
