"""All sessions of ``/v1/realtime``: who may have one, at which engine, and what is counted of it."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from pdrelay_proxy.core.admission.keys import ANYBODY, Keyring
from pdrelay_proxy.core.admission.lifetime import Lifetime
from pdrelay_proxy.core.admission.ticket import TicketState
from pdrelay_proxy.core.http.origins import Sites
from pdrelay_proxy.core.model import Headers, Instance, InstanceId, RequestId, Role, RoutingHints, SingleEngineReason
from pdrelay_proxy.core.protocol.fault_table import Failure, failure_of
from pdrelay_proxy.core.protocol.realtime import SessionEnd, SessionOutcome
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord
from pdrelay_proxy.errors import BadRequest, EngineError, NotServed, RouterFull
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.requests.gate import Gate
from pdrelay_proxy.requests.intake import PASSED_ON
from pdrelay_proxy.requests.realtime.relay import Relay, Socket
from pdrelay_proxy.settings import Settings

_RETRY_AFTER_S: Final = 5


class Sockets(Protocol):
    """Opens sessions at engines (io/websocket.py)."""

    async def open(self, instance: Instance, headers: Headers, /) -> Socket:
        """Open one; raises EngineError, NotServed."""
        ...


class RealtimeSession:
    """One session that an engine has accepted."""

    __slots__ = ("began", "end", "engine", "instance")

    def __init__(self, instance: Instance, engine: Socket, began: float) -> None:
        self.instance = instance
        self.engine = engine
        self.began = began
        self.end: SessionEnd | None = None  # None: it is under way, or was cut off

    @property
    def is_abandoned(self) -> bool:
        """Tell whether its client has gone without a word."""
        return self.end is not None and self.end.outcome is SessionOutcome.CLIENT_DISCONNECTED


@dataclass(slots=True)
class RealtimeSessions:
    """Built once, in app.py."""

    settings: Callable[[], Settings]
    lifetime: Lifetime
    keyring: Keyring
    sites: Sites
    gate: Gate
    fleet: LiveFleet
    sockets: Sockets
    telemetry: Telemetry
    clock: Callable[[], float]  # seconds; only differences count
    _open: dict[RequestId, InstanceId] = field(default_factory=dict[RequestId, InstanceId])
    _places: int = 0  # sessions that are open, or about to be

    @property
    def engines(self) -> Iterable[InstanceId]:
        """Return the engine of each session."""
        return tuple(self._open.values())

    def check(self, headers: Headers) -> str:
        """Judge the head of an offer; return the name of the client's key.

        A browser names the page that opens a session in ``Origin``, and no page of another web site may without keys.

        Raises:
            CrossSite, Misdirected, ClosingDown, Unauthorized: it is not let in.
        """
        has_keys = self.keyring.keys is not None
        self.sites.check("POST", headers, has_keys=has_keys)  # a GET that reads nothing and uses an engine
        self.lifetime.check()
        return self.keyring.caller(headers) if has_keys else ANYBODY

    @contextmanager
    def place(self, caller: str) -> Generator[None]:
        """Hold a place among the sessions, and one among the requests of a key.

        Raises:
            RouterFull, KeyOverLimit: there is none.
        """
        settings = self.settings()
        most = settings.realtime_max_sessions
        if self._places >= most:
            raise RouterFull(
                f"the router has {most} sessions, the most it may have (realtime_max_sessions)",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self.gate.admission.admitted >= self.gate.admission.limits.max_concurrency:
            raise _no_place()  # it does not wait, and so takes nobody's place in the queue
        ticket = self.gate.arrive(caller, self.keyring.least_of(caller), 0)
        try:
            self.gate.check(ticket)
            if ticket.state is not TicketState.ADMITTED:
                raise _no_place()
            self._places += 1
            try:
                with self.lifetime.serving():
                    yield
            finally:
                self._places -= 1
        finally:
            self.gate.leave(ticket)

    @contextmanager
    def at(self, session: RealtimeSession, record: RequestRecord) -> Generator[None]:
        """Count a session at its engine, for as long as the block lasts."""
        request, opened = record.request_id, self.telemetry.counters.realtime_open
        self._open[request] = session.instance.id
        opened[()] += 1
        try:
            yield
        finally:
            opened[()] -= 1
            del self._open[request]
            self._over(session, record)

    async def open(self, model: str | None, headers: Headers, record: RequestRecord) -> RealtimeSession:
        """Open a session at a decode engine; where that cannot be reached, at another one.

        Raises:
            NoInstance: there is no engine, or none is left to try.
            UnknownModel, BadRequest: no engine serves the model, or it must be named.
            EngineError, NotServed: the engines that were tried failed, or have no such path.
        """
        failed: set[InstanceId] = set()
        passed = self._passed_on(headers, record)
        record.single_reason = SingleEngineReason.ONE_LEG
        while True:
            usable = self.fleet.usable(Role.DECODE)
            model = self._model_of_unnamed() if model is None else model
            among = [one for one in usable if one.id not in failed] or usable
            instance = self.fleet.one(among, RoutingHints(model, again=bool(failed)))
            record.decode = LegRecord(instance.id, None, self.clock())
            try:
                return await self._open_at(instance, passed, record)
            except EngineError as error:
                failed.add(instance.id)
                if error.reached or len(record.retries) >= self.settings().retries or len(failed) >= len(usable):
                    raise
                record.set_aside(Role.DECODE, failure_of(error))

    async def run(self, session: RealtimeSession, client: Socket) -> None:
        """Relay messages to the end."""
        settings = self.settings()
        relay = Relay(
            client,
            session.engine,
            idle_s=settings.realtime_idle_timeout_s,
            total_s=settings.realtime_timeout_s,
            clock=self.clock,
        )
        session.end = await relay.run()

    def over(self, record: RequestRecord, status: int) -> None:
        """The offer of a session, or a session, is over: write its line, and count it."""
        record.over(status, self.clock() - record.began_at)
        self.telemetry.request_over(record)

    def refused(self) -> None:
        """Count an offer that became no session."""
        self.telemetry.counters.realtime_sessions[(SessionOutcome.REFUSED,)] += 1

    def _over(self, session: RealtimeSession, record: RequestRecord) -> None:
        """Say how a session ended."""
        end, now = session.end, self.clock()
        outcome = SessionOutcome.SHUTDOWN if end is None else end.outcome
        failure = Failure.BAD_RESPONSE if outcome is SessionOutcome.ENGINE_FAILED else None
        record.error = "the session was cut off" if end is None else end.error
        self.fleet.ended(session.instance, record.request_id, failure)
        self.telemetry.leg_ended(session.instance, now - session.began, failure, record.request_id, now)
        self.telemetry.counters.realtime_sessions[(outcome,)] += 1

    async def _open_at(self, instance: Instance, headers: Headers, record: RequestRecord) -> RealtimeSession:
        request, began = record.request_id, self.clock()
        self.fleet.enter(instance, request)
        failure: Failure | None = None
        try:
            engine = await self.sockets.open(instance, headers)
        except BaseException as error:
            if isinstance(error, EngineError):
                failure = failure_of(error)
            self.fleet.ended(instance, request, failure)
            if isinstance(error, EngineError | NotServed):
                now, refused = self.clock(), failure or Failure.REFUSED
                self.telemetry.leg_ended(instance, now - began, refused, request, now)
            raise
        answered_s = self.clock() - began
        if record.decode is not None:
            record.decode.ms = answered_s * 1000
        self.fleet.answered(instance, request, answered_s)
        return RealtimeSession(instance, engine, began)

    def _model_of_unnamed(self) -> str | None:
        """Return the model of a session that names none; raises BadRequest: the engines serve several."""
        try:
            return self.fleet.registry.model_of_unnamed()
        except BadRequest as several:
            raise BadRequest(f"{several}: write it in the query, as ?model=NAME", param="model") from None

    def _passed_on(self, headers: Headers, record: RequestRecord) -> Headers:
        """Return what engines may see of the client's headers, and our name of the session."""
        forwards = self.settings().forward_client_key
        kept = [one for one in headers if one[0] in PASSED_ON and (forwards or one[0] != b"authorization")]
        return (*kept, (b"x-request-id", record.request_id.encode()))


def _no_place() -> RouterFull:
    return RouterFull("the router serves as many requests as it may (max_concurrency)", retry_after_s=_RETRY_AFTER_S)
