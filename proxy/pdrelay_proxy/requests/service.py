"""What requests are served with, and the requests under way: one timer looks at the time of all of them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, Self

from pdrelay_proxy.core.admission.lifetime import Lifetime, cut_short
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.http.allowed_origins import AllowedOrigins
from pdrelay_proxy.core.model import Headers, Instance, InstanceId, RequestId, TransferId
from pdrelay_proxy.core.raw_json import Pieces
from pdrelay_proxy.core.request_record import ClientIds, RequestRecord
from pdrelay_proxy.core.routing.retries import RetryBudget
from pdrelay_proxy.io.fair_timeout import LateTimer
from pdrelay_proxy.io.request_path.good_legs import EngineLegs, GoodLegs
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.io.wire.response_handler import ResponseHandler
from pdrelay_proxy.requests.body_reader import BodyReader
from pdrelay_proxy.requests.gate import Gate
from pdrelay_proxy.requests.intake import Intake
from pdrelay_proxy.requests.leg_bodies import LegBodies
from pdrelay_proxy.requests.legs import LegSpan
from pdrelay_proxy.requests.release import Releaser
from pdrelay_proxy.requests.stream_moves import StreamMoves
from pdrelay_proxy.settings import Settings

if TYPE_CHECKING:
    from pdrelay_proxy.requests.request import Request

_MOVES_AT_ONCE: Final = 8
_TICK_MOST: Final = 0.25  # seconds between two looks at the time of all requests
_TICK_LEAST: Final = 0.01
_TICKS: Final = 16  # looks in the shortest time that the rules give


class RequestSpan(Protocol):
    """The span of one request."""

    def leg(self, instance: Instance, headers: Headers, /) -> tuple[LegSpan, Headers]:
        """Open the span of a leg; return it, and the headers that name it to the engine in place of the client's."""
        ...

    def handed_over(self) -> None:
        """The prefill engine has answered."""
        ...

    def end(self) -> None:
        """The request is over."""
        ...


class Spans(Protocol):
    """Leaves spans of requests and legs."""

    def request(self, record: RequestRecord, headers: Headers, /) -> RequestSpan:
        """Open the span of a request, under the client's own if it has one."""
        ...


class Sender(Protocol):
    """Sends legs, and has each told of its response; the calls return at once (io/wire/leg_sender.py)."""

    def tell(
        self,
        call: ResponseHandler,
        instance: Instance,
        path: str,
        *,
        headers: Headers,
        request: RequestId,
        body: Pieces,
        content_type: bytes = b"application/json",
    ) -> None:
        """Post the pieces of a body; raises EngineError for what cannot be sent."""
        ...

    def shows_clients_key(self, instance: Instance, headers: Headers, /) -> bool:
        """Tell whether an engine is shown the key among the client's headers, and none of the router's."""
        ...

    def done(self, call: ResponseHandler, /) -> None:
        """Give back the connection of an answer that is complete."""
        ...


@dataclass(slots=True)
class Requests:
    """Built once, in app.py. Use it as a context manager: at the end what is still under way is cut off."""

    intake: Intake
    fleet: LiveFleet
    learned: PushCoordinates
    handovers: LegBodies
    engines: Sender
    releaser: Releaser
    budget: RetryBudget
    gate: Gate
    lifetime: Lifetime
    examiner: BodyReader
    telemetry: Telemetry
    settings: Settings  # may be replaced at any time: requests that are admitted later go by the new ones
    clock: Callable[[], float]  # seconds; only differences count
    new_id: Callable[[], RequestId]
    new_transfer: Callable[[], TransferId]
    request_over: Callable[[RequestRecord], None]
    reports: bool = False  # prefill engines are asked how busy they are
    ids: ClientIds = field(default_factory=ClientIds)
    origins: AllowedOrigins | None = None  # None: no web page may read answers
    spans: Spans | None = None
    moves_at_once: int = _MOVES_AT_ONCE  # streams that leave an engine and have not reached the next one
    _under_way: "dict[Request, None]" = field(default_factory=lambda: dict["Request", None]())
    _timer: asyncio.TimerHandle | None = None
    _lateness: LateTimer = field(default_factory=LateTimer)
    good_legs: GoodLegs = field(init=False)
    moves: StreamMoves = field(init=False)

    def __post_init__(self) -> None:
        self.moves = StreamMoves(self, self.moves_at_once)
        self.good_legs = GoodLegs(self.telemetry.later, self._count_legs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what is still under way: the router has no more time."""
        if self._timer is not None:
            self._timer.cancel()
        error = cut_short()
        for request in self:
            request.interrupt(error)
        self.telemetry.later.settle()  # no timer runs any more once the loop has ended

    def __iter__(self) -> "Iterator[Request]":
        """List those under way."""
        return iter(tuple(self._under_way))

    def engines_of_legs(self) -> Iterable[InstanceId]:
        """Return the engine of each leg that is under way."""
        return [engine for request in self._under_way for engine in request.engines]

    def begun(self, request: "Request") -> None:
        """Look after a request."""
        self._under_way[request] = None
        self.lifetime.in_flight += 1
        if self._timer is None:
            self._arm_round()

    def over(self, request: "Request") -> None:
        """Forget it."""
        if request in self._under_way:
            del self._under_way[request]
            self.lifetime.in_flight -= 1

    def _look_round(self) -> None:
        self._timer = None
        now = self.clock()
        is_late = self._lateness.is_late(now)
        try:
            self.telemetry.count_gaps()
            self.gate.expire()
            if not is_late:
                for request in self:
                    request.look(now)
            self.moves.look()
        finally:
            if self._under_way and self._timer is None:
                self._arm_round()

    def _arm_round(self) -> None:
        pause = self._tick_s()
        self._lateness.expect(self.clock() + pause)
        self._timer = asyncio.get_running_loop().call_later(pause, self._look_round)

    def _tick_s(self) -> float:
        settings = self.settings
        given = (
            settings.prefill_timeout_s,
            settings.first_token_timeout_s,
            settings.stream_idle_timeout_s,
            settings.total_timeout_s,
            settings.stream_timeout_s,
            settings.stream_comment_interval_s or None,
            self.gate.admission.limits.max_queue_wait_s,
        )
        shortest = min([seconds for seconds in given if seconds is not None])
        return min(_TICK_MOST, max(_TICK_LEAST, shortest / _TICKS))

    # Told afterwards, for many requests at a time (io/request_path/deferred.py)

    def _count_legs(self, legs: EngineLegs) -> None:
        """Count good legs of one engine."""
        if legs.answered:
            self.fleet.all_answered(legs.instance, legs.answered)
            self.fleet.has_paths(legs.paths, legs.instance)
        if legs.is_complete:
            self.fleet.completed(legs.instance)
        self.telemetry.legs_over(legs.instance, legs.answered_s, legs.over_s, legs.at)
