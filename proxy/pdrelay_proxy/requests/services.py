"""What requests are served with.

Nothing in here knows a request; requests/request_set.py has those under way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdrelay_proxy.core.admission.lifetime import Lifetime
from pdrelay_proxy.core.client_ids import ClientIds
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.http.allowed_origins import AllowedOrigins
from pdrelay_proxy.core.model import Headers, Instance, InstanceId, RequestId, TransferId
from pdrelay_proxy.core.protocol.stream_opening import StreamOpenings
from pdrelay_proxy.core.raw_json import Pieces
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.routing.retries import RetryBudget
from pdrelay_proxy.io.request_path.good_legs import GoodLegs
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.io.wire.response_handler import ResponseHandler
from pdrelay_proxy.requests.body_reader import BodyReader
from pdrelay_proxy.requests.gate import Gate
from pdrelay_proxy.requests.intake import Intake
from pdrelay_proxy.requests.leg_bodies import LegBodies
from pdrelay_proxy.requests.legs import LegSpan
from pdrelay_proxy.requests.release import Releaser
from pdrelay_proxy.settings import Settings


class RequestSpan(Protocol):
    """The span of one request."""

    def leg(self, instance: Instance, headers: Headers, /) -> tuple[LegSpan, Headers]:
        """Open the span of a leg; return it, and the headers that name it to the engine in place of
        the client's.
        """
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
    """Sends legs, which hear of their responses; the calls return at once."""

    def send(
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

    def done(self, call: ResponseHandler, /) -> None:
        """Give back the connection of an answer that is complete."""
        ...


class LiveSettings:
    """The settings in force.

    A reload replaces them: requests that are admitted later go by the new ones.
    """

    __slots__ = ("current",)

    def __init__(self, current: Settings) -> None:
        self.current = current


@dataclass(frozen=True, slots=True)
class Services:
    """Built once, in ``building``; every request and each of its parts holds it."""

    intake: Intake
    fleet: LiveFleet
    push_coordinates: PushCoordinates
    leg_bodies: LegBodies
    sender: Sender
    releaser: Releaser
    budget: RetryBudget
    gate: Gate
    lifetime: Lifetime
    body_reader: BodyReader
    telemetry: Telemetry
    good_legs: GoodLegs
    settings: LiveSettings
    clock: Callable[[], float]  # seconds; only differences count
    new_id: Callable[[], RequestId]
    new_transfer: Callable[[], TransferId]
    reports: bool = False  # prefill engines are asked how busy they are
    ids: ClientIds = field(default_factory=ClientIds)
    openings: StreamOpenings = field(default_factory=StreamOpenings)
    origins: AllowedOrigins | None = None  # None: no web page may read answers
    spans: Spans | None = None

    def forget_engine(self, engine: InstanceId) -> None:
        """Forget what the engine's answers have taught: it may come back as another one."""
        self.push_coordinates.forget(engine)
        self.leg_bodies.forget(engine)
        self.openings.forget(engine)

    def engine_left(self, engine: InstanceId) -> None:
        """Forget an engine that was removed; one that only turned is what it was."""
        if self.fleet.registry.get(engine) is None:
            self.forget_engine(engine)
