"""Legs that went well, which are counted for each engine at a time: one by one they cost several
times as much.
"""

from collections.abc import Callable

from pdrelay_proxy.core.model import Instance, InstanceId, RequestId
from pdrelay_proxy.io.request_path.deferred import DeferredCalls
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.request_path.telemetry import Telemetry


class EngineLegs:
    """The good legs of one engine that are not counted yet. Times are seconds."""

    __slots__ = ("answered", "answered_s", "at", "instance", "is_complete", "over_s", "paths")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.answered: list[RequestId] = []  # requests that have a good answer, or its beginning
        self.answered_s: list[float] = []  # from each of them to that
        self.over_s: list[float] = []  # from a request to the end of its leg
        self.paths: set[str] = set()  # that it has a good answer for, or its beginning
        self.is_complete = False  # one of them has come to its end: it was not dropped
        self.at = 0.0  # the time of the latest


class GoodLegs:
    """Takes in good legs, and has them counted with what else waits: a failure is counted after
    what came before it.
    """

    __slots__ = ("_by_engine", "_count", "_later")

    def __init__(self, later: DeferredCalls, count: Callable[[EngineLegs], None]) -> None:
        self._later = later
        self._count = count
        self._by_engine: dict[InstanceId, EngineLegs] = {}

    def answered(
        self, instance: Instance, path: str, request: RequestId, seconds: float, at: float
    ) -> None:
        """An engine has begun a good answer, so long after it was asked; its end may be far off."""
        legs = self._by_engine.get(instance.id) or self._new(instance)
        legs.paths.add(path)
        legs.answered.append(request)
        legs.answered_s.append(seconds)
        legs.at = at

    def ended(self, instance: Instance, seconds: float, at: float, complete: bool) -> None:  # noqa: FBT001 (as above)
        """Such a leg is over, so long after it was sent; not ``complete``: it was dropped."""
        legs = self._by_engine.get(instance.id) or self._new(instance)
        if complete:
            legs.is_complete = True
        legs.over_s.append(seconds)
        legs.at = at

    def over(  # noqa: PLR0917 (by name it costs more)
        self,
        instance: Instance,
        path: str,
        request: RequestId,
        answered_s: float,
        seconds: float,
        at: float,
    ) -> None:
        """A leg is over whose engine has given a good answer so long after it was asked."""
        legs = self._by_engine.get(instance.id) or self._new(instance)
        legs.paths.add(path)
        legs.answered.append(request)
        legs.answered_s.append(answered_s)
        legs.over_s.append(seconds)
        legs.is_complete = True
        legs.at = at

    def _new(self, instance: Instance) -> EngineLegs:
        legs = self._by_engine[instance.id] = EngineLegs(instance)
        self._later.add(self._settle, legs)
        return legs

    def _settle(self, legs: EngineLegs) -> None:
        del self._by_engine[legs.instance.id]
        self._count(legs)


def count_legs(fleet: LiveFleet, telemetry: Telemetry, legs: EngineLegs) -> None:
    """Count good legs of one engine."""
    if legs.answered:
        fleet.all_answered(legs.instance, legs.answered)
        fleet.has_paths(legs.paths, legs.instance)
    if legs.is_complete:
        fleet.completed(legs.instance)
    telemetry.legs_over(legs.instance, legs.answered_s, legs.over_s, legs.at)
