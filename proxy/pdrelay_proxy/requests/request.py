"""One request, from its head to its end: what the client's connection calls, and the coroutine that
serves it.

The coroutine has no task (requests/life.py): it is resumed by the event loop's reads, and by the
one timer that looks at the time of all requests (requests/request_set.py). It may await nothing but
its life. requests/attempt_legs.py takes in what the legs say, and the coroutine goes on when there
is something to decide. The pieces of a stream go from the decode leg to the client without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from pdrelay_proxy.core.admission.ticket import Ticket, TicketState
from pdrelay_proxy.core.model import InstanceId, RequestId, RoutingHints, SingleEngineReason
from pdrelay_proxy.core.protocol.continuation import Continuation
from pdrelay_proxy.core.request_record import PromptRecord, RequestRecord
from pdrelay_proxy.core.routing.retries import RetryAttempts, held_to_account
from pdrelay_proxy.core.served_tokens import ends_without_usage, served_tokens
from pdrelay_proxy.errors import OutOfTime, ProxyError
from pdrelay_proxy.requests.answering import Answering
from pdrelay_proxy.requests.attempt import Attempt
from pdrelay_proxy.requests.body_reader import LARGE
from pdrelay_proxy.requests.claims import CallClaims, Claim, ClaimedAnswer, PartRequest
from pdrelay_proxy.requests.client_response import ClientGone, ClientResponse
from pdrelay_proxy.requests.dispatch import Dispatch
from pdrelay_proxy.requests.intake import RequestHead, RequestPlan, too_long
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.lifecycle import RequestEvent, RequestState
from pdrelay_proxy.requests.response import ResponseWriter
from pdrelay_proxy.requests.resumed_stream import ResumedStream, may_be_resumed
from pdrelay_proxy.requests.services import RequestSpan, Services
from pdrelay_proxy.requests.stream_comments import CommentedResponse
from pdrelay_proxy.requests.terms import AnswerTerms, StreamCut, Takeover
from pdrelay_proxy.requests.upload import Upload
from pdrelay_proxy.settings import Settings

_OK: Final = 200
_QUEUED = RequestEvent.QUEUED
_ADMITTED = RequestEvent.ADMITTED
_END = RequestEvent.END
_WAITING: Final = TicketState.WAITING
_STREAMING: Final = RequestState.STREAMING
_NO_HEAD: Final = RequestHead("", ())


class RequestOwner(ABC):
    """What a request belongs to: it serves the request, and looks after it meanwhile."""

    __slots__ = ("claims", "services")

    def __init__(self, services: Services, claims: CallClaims | None = None) -> None:
        """``claims``: requests that a feature answers."""
        self.services = services
        self.claims = claims

    @abstractmethod
    def begun(self, request: "Request", /) -> None:
        """A request is let in."""

    @abstractmethod
    def over(self, request: "Request", /) -> None:
        """A request is over; it may not have been let in."""


class Request(PartRequest):
    """One request. To its connection it is an exchange (``api/exchange.py``)."""

    __slots__ = (
        "_answering",
        "_body",
        "_client",
        "_comments",
        "_dispatch",
        "_ends_at",
        "_head",
        "_life",
        "_owner",
        "_plan",
        "_services",
        "_ticket",
        "_total_s",
        "response_complete",
    )

    def __init__(
        self,
        owner: RequestOwner,
        response: ResponseWriter,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        shown: Mapping[bytes, bytes] | None = None,
        *,
        record: PromptRecord | None = None,
        plan: RequestPlan | None = None,
    ) -> None:
        """``headers``, ``shown``: as in RequestHead; ``record``, ``plan``: of a part of one."""
        services = owner.services
        head = self._head = RequestHead(path, headers, shown)
        span: RequestSpan | None = None
        own_record = (
            RequestRecord(services.new_id(), path, services.ids.client_id_in(head.shown))
            if record is None
            else record
        )
        if services.spans is not None:
            span = services.spans.request(own_record, tuple(headers))
        self._owner = owner
        self._services = services
        self._life = RequestLife(services, own_record, span)
        self._client = ClientResponse(self._life, response)
        self._body: bytes | Upload = b""  # as far as it has come, and is not read
        self._ticket: Ticket | None = None
        self._plan = plan  # of a part, until that is served
        # when all of it has taken too long; None: it is a stream that is never quiet for long
        self._ends_at: float | None = None
        self._total_s = 0.0  # seconds that it may take until then
        self._dispatch: Dispatch | None = None  # since it was admitted
        self._comments: CommentedResponse | None = None  # None: its stream has none
        # that, or what a feature has under way
        self._answering: Answering | None = None
        self.response_complete = False

    # ---- the client's side: what the protocol calls

    @property
    def keep_alive(self) -> bool:
        """Tell whether the connection stays open behind the response."""
        return self._client.writer.keep_alive

    @keep_alive.setter
    def keep_alive(self, value: bool) -> None:
        self._client.writer.keep_alive = value

    @property
    def response_started(self) -> bool:
        """Tell whether some of the response was written."""
        return self._client.writer.begun

    def leave(self, refusal: ProxyError | None = None) -> None:
        """Give up everything: the client has gone; ``refusal``: what it got from its connection."""
        if not self.response_complete:
            self.interrupt(ClientGone(refusal))

    def check(self) -> bool:
        """Judge the head; False: the request is refused, and answered.

        One that is let in is under way from here on.
        """
        origins = self._services.origins
        if origins is not None:
            added = origins.headers(self._head.shown.get(b"origin"))
            self._client.added_lines = b"".join([b"%b: %b\r\n" % header for header in added])
        try:
            self._head.caller = self._services.intake.check(self._head)
        except ProxyError as error:
            self._end(self._client.write_error(error))
        else:
            self._owner.begun(self)
        return not self.response_complete

    def receive_body(self, piece: bytes, /, *, is_all: bool = False) -> None:
        """Take a piece of the body; ``is_all``: there was and will be no other."""
        if self.response_complete:
            return  # it was refused
        try:
            size = len(self._body) + len(piece)
            most = self._services.settings.current.max_body_bytes
            if size > most:
                raise too_long(most)
            if is_all:
                self._body = piece  # it is charged where it is admitted, in a moment
                return
            if isinstance(self._body, bytes):
                self._body = Upload(self._services.gate)
            self._body.add(piece)
        except ProxyError as error:
            self._end(self._client.write_error(error))

    def serve(self, body: bytes = b"", /) -> None:
        """Serve the request: it is complete; ``body``: the whole body, if no piece came before."""
        if body:
            self.receive_body(body, is_all=True)
        if not self.response_complete:
            self._life.begin(self._live())

    def pause(self) -> None:
        """Have the engines wait: the client is slow, which is not held against them."""
        self._client.is_paused = True
        if self._answering is not None:
            self._answering.pause()

    def resume(self) -> None:
        """Go on, if it was paused: its engines have their full time again."""
        if self._client.is_paused:
            self._client.is_paused = False
            if self._answering is not None:
                self._answering.resume()

    def interrupt(self, error: Exception) -> None:
        """End the request with this error, at the next point at which it waits."""
        if self._life.is_running:
            self._life.interrupt(error)
        elif not self.response_complete:
            self._end(self._client.write_error(error))  # its body has not come

    # ---- for those who look after all requests

    @property
    def state(self) -> RequestState:
        """Tell where the request is."""
        return self._life.state

    @property
    def record(self) -> RequestRecord:
        """Return what has happened to it."""
        return self._life.record

    @property
    def failure(self) -> Exception | None:
        """Return the error that the client got; None: it got none."""
        return self._client.failure

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        return () if self._answering is None else self._answering.engines

    # ---- for what takes streams over, and changes choices of engines

    @property
    def attempts(self) -> Sequence[Attempt]:
        """List the tries that are under way."""
        return () if self._answering is None else self._answering.attempts

    @property
    def streams_from(self) -> InstanceId | None:
        """Return the engine whose stream the client gets now."""
        leg = self._life.record.decode
        return leg.instance if leg is not None and self._life.state is _STREAMING else None

    @property
    def continuation(self) -> Continuation | None:
        """Return what another engine could go on with; None: with nothing."""
        return self._client.replay

    @property
    def hints(self) -> RoutingHints | None:
        """Return what the choice of engines depends on, once it was admitted."""
        return None if self._dispatch is None else self._dispatch.hints

    @property
    def looks_back(self) -> bool:
        """Tell whether no other engine would go on exactly with the stream, once admitted."""
        return self._dispatch is not None and self._dispatch.looks_back

    def cut(self, takeover: Takeover) -> bool:
        """Cut the stream at once, to be taken over; False: it does not wait for more of it."""
        self._client.cut = StreamCut(takeover)
        self._life.wake()
        return self._client.was_cut()

    def check_deadlines(self, now: float) -> None:
        """Comment a stream that has been quiet, and end what has taken too long."""
        if self._comments is not None and not self._client.is_paused:
            self._comments.comment_if_quiet(now)
        if self._ends_at is not None and now >= self._ends_at:
            self.interrupt(OutOfTime(f"the request was not done within {self._total_s:g} s"))
        elif self._answering is not None:
            self._answering.check_deadlines(now)

    # ---- the life

    async def _live(self) -> None:
        """Serve the request to its end, whatever that is; nothing is raised."""
        status = _OK
        try:
            plan = self._plan
            if plan is None:
                is_long = len(self._body) > LARGE or self._head.coding is not None
                plan, size = await self._read_long() if is_long else self._read()
                self._client.hides_usage = plan.hides_usage
                call = plan.call
                claims = self._owner.claims
                claim = None if claims is None or call is None else claims.claim(call)
                ticket = self._take_ticket(plan, size, claim)
                if ticket.state is _WAITING:
                    await self._wait_for_turn(ticket)
                dispatch = self._admit(plan, ticket)
                claimed = (
                    None if claim is None else self._claimed(claim, plan, ticket, dispatch.settings)
                )
            else:
                dispatch = self._admit(plan)
                claimed = None
            call = plan.call
            settings = dispatch.settings
            continues = settings.resume_streams or self._services.openings.are_wanted(settings)
            if claimed is not None:
                await claimed.answer()
            elif call is not None and continues and may_be_resumed(call):
                await ResumedStream(self._life, dispatch, self._client, call).answer()
            else:
                await dispatch.answer(AnswerTerms(call, RetryAttempts(settings.retries)))
        except Exception as error:  # noqa: BLE001 (the client gets each, and what is a bug is logged)
            status = self._client.write_error(error)
        try:
            if self._dispatch is not None:
                self._dispatch.close_attempt()
            if self._life.broken:
                self._hold_broken(status)
        finally:
            self._end(status)

    def _claimed(
        self, claim: Claim, plan: RequestPlan, ticket: Ticket, settings: Settings
    ) -> ClaimedAnswer | None:
        """Return what answers a request that a feature has claimed; None: one engine does."""
        reason = (
            SingleEngineReason.UNKNOWN_MODEL  # each part would learn its own
            if plan.learns_model
            else claim.single_reason(
                self._services.fleet, may_be_alone=settings.decode_only_fallback
            )
        )
        if reason is not None:
            plan.single_reason = reason
            return None
        answer = claim.begin(self._life, self._client, plan, ticket, new_part=self._part)
        self._answering = answer
        return answer

    def _hold_broken(self, status: int) -> None:
        """Hold engines to account for what they did not bring to its end."""
        served_by: InstanceId | None = None
        decode = self._life.record.decode
        if decode is not None and status == _OK and self._client.failure is None:
            served_by = decode.instance
        for broken in held_to_account(self._life.broken, served_by):
            self._services.fleet.broke_off(broken)

    def _comment_when_quiet(self, interval_s: float) -> None:
        """Have comments in a stream."""
        client = self._client
        now = self._services.clock()
        client.writer = self._comments = CommentedResponse(
            client.writer, interval_s, client.stream_lines, now=now
        )

    def _admit(self, plan: RequestPlan, ticket: Ticket | None = None) -> Dispatch:
        """Have the request go by the rules of now, and begin its time.

        ``ticket``: None: it is a part of one that is admitted, whose time is also that of its
        parts.

        Raises TurnedAway: it has no place.
        """
        services = self._services
        life = self._life
        if ticket is not None:
            services.gate.check(ticket)
        life.on(_ADMITTED)
        settings = services.settings.current
        now = services.clock()
        services.budget.came(now)
        if ticket is not None:
            record = life.record
            record.admitted_s = now - record.began_at
            if record.queue_s is None:
                record.queue_s = 0.0
            if not plan.streams or plan.may_be_quiet:  # another stream is watched piece by piece
                self._total_s = settings.total_timeout_s
                self._ends_at = now + self._total_s
        dispatch = self._dispatch = self._answering = Dispatch(life, plan, settings, self._client)
        return dispatch

    def _part(self, writer: ResponseWriter, plan: RequestPlan, place: int) -> "Request":
        """Return a request of its own for the part at a place."""
        own = self._life.record
        record = PromptRecord(
            RequestId(f"{own.request_id}-p{place}"), plan.path, client_id=own.client_id
        )
        return Request(self._owner, writer, plan.path, plan.headers, record=record, plan=plan)

    # ---- RECEIVED and WAITING

    def _take_body(self) -> bytes:
        """Return all of the body, once; what is charged for it stays charged."""
        body = self._body
        if isinstance(body, bytes):
            self._body = b""
            return body
        self._life.record.received_s = self._life.elapsed_s()
        return body.whole()

    def _free_body(self) -> None:
        body = self._body
        self._body = b""
        if not isinstance(body, bytes):
            body.free()

    def _read(self) -> tuple[RequestPlan, int]:
        """Return what the engines will get, and the bytes of the body."""
        services = self._services
        head = self._head
        body, fields, tokens = services.intake.examine(
            head, self._take_body(), counts_tokens=services.gate.admission.counts_tokens
        )
        return services.intake.plan(head, body, fields, tokens), len(body)

    async def _read_long(self) -> tuple[RequestPlan, int]:
        """Do the same in a thread: others need not wait for a long or compressed body."""
        services = self._services
        head = self._head
        counts_tokens = services.gate.admission.counts_tokens
        future = services.body_reader.submit(
            partial(services.intake.examine, head, self._take_body(), counts_tokens=counts_tokens)
        )
        future.add_done_callback(lambda _: self._life.wake())
        try:
            while not future.done():
                await self._life
        finally:
            future.cancel()  # the client has left: what no thread has begun is not read any more
        body, fields, tokens = future.result()
        return services.intake.plan(head, body, fields, tokens), len(body)

    def _take_ticket(self, plan: RequestPlan, size: int, claim: Claim | None) -> Ticket:
        """Return the ticket of a request whose body has so many bytes: admitted, waiting or
        refused.

        Raises PathNotServed.
        """
        services = self._services
        if plan.path in services.fleet.missing.denials:
            services.fleet.check_path(plan.path, plan.hints)
        if self._body:
            self._free_body()  # its bytes are charged with the ticket from now on
        gate = services.gate
        count = 1
        if claim is not None:
            size = claim.charged_bytes(size, gate.admission.limits.max_inflight_bytes)
            count = claim.count
        caller = self._head.caller
        ticket = self._ticket = gate.arrive(caller, plan.priority, size, plan.tokens, prompts=count)
        self._head = _NO_HEAD  # the connection keeps us until its next request
        interval_s = services.settings.current.stream_comment_interval_s
        if interval_s and plan.streams:  # from here on: nothing else comes in the queue
            self._comment_when_quiet(interval_s)
        return ticket

    async def _wait_for_turn(self, ticket: Ticket) -> None:
        """Wait in the queue."""
        gate = self._services.gate
        life = self._life
        start = self._services.clock()
        life.on(_QUEUED)
        gate.watch(ticket, life.wake)
        try:
            while ticket.state is _WAITING:
                await life
        finally:
            gate.unwatch(ticket)
            life.record.queue_s = self._services.clock() - start

    # ---- OVER

    def _end(self, status: int) -> None:
        """The request is over: count it, and let go of everything."""
        services = self._services
        life = self._life
        client = self._client
        life.on(_END)
        self.response_complete = True
        life.end()
        # The connection keeps us until its next request.
        is_whole = status == _OK and client.failure is None
        self._plan = self._dispatch = self._answering = self._comments = client.replay = None
        self._head = _NO_HEAD
        life.record.over(status, services.clock() - life.record.began_at)
        try:
            self._owner.over(self)
            ticket = self._ticket
            self._ticket = None
            if ticket is not None:
                if services.gate.admission.counts_tokens:
                    if is_whole and ends_without_usage(life.record):
                        services.intake.asks_for_usage = True
                    services.gate.leave(
                        ticket, served_tokens(life.record, status, ticket.tokens, client.events)
                    )
                else:
                    services.gate.leave(ticket)
            if self._body:
                self._free_body()
            services.telemetry.later.add(services.telemetry.request_over, life.record)
            if life.span is not None:
                life.span.end()
        finally:
            client.writer.close()  # or the connection would wait for ever
