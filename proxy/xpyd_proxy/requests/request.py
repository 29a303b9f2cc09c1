"""One request, from its head to its end: the coroutine that walks the table of requests/lifecycle.py.

The coroutine has no task (requests/stepper.py): it is resumed by the event loop's reads, and by the one timer that
looks at the time of all requests (requests/service.py). It may await nothing but its Stepper. What the legs tell
is taken in by the attempt (requests/attempt.py), and the coroutine goes on when there is something to decide. The
pieces of a stream go from the decode leg to the client without it.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from xpyd_proxy.core.admission.admission import Ticket, TicketState
from xpyd_proxy.core.admission.lifetime import Stage
from xpyd_proxy.core.model import (
    GenerationRequest,
    Instance,
    InstanceId,
    LegOrder,
    RequestId,
    Role,
    SingleEngineReason,
)
from xpyd_proxy.core.protocol import push, request_bodies
from xpyd_proxy.core.protocol.continuation import Continuation
from xpyd_proxy.core.protocol.disaggregation import may_share, solo_reason
from xpyd_proxy.core.protocol.engine_errors import BUSY, Failure, failure_of
from xpyd_proxy.core.protocol.first_token import STREAM, FirstToken, Spliced
from xpyd_proxy.core.protocol.prompt_arrays import choices_of, one_of, prompts_of
from xpyd_proxy.core.protocol.replay import Replay, behind, can_resume, traced
from xpyd_proxy.core.raw_json import Pieces, encode
from xpyd_proxy.core.request_record import CLIENT_CLOSED_REQUEST, PromptRecord, RequestRecord, client_id
from xpyd_proxy.core.routing.retries import LegFailed, RetryAttempts, RetryScope
from xpyd_proxy.errors import (
    EngineBusy,
    EngineError,
    EngineFault,
    NoInstance,
    NoMatchingInstance,
    OutOfTime,
    ProxyError,
    Refused,
    TurnedAway,
    Unauthorized,
)
from xpyd_proxy.requests.attempt import Attempt
from xpyd_proxy.requests.body_reader import LARGE
from xpyd_proxy.requests.error_body import error_body
from xpyd_proxy.requests.intake import JSON_TYPE, RequestHead, RequestPlan, check_size
from xpyd_proxy.requests.leg_bodies import decode_body
from xpyd_proxy.requests.legs import DecodeLeg, PrefillLeg
from xpyd_proxy.requests.lifecycle import TRANSITIONS, RequestEvent, RequestState
from xpyd_proxy.requests.prompt_array import PromptArray, PromptRequest, told_in_stream
from xpyd_proxy.requests.response import ResponseWriter, head_lines, last_event
from xpyd_proxy.requests.service import Requests, RequestSpan
from xpyd_proxy.requests.stepper import Stepper
from xpyd_proxy.requests.upload import Upload
from xpyd_proxy.settings import FirstTokenFrom

_OK: Final = 200
_SEVERAL: Final = SingleEngineReason.N
# Looking a member up takes as long as a call.
_QUEUED, _ADMITTED, _PULL, _PUSH, _SINGLE, _PREFILLED, _FIRST_TOKEN, _NEXT_DECODE, *_REST = RequestEvent
_RETRY, _FIRST_EVENT, _RESUME, _END = _REST
_RECEIVED: Final = RequestState.RECEIVED
_STREAMING: Final = RequestState.STREAMING
_CONTINUING: Final = RequestState.CONTINUING
_FROM_PREFILL: Final = FirstTokenFrom.PREFILL
_WAITING: Final = TicketState.WAITING
_AT_ONCE: Final = LegOrder.CONCURRENT
_SERVING: Final = Stage.SERVING
_BUG: Final = 500
_NO_HEAD: Final = RequestHead("", ())
logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has closed its connection."""


class Request:
    """One request. To uvicorn's protocol it is the cycle of its connection."""

    __slots__ = (
        "_array",
        "_attempt",
        "_body",
        "_ends_at",
        "_head",
        "_of",
        "_paused",
        "_plan",
        "_record",
        "_replay",
        "_response",
        "_settings",
        "_span",
        "_start",
        "_steps",
        "_ticket",
        "disconnected",
        "failure",
        "response_complete",
        "state",
    )

    def __init__(
        self,
        of: Requests,
        response: ResponseWriter,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        shown: Mapping[bytes, bytes] | None = None,
        *,
        own_id: RequestId | None = None,
        plan: RequestPlan | None = None,
    ) -> None:
        """``headers`` and ``shown`` as in RequestHead; ``own_id`` and ``plan``: of a part of a request."""
        head = self._head = RequestHead(path, headers, shown)
        name = head.shown.get(b"x-request-id")
        self.state = _RECEIVED
        self._of = of
        self._response = response
        self._start = of.clock()
        own_id = of.new_id() if own_id is None else own_id
        known_as = None if name is None else client_id(name)
        if plan is None:
            self._record = RequestRecord(own_id, path, client_id=known_as)
        else:
            self._record = PromptRecord(own_id, path, client_id=known_as)
        self._span: RequestSpan | None = None
        if of.spans is not None:
            self._span = of.spans.request(self._record, tuple(headers))
        self._body: bytes | Upload = b""  # as far as it has come, and is not read
        self._steps = Stepper()
        self._ticket: Ticket | None = None
        self._plan: RequestPlan | None = plan  # since it was read
        self._settings = of.settings  # those that were in force when it was admitted
        self._ends_at: float | None = None  # when all of it has taken too long
        self._attempt: Attempt | None = None  # since it was routed
        self._array: PromptArray | None = None  # while its prompts are asked one by one
        self.failure: Exception | None = None  # what the client was told went wrong
        self._replay: Continuation | None = None  # of a stream that another engine goes on with, or could
        self._paused = False  # the client is slow
        self.disconnected = self.response_complete = False

    # ---- the client's side: what the protocol calls

    @property
    def keep_alive(self) -> bool:
        """Tell whether the connection stays open behind the answer."""
        return self._response.keep_alive

    @keep_alive.setter
    def keep_alive(self, value: bool) -> None:
        self._response.keep_alive = value

    @property
    def response_started(self) -> bool:
        """Tell whether some of the answer was written."""
        return self._response.begun

    @property
    def message_event(self) -> "Request":
        """Uvicorn sets it when the client has gone."""
        return self

    def set(self) -> None:
        """Give up everything if the client has gone."""
        if self.disconnected and not self.response_complete:
            self.interrupt(ClientGone())

    def leave(self) -> None:
        """The client has gone."""
        self.disconnected = True
        self.set()

    def check(self) -> bool:
        """Judge the head; False: the request is refused, and answered. One that is let in is under way from here on."""
        try:
            self._head.caller = self._of.intake.check(self._head)
        except ProxyError as error:
            self._end(self._tell(error))
        else:
            self._of.begun(self)
        return not self.response_complete

    def take(self, piece: bytes, *, is_all: bool = False) -> None:
        """Take a piece of the body; ``is_all``: there was and will be no other."""
        if self.response_complete:
            return  # it was refused
        try:
            check_size(len(self._body) + len(piece), self._of.settings.max_body_bytes)
            if is_all:
                self._body = piece  # it is charged where it is admitted, in a moment
                return
            if isinstance(self._body, bytes):
                self._body = Upload(self._of.gate)
            self._body.add(piece)
        except ProxyError as error:
            self._end(self._tell(error))

    def begin(self, body: bytes = b"") -> None:
        """Serve the request: it is complete; ``body``: all of it, if none was taken before."""
        if body:
            self.take(body, is_all=True)
        if not self.response_complete:
            self._steps.begin(self._live())

    def pause(self) -> None:
        """Have the engine wait: the client is slow, which is not held against the engine."""
        self._paused = True
        if self._attempt is not None:
            self._attempt.pause()
        elif self._array is not None:
            self._array.pause()

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        if self._attempt is not None:
            self._attempt.resume()
        elif self._array is not None:
            self._array.resume()

    def interrupt(self, error: Exception) -> None:
        """End the request with this, at the next point at which it waits."""
        if self._steps.is_running:
            self._steps.interrupt(error)
        elif not self.response_complete:
            self._end(self._tell(error))  # its body has not come

    # ---- for those who look after all requests

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        if self._array is not None:
            return self._array.engines
        return () if self._attempt is None else self._attempt.engines

    def look(self, now: float) -> None:
        """See whether something has taken too long."""
        if self._ends_at is not None and now >= self._ends_at:
            self.interrupt(self._out_of_time())
        elif self._attempt is not None:
            self._attempt.look(now, paused=self._paused)
        elif self._array is not None:
            self._array.look(now)

    def _out_of_time(self) -> OutOfTime:
        seconds = self._total_s(self._planned)
        if self._response.begun:
            return OutOfTime(f"the stream was not complete within {seconds:g} s")
        return OutOfTime(f"the request was not done within {seconds:g} s")

    # ---- the life

    async def _live(self) -> None:
        """Serve the request to its end, whatever that is; nothing is raised."""
        status = _OK
        try:
            plan = self._plan
            if plan is None:
                size = len(self._body)
                plan = self._plan = await self._read_long() if size > LARGE else self._read()
                ticket = self._ask_for_place(plan, size)
                if ticket.state is _WAITING:
                    await self._wait_for_turn(ticket)
                self._admit(plan, ticket)
            else:
                self._join()
            call, settings = plan.call, self._settings
            continues = settings.resume_streams or settings.first_token_from is _FROM_PREFILL
            prompts = () if call is None else prompts_of(call.api, call.fields)
            if call is not None and prompts and self._may_divide(call, prompts[0]):
                await self._answer_each(call, prompts)
            elif call is not None and continues and _may_resume(call):
                await self._answer_and_resume(call)
            else:
                await self._answer(call, RetryAttempts(settings.retries))
        except Exception as error:  # noqa: BLE001 (each is told to the client, and what is a bug is logged)
            status = self._tell(error)
        try:
            self._close_attempt()
        finally:
            self._end(status)

    def _admit(self, plan: RequestPlan, ticket: Ticket) -> None:
        """Begin the request's time, and have it go by the rules of now; raises TurnedAway if it has no place."""
        of = self._of
        of.gate.check(ticket)
        self._on(_ADMITTED)
        if self._record.queue_s is None:
            self._record.queue_s = 0.0
        self._settings, now = of.settings, of.clock()
        of.budget.came(now=now)
        seconds = self._total_s(plan)
        self._ends_at = None if seconds is None else now + seconds

    def _join(self) -> None:
        """Begin as a part of a request that is admitted, whose time is also that of its parts."""
        self._on(_ADMITTED)
        self._of.budget.came(now=self._of.clock())

    def _total_s(self, plan: RequestPlan) -> float | None:
        """Return how long it may take; None: for ever."""
        return self._settings.stream_timeout_s if plan.streams else self._settings.total_timeout_s

    def _on(self, event: RequestEvent) -> None:
        """Take a step of the table; one that is not in it is a bug, and raises."""
        self.state = TRANSITIONS[self.state][event]

    @property
    def _planned(self) -> RequestPlan:
        if self._plan is None:
            raise RuntimeError("the request is not read yet")
        return self._plan

    # ---- RECEIVED and WAITING

    def _take_body(self) -> bytes:
        """Return all of the body, once; what is charged for it stays charged."""
        body = self._body
        if isinstance(body, bytes):
            self._body = b""
            return body
        return body.whole()

    def _free_body(self) -> None:
        body, self._body = self._body, b""
        if not isinstance(body, bytes):
            body.free()

    def _read(self) -> RequestPlan:
        """Return what the engines are asked."""
        intake, head, body = self._of.intake, self._head, self._take_body()
        return intake.plan(head, body, intake.read(head, body))

    async def _read_long(self) -> RequestPlan:
        """Read a long body in a thread, so that other requests do not wait for it."""
        intake, head, body = self._of.intake, self._head, self._take_body()
        future = self._of.examiner.submit(partial(intake.read, head, body))
        future.add_done_callback(lambda _: self._steps.wake())
        while not future.done():
            await self._steps
        return intake.plan(head, body, future.result())

    def _ask_for_place(self, plan: RequestPlan, size: int) -> Ticket:
        """Return the ticket of a request whose body has so many bytes: admitted, waiting or refused."""
        if self._body:
            self._free_body()  # its bytes are charged with the ticket from now on
        ticket = self._ticket = self._of.gate.arrive(self._head.caller, plan.priority, size)
        self._head.forget()  # the connection keeps us until its next request
        return ticket

    async def _wait_for_turn(self, ticket: Ticket) -> None:
        """Wait in the queue."""
        gate, start = self._of.gate, self._of.clock()
        self._on(_QUEUED)
        gate.watch(ticket, self._steps.wake)
        try:
            while ticket.state is _WAITING:
                await self._steps
        finally:
            gate.unwatch(ticket)
            self._record.queue_s = self._of.clock() - start

    # ---- ROUTING, and what follows from failures

    async def _answer(
        self,
        call: GenerationRequest | None,
        chances: RetryAttempts,
        alone: Pieces | None = None,
        *,
        shows: bool = False,
    ) -> None:
        """Try until an engine has given the whole answer; ``alone``: what one decode engine is asked by itself.

        ``shows``: the client may see the token of the prefill engine.

        Raises:
            ProxyError: what the client is told.
        """
        failed: LegFailed | None = None
        while True:
            attempt = self._attempt = Attempt(
                self._of,
                self._planned,
                self._settings,
                self._record,
                chances,
                steps=self._steps,
                span=self._span,
                shows=shows,
            )
            try:
                prefill, decode = self._route(attempt, call, alone)
                lent_by = self._set_off(attempt, call, prefill, decode)
                if lent_by is not None:
                    while lent_by.handover is None:
                        lent_by.raise_failure()
                        await self._steps
                    if self._hand_over(attempt, call, lent_by):
                        return
                await self._decode(attempt, decode, lent_by)
                return
            except LegFailed as now_failed:
                failed = now_failed.with_traceback(None)  # it leads here: a circle
            except NoInstance:
                if failed is None:
                    raise
                raise failed.error from None
            self._try_again(failed)

    def _try_again(self, failed: LegFailed) -> None:
        """Return if the request may be sent again, else raise what the client is told."""
        attempt = self._close_attempt()
        role = failed.instance.role
        if self.state is _CONTINUING or attempt is None or not attempt.may_repeat(failed, attempt.usable(role)):
            raise failed.error
        self._record.set_aside(role, failed.failure)
        self._record.start_over()
        self._on(_RETRY)

    def _route(
        self, attempt: Attempt, call: GenerationRequest | None, alone: Pieces | None
    ) -> tuple[Instance | None, Instance]:
        """Choose the prefill engine and the decode engine; None: the latter serves it alone."""
        of, record = self._of, self._record
        if call is None:
            record.single_reason, alone = SingleEngineReason.ONE_LEG, self._planned.body
        elif alone is None:
            record.single_reason = solo_reason(call.api, call.fields)
            if record.single_reason is _SEVERAL and may_share(call.api, call.fields) and of.fleet.shares_loads():
                record.single_reason = None
            if record.single_reason is None:
                record.single_reason = attempt.small_reason()
            pair = None if record.single_reason else self._pair(attempt.chances)
            if pair is not None and pair[0] is not None:
                return pair
            attempt.body = alone = [encode(call.fields)]
            if pair is not None:
                record.single_reason = SingleEngineReason.FEW_MATCH
                return pair
        attempt.body = alone
        return None, attempt.one(of.fleet.usable(Role.DECODE))

    def _pair(self, chances: RetryAttempts) -> tuple[Instance | None, Instance] | None:
        """Choose two engines, or a decode engine whose turn it is alone.

        None: there is no prefill engine, and any decode engine may do it alone.
        """
        fleet, ask, may_be_alone = self._of.fleet, self._planned.ask, self._settings.decode_only_fallback
        try:
            if not chances.avoided:
                return fleet.any_pair(ask, may_be_alone=may_be_alone)
            decodes = chances.among(fleet.usable(Role.DECODE))
            prefills = chances.among(fleet.usable(Role.PREFILL))
            return fleet.pair(prefills, decodes, ask.once_more(), may_be_alone=may_be_alone)
        except NoMatchingInstance:
            if not self._settings.decode_only_fallback:
                raise
            self._record.single_reason = SingleEngineReason.NO_MATCH
        except NoInstance:
            if not self._settings.decode_only_fallback:
                raise
            fleet.usable(Role.DECODE)  # raises NoInstance, if that is why
            self._record.single_reason = SingleEngineReason.NO_PREFILL
        return None

    # ---- PREFILLING, BOTH, DECODING

    def _set_off(
        self, attempt: Attempt, call: GenerationRequest | None, prefill: Instance | None, decode: Instance
    ) -> PrefillLeg | None:
        """Send what can be sent before an engine has answered; return the leg whose answer the decode leg needs."""
        if call is None or prefill is None:
            self._on(_SINGLE)
            return None
        attempt.hold_slot(decode)
        told = self._of.learned.coordinates(prefill.id)
        if told is None:
            self._on(_PULL)
            return attempt.send_prefill(call, prefill, reuses=self._settings.reuse_prompt_tokens)
        record = self._record
        record.push, record.transfer, attempt.told = _AT_ONCE, attempt.transfer, told
        params = push.decode_params(told, call.api, attempt.id, attempt.transfer)
        attempt.body = [request_bodies.decode_body(request_bodies.named(call.api, call.fields, attempt.id), params)]
        self._on(_PUSH)
        attempt.send_prefill(call, prefill, reuses=False)
        return None

    def _hand_over(self, attempt: Attempt, call: GenerationRequest | None, leg: PrefillLeg) -> bool:
        """Tell the decode engine what the prefill engine has answered, unless that is the whole answer: then True."""
        first = leg.first
        self._on(_PREFILLED if first is None else _FIRST_TOKEN)
        if first is not None:
            self._show_token(attempt, first)
            if first.is_all:
                attempt.settle(leg)
                return True
        if call is not None and leg.handover is not None:
            attempt.body = decode_body(call, self._record, attempt.id, leg.handover, first)
        return False

    def _show_token(self, attempt: Attempt, first: FirstToken) -> None:
        """Begin a stream with the prefill engine's token."""
        record, response = self._record, self._response
        record.ttft_s = self._of.clock() - self._start
        response.begin(_OK, self._lines(STREAM), first.events(), streams=True, last=first.is_all)
        attempt.token_shown()
        if first.is_all:
            record.answered = True
            response.end()
        else:
            self._replay = behind(first) if self._settings.resume_streams else Spliced(first)

    async def _decode(self, attempt: Attempt, decode: Instance, lent_by: PrefillLeg | None) -> None:
        """Get the answer from a decode engine, or from another one if this one got nothing of the request.

        ``lent_by``: the leg whose blocks the decode engine is told to read.

        Raises:
            LegFailed: none has begun to answer.
            EngineError: a stream broke off, or is not complete.
        """
        leg = attempt.send_decode(decode)
        try:
            while not leg.has_begun():
                failed = attempt.failed()
                if failed is None:
                    await self._steps
                else:
                    decode = self._next_decode(attempt, failed, lent_by)
                    self._on(_NEXT_DECODE)
                    leg = attempt.send_decode(decode)
        finally:
            if lent_by is not None:
                attempt.settle(lent_by)
        if leg.lines is not None:
            await self._stream(attempt, leg)
        else:
            self._show_whole(attempt, leg)

    def _next_decode(self, attempt: Attempt, failed: LegFailed, lent_by: PrefillLeg | None) -> Instance:
        """Choose another engine for a decode leg; raises LegFailed if none may have it."""
        if failed.rule.again is not RetryScope.DECODE:
            raise failed
        if lent_by is not None:
            attempt.note_read(lent_by)
        others = attempt.others(failed.instance, lent_by)
        if not others or not attempt.may_repeat(failed, others):
            raise failed
        self._record.set_aside(Role.DECODE, failed.failure)
        failed.with_traceback(None)  # it leads to frames that hold the leg, which holds it: a circle
        return attempt.one(others)

    # ---- STREAMING, and whole answers

    async def _stream(self, attempt: Attempt, leg: DecodeLeg) -> None:
        """Show a stream to its end.

        Raises:
            EngineError: it broke off, or is not complete.
        """
        self._on(_FIRST_EVENT)
        self._show_beginning(attempt, leg)
        while not leg.is_over:
            self._raise_broken(leg)
            await self._steps
        self._raise_broken(leg)
        rest, complete = leg.finish()
        if not complete:
            error = EngineError(f"{leg.engine} ended its stream without [DONE]")
            leg.failure = failure_of(error)
            raise error
        attempt.close(leg)
        self._record.answered = True
        self._note_said(rest)
        self._response.end(rest if self._replay is None else self._replay.feed(rest))

    def _show_beginning(self, attempt: Attempt, leg: DecodeLeg) -> None:
        """Write the head with the first event: the head's time is the first token's."""
        shown, replay, response = leg.take_shown(), self._replay, self._response
        is_plain = replay is None and not self._looks_at_end
        attempt.stream_to(leg, response.write if is_plain else self._pour, response.relay if is_plain else None)
        if self._paused:
            attempt.pause()
        if replay is not None:
            shown = replay.gap() + replay.feed(shown)
        self._note_said(shown)
        if not response.begun:
            self._record.ttft_s = self._of.clock() - self._start
            response.begin(_OK, self._lines(leg.content_type), shown, streams=True, last=leg.is_last and replay is None)
        elif shown:  # it was begun by an engine that has broken off since
            response.write(shown)

    def _pour(self, piece: bytes) -> None:
        """Show some more of a stream whose end is remembered, or which another engine could go on with."""
        replay = self._replay
        if replay is not None:
            piece = replay.feed(piece)
        if piece:
            self._note_said(piece)
            self._response.write(piece)
        if replay is not None and replay.broken:
            self._steps.wake()  # last: what goes on from here may end the answer

    def _raise_broken(self, leg: DecodeLeg) -> None:
        if leg.fault is not None:
            raise leg.fault.error
        if self._replay is not None and self._replay.broken:
            raise EngineError("the engine sent an error in its stream")

    def _show_whole(self, attempt: Attempt, leg: DecodeLeg) -> None:
        shown = leg.take_shown()
        self._note_said(shown)
        attempt.close(leg)
        if self._response.begun:
            raise EngineError(f"{leg.engine} answered with something that is no stream")  # it cannot be the rest of one
        self._record.answered = True
        self._response.begin(_OK, self._lines(leg.content_type), shown, streams=False)

    def _note_said(self, piece: bytes) -> None:
        if piece and self._looks_at_end:
            self._record.wrote(piece)

    @property
    def _looks_at_end(self) -> bool:
        """Tell whether the size and the end of the answer matter: whether blocks have arrived, or will be found."""
        return self._record.push is _AT_ONCE or self._of.fleet.remembers

    def _lines(self, content_type: bytes) -> bytes:
        of = self._of
        if of.lifetime.stage is not _SERVING:
            self._response.keep_alive = False
        return head_lines(self._record, content_type, shows_times=of.settings.server_timing)

    async def _answer_and_resume(self, call: GenerationRequest) -> None:
        """Show a stream that a decode engine goes on with behind the first token, or when its own breaks off."""
        settings, asked = self._settings, call
        if settings.resume_streams:
            self._replay = Replay(call.api, call.fields)
            asked = GenerationRequest(call.api, traced(call.fields), call.headers, call.rank)
        chances, left = RetryAttempts(settings.retries), settings.retries
        alone: Pieces | None = None
        broken: EngineError | None = None  # why the stream broke off that is to be resumed
        while True:
            try:
                await self._answer(asked, chances, alone, shows=settings.first_token_from is _FROM_PREFILL)
                return
            except ProxyError as error:
                is_shown = self.state is _STREAMING or self.state is _CONTINUING
                if is_shown and isinstance(error, EngineError):
                    broken = error.with_traceback(None)  # it leads here: a circle
                elif is_shown and isinstance(error, Refused):
                    broken = self._refused_rest(error)
                elif broken is None or is_shown:
                    raise
                else:
                    raise broken from None
            failure = failure_of(broken) if self.state is _CONTINUING else Failure.BAD_RESPONSE
            self._close_attempt()
            replay = self._replay
            if replay is None:
                raise broken
            if (ending := replay.ending()) is not None:
                self._record.answered = True
                self._response.end(replay.gap() + ending)
                return
            fields = replay.again() if left > 0 else None
            if fields is None or not self._of.budget.grants(now=self._of.clock()):
                raise broken
            left -= 1
            failed = self._record.decode
            self._record.set_aside(Role.DECODE, failure)
            chances = RetryAttempts(settings.retries, set() if failed is None else {failed.instance})
            alone = [encode(fields)]
            self._on(_RESUME)

    # ---- several prompts

    def _may_divide(self, call: GenerationRequest, prompt: msgspec.Raw) -> bool:
        """Tell whether the request for one of the prompts would be split between two engines."""
        fields = one_of(call.fields, prompt)
        reason = solo_reason(call.api, fields)
        if reason is not None:
            shares = reason is _SEVERAL and may_share(call.api, fields) and self._of.fleet.shares_loads()
            if not shares:
                return False
        try:
            return bool(self._of.fleet.usable(Role.PREFILL))
        except NoInstance:
            return False

    async def _answer_each(self, call: GenerationRequest, prompts: Sequence[msgspec.Raw]) -> None:
        """Ask for each of the prompts by itself, and give the client one answer.

        Raises:
            ProxyError: what the client is told.
        """
        self._record.push = LegOrder.EACH_PROMPT
        name = f"cmpl-{self._record.request_id}"
        n = choices_of(call.fields)
        array = self._array = PromptArray(
            self._planned, call, prompts, name=name, n=n, new=self._part, wake=self._steps.wake
        )
        if self._paused:
            array.pause()
        try:
            while True:
                array.begin_more()
                if piece := array.take():
                    self._show_more(piece)
                if array.is_over:
                    break
                await self._steps
        except Refused as refused:
            raise told_in_stream(refused) if self._response.begun else refused from None
        finally:
            self._array = None
            array.drop(ClientGone())
        self._show_all(array)

    def _part(self, response: ResponseWriter, plan: RequestPlan, place: int) -> PromptRequest:
        """Return a request of its own for the prompt at a place."""
        own_id = RequestId(f"{self._record.request_id}-p{place}")
        part = Request(self._of, response, plan.path, plan.headers, own_id=own_id, plan=plan)
        part._record.client_id = self._record.client_id
        return part

    def _show_more(self, piece: bytes) -> None:
        """Write some of the stream of all prompts."""
        if self._response.begun:
            self._response.write(piece)
            return
        self._record.ttft_s = self._of.clock() - self._start
        self._response.begin(_OK, self._lines(STREAM), piece, streams=True)

    def _show_all(self, array: PromptArray) -> None:
        """Write what is left of the answer to all prompts; raises EngineError: there is none."""
        if not self._planned.streams:
            whole = array.whole()
            self._record.answered = True
            self._response.begin(_OK, self._lines(JSON_TYPE), whole, streams=False)
            return
        end = array.end()
        if not self._response.begun:  # no prompt has got a token
            self._response.begin(_OK, self._lines(STREAM), b"", streams=True, last=True)
        self._record.answered = True
        self._response.end(end)

    def _refused_rest(self, refused: Refused) -> EngineError:
        """Return why the stream broke off that an engine was to go on with; raise what another one would say, too."""
        leg = self._record.decode
        why = f"{'' if leg is None else leg.instance} refused to go on with status {refused.status}"
        if failure_of(refused) is Failure.REFUSED:
            raise EngineError(why) from None
        return EngineBusy(why) if refused.status in BUSY else EngineFault(why)

    # ---- OVER

    def _tell(self, error: Exception) -> int:
        """Tell the client what went wrong, or hang up on it; return the status for the log."""
        try:
            return self._write_error(error)
        except Exception as bug:
            logger.exception("request %s cannot be answered", self._record.request_id)
            bug.with_traceback(None)
            self._response.keep_alive = False
            return _BUG

    def _write_error(self, error: Exception) -> int:
        """Tell the client what went wrong, as far as it can be told; return the status for the log."""
        record, response = self._record, self._response
        if isinstance(error, ClientGone):
            return CLIENT_CLOSED_REQUEST
        if not isinstance(error, ProxyError):
            logger.error("request %s failed", record.request_id, exc_info=error)
        error.with_traceback(None)  # it leads to frames that hold the request, and the error: a circle
        error.__context__ = None  # and so does this
        record.error = str(error)
        self.failure = error
        if response.begun:
            response.keep_alive = response.keep_alive and not isinstance(error, TurnedAway)
            event = last_event(self._head.path, error)
            self._note_said(event)
            record.answered = True
            response.end(event)
            return _OK
        if isinstance(error, Refused):  # an engine's own words
            status, content_type, body = error.status, error.content_type.encode("latin-1"), error.body
        else:
            (status, body), content_type = error_body(error), JSON_TYPE
        lines = self._lines(content_type)
        if isinstance(error, TurnedAway):
            lines += b"retry-after: %d\r\n" % error.retry_after_s
        elif isinstance(error, Unauthorized):
            lines += b"www-authenticate: %b\r\n" % error.asks.encode("latin-1")
        response.begin(status, lines, body, streams=False)
        return status

    def _close_attempt(self) -> Attempt | None:
        """Drop what is under way."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close_all()
        return attempt

    def _end(self, status: int) -> None:
        """The request is over: count it, and let go of everything."""
        of, record = self._of, self._record
        self._on(_END)
        self.response_complete = True
        self._steps.end()
        self._plan = self._replay = None  # the connection keeps us until its next request
        self._head = _NO_HEAD
        record.over(status, of.clock() - self._start)
        try:
            of.over(self)
            ticket, self._ticket = self._ticket, None
            if ticket is not None:
                of.gate.leave(ticket)
            if self._body:
                self._free_body()
            of.telemetry.later.add(of.request_over, record)
            if self._span is not None:
                self._span.end()
        finally:
            self._response.close()  # or the connection would wait for ever


def _may_resume(call: GenerationRequest) -> bool:
    return can_resume(call.api, call.fields) and solo_reason(call.api, call.fields) is None
