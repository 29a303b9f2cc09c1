"""The requests under way. One timer checks the deadlines of all of them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Self, TypeAlias

from pdrelay_proxy.core.admission.lifetime import cut_short
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.io.fair_timeout import LateTimer
from pdrelay_proxy.requests.claims import CallClaims
from pdrelay_proxy.requests.request import Request, RequestOwner
from pdrelay_proxy.requests.services import Services

_TICK_MOST: Final = 0.25  # seconds between two looks at the time of all requests
_TICK_LEAST: Final = 0.01
_TICKS: Final = 16  # looks in the shortest time that the rules give


class RequestWatcher(ABC):
    """What a feature watches the requests under way by."""

    __slots__ = ()

    @property
    def moves_streams(self) -> bool:
        """Whether it takes the streams of engines over that are drained by moving them."""
        return False

    @abstractmethod
    def check_requests(self) -> None:
        """Look at the requests: the deadlines of all were just checked."""


class RequestSet(RequestOwner):
    """Built once, in ``building``.

    Use it as a context manager: at the end it cuts off the requests still under way.
    """

    __slots__ = ("_lateness", "_timer", "_under_way", "watchers")

    def __init__(
        self,
        services: Services,
        claims: CallClaims | None = None,
        watchers: "Sequence[MakeWatcher]" = (),
    ) -> None:
        """``claims``: requests that a feature answers; ``watchers``: make those of features."""
        super().__init__(services, claims)
        self._under_way: dict[Request, None] = {}  # in the order in which they came
        self._timer: asyncio.TimerHandle | None = None
        self._lateness = LateTimer()
        self.watchers = [watcher(self) for watcher in watchers]
        services.telemetry.count_legs_of(self.engines_of_legs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what is still under way: the router has no more time."""
        if self._timer is not None:
            self._timer.cancel()
        error = cut_short()
        for request in self:
            request.interrupt(error)
        self.services.telemetry.later.settle()  # no timer runs any more once the loop has ended

    def __iter__(self) -> Iterator[Request]:
        """List those under way."""
        return iter(tuple(self._under_way))

    def engines_of_legs(self) -> Iterable[InstanceId]:
        """Return the engine of each leg that is under way."""
        return [engine for request in self._under_way for engine in request.engines]

    def begun(self, request: Request, /) -> None:
        """Look after a request."""
        self._under_way[request] = None
        self.services.lifetime.in_flight += 1
        if self._timer is None:
            self._arm_round()

    def over(self, request: Request, /) -> None:
        """Forget it."""
        if request in self._under_way:
            del self._under_way[request]
            self.services.lifetime.in_flight -= 1

    def _check_round(self) -> None:
        self._timer = None
        services = self.services
        now = services.clock()
        is_late = self._lateness.is_late(now)
        try:
            services.telemetry.count_gaps()
            services.gate.expire()
            if not is_late:
                for request in self:
                    request.check_deadlines(now)
            for watcher in self.watchers:
                watcher.check_requests()
        finally:
            if self._under_way and self._timer is None:
                self._arm_round()

    def _arm_round(self) -> None:
        pause = self._tick_s()
        self._lateness.expect(self.services.clock() + pause)
        self._timer = asyncio.get_running_loop().call_later(pause, self._check_round)

    def _tick_s(self) -> float:
        settings = self.services.settings.current
        given = (
            settings.first_token_timeout_s,
            settings.stream_idle_timeout_s,
            settings.total_timeout_s,
            settings.stream_comment_interval_s or None,
            self.services.gate.admission.limits.max_queue_wait_s,
        )
        shortest = min([seconds for seconds in given if seconds is not None])
        return min(_TICK_MOST, max(_TICK_LEAST, shortest / _TICKS))


MakeWatcher: TypeAlias = Callable[[RequestSet], RequestWatcher]
