"""One request, from its head to its end: the coroutine that walks the table of requests/lifecycle.py.

The coroutine has no task: it is resumed by the event loop's reads (``wake``), and by the one timer that looks at the
time of all requests (requests/service.py). So nothing else may be awaited in it than ``_news``. What its legs tell it
(requests/legs.py) is taken in at once, and the coroutine goes on when there is something to decide. The pieces of a
stream go from the decode leg to the client without it.
"""

import logging
from collections.abc import Coroutine, Generator, Sequence
from contextlib import suppress
from typing import Final

from xpyd_proxy.core import dialect, push
from xpyd_proxy.core.admission import State as TicketState
from xpyd_proxy.core.admission import Ticket
from xpyd_proxy.core.journey import HUNG_UP, Journey, Outcome, client_id
from xpyd_proxy.core.lifetime import Stage
from xpyd_proxy.core.load import ASK_FOR_REPORT
from xpyd_proxy.core.model import (
    Answer,
    Call,
    Handover,
    Headers,
    Instance,
    InstanceId,
    Push,
    Role,
    Solo,
)
from xpyd_proxy.core.model import Leg as ReleaseLeg
from xpyd_proxy.core.passing import check_type, clean_answer
from xpyd_proxy.core.raw_json import Pieces, encode
from xpyd_proxy.core.replay import Replay, can_resume, traced
from xpyd_proxy.core.retries import Again, Chances, Failure, LegFailed, failure_of
from xpyd_proxy.core.routing import solo_reason
from xpyd_proxy.core.rules import Patience, Rules
from xpyd_proxy.core.said import Coordinates
from xpyd_proxy.core.usage import prompt_tokens, prompt_tokens_in
from xpyd_proxy.core.verdict import check_prefill, refused_decode
from xpyd_proxy.errors import (
    EngineError,
    EngineTimeout,
    NoInstance,
    OutOfTime,
    ProxyError,
    Refused,
    TurnedAway,
    Unauthorized,
)
from xpyd_proxy.requests.error_body import error_body
from xpyd_proxy.requests.examiner import LARGE
from xpyd_proxy.requests.handovers import decode_body, prefill_body
from xpyd_proxy.requests.intake import JSON_TYPE, Plan, RequestHead
from xpyd_proxy.requests.legs import DecodeLeg, EngineLeg, PrefillLeg
from xpyd_proxy.requests.lifecycle import TRANSITIONS, RequestEvent, RequestState
from xpyd_proxy.requests.response import ResponseWriter, head_lines, last_event
from xpyd_proxy.requests.service import Requests, RequestSpan

_RECEIVED, _WAITING, _ROUTING, _PREFILLING, _BOTH, _DECODING, _STREAMING, _OVER = RequestState
_RANK: Final = b"x-data-parallel-rank"
_RELEASES_MOST: Final = 16  # decode engines of which one is asked to free blocks
_BUG: Final = 500
logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has closed its connection."""


class _Pause:
    """What the coroutine of a request waits for."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        yield None


_PAUSE: Final = _Pause()


class Request:
    """One request. To uvicorn's protocol it is the cycle of its connection."""

    __slots__ = (
        "_attempt_id",
        "_body",
        "_caller",
        "_chances",
        "_counted",
        "_decode",
        "_ends_at",
        "_has_news",
        "_head",
        "_heard",
        "_held",
        "_interrupt",
        "_is_waiting",
        "_journey",
        "_life",
        "_of",
        "_patience",
        "_paused",
        "_plan",
        "_prefill",
        "_replay",
        "_response",
        "_rules",
        "_size",
        "_slot",
        "_span",
        "_start",
        "_streamed_at",
        "_tail",
        "_ticket",
        "_told",
        "_transfer",
        "disconnected",
        "response_complete",
        "state",
    )

    def __init__(
        self, of: Requests, response: ResponseWriter, path: str, headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        head = self._head = RequestHead(path, headers)
        name = head.shown.get(b"x-request-id")
        self.state = _RECEIVED
        self._of = of
        self._response = response
        self._start = of.clock()
        self._journey = Journey(of.new_id(), client_id=None if name is None else client_id(name))
        self._span: RequestSpan | None = None
        if of.spans is not None:
            self._span = of.spans.request(self._journey, path, tuple(headers))
        self._caller = ""
        self._body: list[bytes] = []
        self._tail = bytearray()  # the last pieces of it, while it comes
        self._size = 0  # bytes of it
        self._held = 0  # bytes of it that are charged
        self._life: Coroutine[object, None, None] | None = None
        self._is_waiting = self._has_news = False
        self._interrupt: Exception | None = None  # what ends the request from outside
        self._ticket: Ticket | None = None
        self._plan: Plan | None = None
        self._rules: Rules = of.rules
        self._patience: Patience = self._rules.patience
        self._ends_at: float | None = None
        self._prefill: PrefillLeg | None = None
        self._decode: DecodeLeg | None = None
        self._slot: Instance | None = None  # a decode engine whose slot is held while the prefill leg is under way
        self._told: Coordinates | None = None  # what the decode engine was told of the prefill engine in advance
        self._replay: Replay | None = None
        self._counted: int | None = None  # tokens of the prompt, as the prefill engine says
        self._heard = self._paused = False
        self._streamed_at: float | None = None  # when a stream began
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
        """Judge the head; False: the request is refused, and answered."""
        try:
            self._caller = self._of.intake.check(self._head)
        except ProxyError as error:
            self._refuse(error)
            return False
        return True

    def take(self, piece: bytes, *, is_all: bool = False) -> None:
        """Take a piece of the body; ``is_all``: it is complete, and was not waited for."""
        if self.response_complete:
            return  # it was refused
        self._size += len(piece)
        try:
            self._of.intake.check_size(self._size)
            if not is_all:
                self._of.gate.hold(len(piece))
                self._held += len(piece)
        except ProxyError as error:
            self._refuse(error)
            return
        if is_all:
            self._body.append(piece)
            return
        tail = self._tail
        tail += piece
        if len(tail) >= _PART:
            self._body.append(bytes(tail))
            tail.clear()

    def begin(self) -> None:
        """The request is complete: serve it."""
        if self.response_complete:
            return
        self._of.begun(self)
        self._life = self._live()
        self._step()

    def pause(self) -> None:
        """Have the engine wait: the client is slow, which is not held against the engine."""
        self._paused = True
        if self.state is _STREAMING and self._decode is not None:
            self._decode.hold()

    def resume(self) -> None:
        """Go on; the engine has its full time again."""
        self._paused, self._heard = False, True
        if self.state is _STREAMING and self._decode is not None:
            self._decode.go_on()

    def interrupt(self, error: Exception) -> None:
        """End the request with this, at the next point at which it waits."""
        if self._interrupt is None and self.state is not _OVER:
            self._interrupt = error
            if self._life is None:  # its body has not come
                self._refuse(error)
            else:
                self.wake()

    def crash(self, bug: Exception) -> None:
        """Something was raised that should not be: the client is told, and the log says what."""
        self.interrupt(bug)

    def _refuse(self, error: Exception) -> None:
        """Answer a request before its life has begun."""
        self._end(self._status_of(error))

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        legs = (self._prefill, self._decode)
        return [leg.instance.id for leg in legs if leg is not None and not leg.is_closed]

    # ---- the coroutine, and what resumes it

    def wake(self) -> None:
        """Something has come that the coroutine may wait for."""
        if self._is_waiting:
            self._is_waiting = False
            self._step()
        else:
            self._has_news = True

    def _step(self) -> None:
        life = self._life
        if life is not None:
            with suppress(StopIteration):
                life.send(None)

    async def _news(self) -> None:
        """Wait until something has happened; raises what ends the request from outside."""
        if self._has_news:
            self._has_news = False
        else:
            self._is_waiting = True
            await _PAUSE
        if self._interrupt is not None:
            raise self._interrupt

    def _on(self, event: RequestEvent) -> None:
        """Take a step of the table; one that is not in it is a bug, and raises."""
        self.state = TRANSITIONS[self.state][event]

    async def _live(self) -> None:
        """Serve the request to its end, whatever that is; nothing is raised."""
        status = 200
        try:
            await self._serve()
        except Exception as error:  # noqa: BLE001 (each is answered, and what is a bug is logged)
            status = self._status_of(error)
        try:
            self._close_legs()
        finally:
            self._end(status)

    async def _serve(self) -> None:
        plan = self._plan = await self._read()
        await self._admitted(plan)
        self._rules = rules = self._of.rules  # those of now: a reload may have come while it waited
        self._patience = patience = rules.patience
        self._of.budget.came(now=self._of.clock())
        seconds = patience.total_s(streams=plan.streams)
        self._ends_at = None if seconds is None else self._of.clock() + seconds
        call = plan.call
        if (
            call is not None
            and rules.resume
            and can_resume(call.api, call.fields)
            and solo_reason(call.api, call.fields) is None
        ):
            await self._serve_with_resume(call)
        else:
            await self._answer(call, Chances(rules.retries), None)

    # ---- RECEIVED, WAITING

    def _whole_body(self) -> bytes:
        if self._tail:
            self._body.append(bytes(self._tail))
            self._tail.clear()
        if len(self._body) != 1:
            self._body = [b"".join(self._body)]
        return self._body[0]

    async def _read(self) -> Plan:
        """Return what the engines are asked; a long body is read in a thread."""
        intake, head, body = self._of.intake, self._head, self._whole_body()
        work = intake.reading(head, body)
        if len(body) <= LARGE:
            fields = work()
        else:
            future = self._of.examiner.submit(work)
            future.add_done_callback(lambda _: self.wake())
            while not future.done():
                await self._news()
            fields = future.result()
        plan = intake.plan(head, body, fields, self._caller)
        self._body = []
        return plan

    async def _admitted(self, plan: Plan) -> None:
        """Wait for a place.

        Raises:
            TurnedAway: there is none, or not in time.
        """
        of = self._of
        self._free()
        self._ticket = ticket = of.gate.arrive(self._caller, plan.priority, self._size)
        if ticket.state is TicketState.WAITING:
            self._on(RequestEvent.QUEUED)
            of.gate.watch(ticket, self.wake)
            try:
                while ticket.state is TicketState.WAITING:
                    await self._news()
            finally:
                of.gate.unwatch(ticket)
        of.gate.check(ticket)
        self._on(RequestEvent.ADMITTED)

    def _free(self) -> None:
        """Give back the bytes of the body that were charged while it came."""
        if self._held:
            self._of.gate.free(self._held)
            self._held = 0

    # ---- ROUTING, and what follows from failures

    async def _answer(self, call: Call | None, chances: Chances, alone: Pieces | None) -> None:
        """Try until an engine has given the whole answer; ``alone``: the body for one engine that is enough.

        Raises:
            ProxyError: what the client is told.
        """
        failed: LegFailed | None = None
        while True:
            try:
                await self._try(call, chances, alone)
                return
            except LegFailed as now_failed:
                failed = now_failed.with_traceback(None)  # it leads here: a circle
            except NoInstance:
                if failed is None:
                    raise
                raise failed.error from None
            self._close_legs()
            self._try_again(chances, failed)

    def _try_again(self, chances: Chances, failed: LegFailed) -> None:
        """Return if the request may be sent again, else raise what the client is told."""
        role = failed.instance.role
        if not self._may_repeat(chances, failed, self._usable(role)):
            raise failed.error
        self._journey.set_aside(role, failed.failure)
        self._journey.start_over()
        self._on(RequestEvent.RETRY)

    async def _try(self, call: Call | None, chances: Chances, alone: Pieces | None) -> None:
        """Choose engines, send the legs, and show the answer."""
        of, journey = self._of, self._journey
        self._attempt_id, self._transfer = journey.attempt_id, of.new_transfer()
        self._chances, self._counted, self._told = chances, None, None
        pair: tuple[Instance, Instance] | None = None
        if call is None or alone is not None:
            if call is None:
                journey.solo = Solo.ONE_LEG
        else:
            journey.solo = solo_reason(call.api, call.fields, min_prompt_chars=self._rules.min_prompt_chars)
            if journey.solo is None:
                pair = self._pair(chances)
        if call is None or pair is None:
            if alone is None:
                alone = self._planned().body if call is None else [encode(call.fields)]
            await self._single(alone)
            return
        prefill, decode = pair
        told = of.learned.coordinates(prefill.id)
        if told is None:
            await self._pull(call, prefill, decode)
        else:
            await self._push(call, prefill, decode, told)

    def _planned(self) -> Plan:
        plan = self._plan
        if plan is None:
            raise RuntimeError("the request is not read yet")
        return plan

    def _pair(self, chances: Chances) -> tuple[Instance, Instance] | None:
        """Choose two engines; None: there is no prefill engine, and a decode engine may do it alone."""
        fleet, ask = self._of.fleet, self._planned().ask
        try:
            if not chances.avoided:
                return fleet.any_pair(ask)
            decodes = chances.among(fleet.usable(Role.DECODE))
            return fleet.pair(chances.among(fleet.usable(Role.PREFILL)), decodes, ask.once_more())
        except NoInstance:
            if not self._rules.alone_without_prefill:
                raise
            fleet.usable(Role.DECODE)  # raises NoInstance, if that is why
        self._journey.solo = Solo.NO_PREFILL
        return None

    def _one(self, among: Sequence[Instance]) -> Instance:
        """Choose a decode engine."""
        ask, chances = self._planned().ask, self._chances
        return self._of.fleet.one(chances.among(among), ask.once_more() if chances.avoided else ask)

    # ---- SINGLE, PULL and PUSH

    async def _single(self, body: Pieces) -> None:
        """One engine serves the request alone."""
        decode = self._one(self._of.fleet.usable(Role.DECODE))
        self._on(RequestEvent.SINGLE)
        await self._decoded(decode, body, None)

    async def _pull(self, call: Call, prefill: Instance, decode: Instance) -> None:
        """Tell the decode engine what the prefill engine has answered."""
        of = self._of
        self._on(RequestEvent.PULL)
        of.fleet.enter(decode, self._attempt_id)  # its slot is held from now on
        self._slot = decode
        self._prefill = leg = self._send_prefill(call, prefill, reuses=self._rules.reuse_tokens)
        while leg.handover is None:
            self._raise_failure(leg)
            await self._news()
        handover = leg.handover
        body = decode_body(call, self._journey, self._attempt_id, handover)
        self._on(RequestEvent.PREFILLED)
        try:
            await self._decoded(decode, body, leg)
        except BaseException:
            if not leg.is_read and handover.coordinates is None:
                self._release(call, prefill, handover)
            raise

    async def _push(self, call: Call, prefill: Instance, decode: Instance, told: Coordinates) -> None:
        """Send both legs at once; the decode engine may well answer first."""
        journey = self._journey
        journey.push, journey.transfer, self._told = Push.AT_ONCE, self._transfer, told
        params = push.decode_params(told, call.api, self._attempt_id, self._transfer)
        body: Pieces = [dialect.decode_body(dialect.named(call.api, call.fields, self._attempt_id), params)]
        self._on(RequestEvent.PUSH)
        self._of.fleet.enter(decode, self._attempt_id)
        self._slot = decode
        self._prefill = self._send_prefill(call, prefill, reuses=False)
        await self._decoded(decode, body, None)

    def _send_prefill(self, call: Call, prefill: Instance, *, reuses: bool) -> PrefillLeg:
        of = self._of
        body = prefill_body(call, self._attempt_id, self._transfer, reuses=reuses)
        now = of.clock()
        leg = PrefillLeg(self, prefill, now, now + self._patience.prefill_s)
        self._journey.prefill = leg.visit
        self._send(leg, body, asks_for_report=of.reports)
        return leg

    async def _decoded(self, decode: Instance, body: Pieces, lent_by: PrefillLeg | None) -> None:
        """Get the answer from a decode engine, or from another one if this one got nothing of the request.

        ``lent_by``: the leg whose blocks the decode engine is told to read.
        """
        while True:
            leg = self._send_decode(decode, body)
            try:
                await self._begun(leg, lent_by)
                break
            except LegFailed as failed:
                if failed.instance.role is not Role.DECODE:
                    raise
                others = self._others(decode, lent_by)
                is_next = failed.rule.again is Again.DECODE and bool(others)
                if not (is_next and self._may_repeat(self._chances, failed, others)):
                    raise
                self._journey.set_aside(Role.DECODE, failed.failure)
                failed.with_traceback(None)  # it leads to frames that hold the leg, which holds it: a circle
            self._on(RequestEvent.NEXT_DECODE)
            decode = self._one(others)
        if leg.streams:
            await self._streamed(leg)
        else:
            self._show_whole(leg)

    def _send_decode(self, decode: Instance, body: Pieces) -> DecodeLeg:
        of, plan, now = self._of, self._planned(), self._of.clock()
        seconds = self._patience.first_token_s if plan.streams else None
        self._decode = leg = DecodeLeg(self, decode, now, None if seconds is None else now + seconds)
        self._journey.decode = leg.visit
        prefill = self._prefill
        if prefill is not None and prefill.handover is not None and not prefill.is_followed:
            leg.follows = prefill.is_followed = True
            of.sight.later.add(of.sight.handed_over, now - prefill.handed_over_at, now)
        self._send(leg, body)
        if self._slot is not None:
            of.fleet.leave(self._slot, self._attempt_id)  # the leg has entered it
            self._slot = None
        return leg

    async def _begun(self, leg: DecodeLeg, lent_by: PrefillLeg | None) -> None:
        """Wait until a decode engine has begun to answer, and well; raises LegFailed."""
        try:
            while leg.shown is None:
                if self._told is not None and self._prefill is not None:
                    self._raise_failure(self._prefill)  # that it failed may be why the other one will
                self._raise_failure(leg)
                await self._news()
        finally:
            if lent_by is not None and (leg.was_sent if leg.is_closed else leg.is_sent):
                lent_by.is_read = True  # whatever becomes of it, the engines settle it between them

    def _raise_failure(self, leg: EngineLeg) -> None:
        if leg.fault is not None:
            raise leg.fault

    def _others(self, failed: Instance, lent_by: PrefillLeg | None) -> Sequence[Instance]:
        """List the engines that may get the decode leg of one that could not be reached.

        They must be able to read the blocks. None: it is too late for these, or another pair has better chances.
        """
        of = self._of
        decodes = self._usable(Role.DECODE)
        prefill = self._prefill
        if prefill is None:
            return decodes
        if lent_by is not None and of.clock() >= lent_by.handed_over_at + self._patience.handoff_s:
            return ()
        fitting = of.fleet.fitting(prefill.instance, decodes)
        fresh = [instance for instance in fitting if instance.id not in self._chances.avoided | {failed.id}]
        return fresh if fresh or len(fitting) < len(decodes) else fitting

    def _may_repeat(self, chances: Chances, failed: LegFailed, others: Sequence[Instance]) -> bool:
        return chances.take(failed, others) and self._of.budget.grants(now=self._of.clock())

    def _usable(self, role: Role) -> Sequence[Instance]:
        try:
            return self._of.fleet.usable(role)
        except NoInstance:
            return ()

    def _release(self, call: Call, prefill: Instance, handover: Handover) -> None:
        """Free the blocks of a prefill whose decode leg was never sent; the client does not wait for it."""
        of, visit = self._of, self._journey.decode
        body = dialect.release_body(call.fields, handover.params)
        tried = None if visit is None else visit.instance  # it may be why the leg was not sent: it is asked last
        fitting = self._chances.first(of.fleet.fitting(prefill, self._usable(Role.DECODE)))
        decodes = sorted(fitting, key=lambda instance: instance.id == tried)[:_RELEASES_MOST]
        headers = (*self._planned().headers, (b"x-request-id", self._attempt_id.encode()))
        legs = [ReleaseLeg(decode, dialect.RELEASE_PATH, body, self._ranked(headers, decode)) for decode in decodes]
        of.releaser.release(prefill, legs)

    # ---- STREAMING, and whole answers

    async def _streamed(self, leg: DecodeLeg) -> None:
        """Show a stream to its end; its pieces are passed on by ``stream_passed``.

        Raises:
            EngineError: it broke off, or is not complete.
        """
        self._on(RequestEvent.FIRST_EVENT)
        self._show_beginning(leg)
        while not leg.is_over:
            self._raise_broken(leg)
            await self._news()
        self._raise_broken(leg)
        rest, complete = leg.finish()
        if not complete:
            raise EngineError(f"{leg.engine} ended its stream without [DONE]")
        self._close(leg)
        self._journey.answered = True
        self._response.end(rest if self._replay is None else self._replay.feed(rest))

    def _raise_broken(self, leg: DecodeLeg) -> None:
        if leg.fault is not None:
            raise leg.fault.error
        if self._replay is not None and self._replay.broken:
            leg.failure = Failure.BROKEN
            raise EngineError("the engine sent an error in its stream")

    def _show_beginning(self, leg: DecodeLeg) -> None:
        """Write the head with the first event: the head's time is the first token's."""
        shown, replay = leg.take_shown(), self._replay
        if self._paused:
            leg.hold()
        if replay is not None:
            shown = replay.gap() + replay.feed(shown)
        if self._response.begun:  # by an engine that has broken off since
            if shown:
                self._response.write(shown)
            return
        self._streamed_at = self._of.clock()
        self._note_said(shown)
        lines = self._head_lines(leg.content_type)
        self._response.begin(200, lines, shown, streams=True, last=leg.is_last)

    def _show_whole(self, leg: DecodeLeg) -> None:
        shown = leg.take_shown()
        self._close(leg)
        self._note_said(shown)
        self._journey.answered = True
        if self._response.begun:  # a stream that was to be resumed: what this is cannot be its rest
            raise EngineError(f"{leg.engine} answered with something that is no stream")
        self._response.begin(200, self._head_lines(leg.content_type), shown, streams=False)

    def _note_said(self, piece: bytes) -> None:
        if self._journey.push is Push.AT_ONCE:
            self._journey.says(piece)

    def _head_lines(self, content_type: bytes) -> bytes:
        of = self._of
        if of.lifetime.stage is not Stage.SERVING:
            self._response.keep_alive = False
        return head_lines(self._journey, content_type, shows_times=of.settings.server_timing)

    async def _serve_with_resume(self, call: Call) -> None:
        """Serve a stream that another decode engine goes on with when its own breaks off."""
        of, left = self._of, self._rules.retries
        self._replay = replay = Replay(call.api, call.fields)
        asked = Call(call.api, traced(call.fields), call.headers, call.rank)
        chances = Chances(self._rules.retries)
        alone: Pieces | None = None
        first_error: EngineError | None = None
        while True:
            try:
                await self._answer(asked, chances, alone)
                return
            except ProxyError as error:
                if first_error is not None and self.state is not _STREAMING:
                    raise first_error from None  # the client is told why its stream broke off
                if self.state is not _STREAMING or not isinstance(error, EngineError):
                    raise
                first_error = error.with_traceback(None)  # it leads here: a circle
            self._close_legs()
            if (ending := replay.ending()) is not None:
                self._journey.answered = True
                self._response.end(replay.gap() + ending)
                return
            fields = replay.again() if left > 0 else None
            if fields is None or not of.budget.grants(now=of.clock()):
                raise first_error
            left -= 1
            broken = set() if self._journey.decode is None else {self._journey.decode.instance}
            self._journey.set_aside(Role.DECODE, Failure.BROKEN)
            chances, alone = Chances(self._rules.retries, broken), [encode(fields)]
            self._on(RequestEvent.RESUME)

    # ---- what the legs tell (LegOwner)

    def prefill_answered(self, leg: PrefillLeg, answer: Answer, /) -> None:
        """Take the handover out of the prefill engine's answer."""
        of, came, call = self._of, self._of.clock(), self._planned().call
        of.engines.done(leg)
        if of.reports and answer.load:
            of.fleet.reported(leg.instance, answer.load)
        if call is None:
            return  # it has no prefill leg
        reuses = self._rules.reuse_tokens and self._told is None
        try:
            check_prefill(leg.instance.id, answer)
            handover = of.handovers.take(
                call, self._attempt_id, self._transfer, leg.instance, told=self._told, answer=answer, reuses=reuses
            )
        except (EngineError, Refused) as error:
            self.leg_failed(leg, error)
            return
        seconds = self._note_time(leg, came)
        of.sight.later.add(of.proved, leg.instance, self._attempt_id, seconds, came)
        leg.handed_over_at, leg.handover = came, handover
        if self._span is not None and self._decode is None:
            self._span.handed_over()
        self._close(leg)
        self._counted = handover.counted
        self._compare()
        self.wake()

    def stream_begun(self, leg: DecodeLeg, received: bytes, /) -> None:
        """Note that a stream has begun well."""
        self._heard = True
        self._answered_well(leg, prompt_tokens_in(received))

    def decode_answered(self, leg: DecodeLeg, answer: Answer, /) -> None:
        """Judge an answer that is no stream."""
        self._of.engines.done(leg)
        leg.is_over = True
        if answer.status != 200:
            self.leg_failed(leg, refused_decode(leg.instance.id, answer))
            return
        try:
            check_type(leg.engine, leg.content_type)
            leg.shown = clean_answer(leg.engine, leg.content_type, answer.body)
        except EngineError as error:
            self.leg_failed(leg, error)
            return
        self._answered_well(leg, prompt_tokens(answer.body) if self._journey.solo is None else None)

    def _answered_well(self, leg: DecodeLeg, counted: int | None) -> None:
        of, now = self._of, self._of.clock()
        if leg.follows:
            of.sight.legs.promise(leg.instance.id)
        of.sight.later.add(of.proved, leg.instance, self._attempt_id, self._note_time(leg, now), now)
        self._hear(leg, counted)
        self._note_error_event(leg)
        if not leg.is_last:
            self.wake()

    def stream_passed(self, leg: DecodeLeg, piece: bytes, /) -> None:
        """Show some more of a stream."""
        self._heard = True
        self._note_error_event(leg)
        if leg.counts:
            self._hear(leg, prompt_tokens_in(piece))
        if leg.shown is not None:  # the beginning is not shown yet
            leg.shown += piece
            return
        replay = self._replay
        if replay is not None:
            piece = replay.feed(piece)
            if replay.broken:
                self.wake()
            if not piece:
                return
        self._note_said(piece)
        self._response.write(piece)

    def stream_ended(self, leg: DecodeLeg, /) -> None:
        """All of a stream is here."""
        self._of.engines.done(leg)
        leg.is_over = True
        if leg.lines is None:
            self.leg_failed(leg, EngineError(f"{leg.engine} ended its stream before the first event"))
        else:
            self.wake()

    def leg_failed(self, leg: EngineLeg, error: EngineError | Refused, /) -> None:
        """Note that a leg has failed, and how."""
        if leg.is_closed:
            return
        failed = LegFailed(leg.instance, error)
        failed.__cause__ = error
        _forget_frames(error)  # they hold the leg, which holds the error: a circle
        leg.fault, leg.failure = failed, failed.failure
        if isinstance(leg, PrefillLeg):
            self._unlearn(failed)
            if self.state is _STREAMING or (self._decode is not None and self._decode.shown is not None):
                self._journey.late = str(failed)  # the client is not concerned
        if leg.visit.ms is None:
            self._note_time(leg, self._of.clock())
        self._close(leg)
        self.wake()

    def _unlearn(self, failed: LegFailed) -> None:
        """Forget where an engine is whose leg has failed: it may come back as another one.

        One that has moved has just been learned.
        """
        if failed.failure not in (Failure.REFUSED, Failure.BUSY, Failure.MOVED):
            self._of.learned.forget(failed.instance.id)

    def _note_error_event(self, leg: DecodeLeg) -> None:
        if leg.lines is not None and leg.lines.erred:
            leg.failure = Failure.BROKEN  # now, for many clients hang up at an error

    # ---- how many tokens each engine has counted

    def _hear(self, leg: DecodeLeg, counted: int | None) -> None:
        """Take in how many tokens of prompt the decode engine has counted."""
        if self._journey.solo is not None:
            leg.counts = False
        elif counted is not None:
            leg.counts, leg.counted = False, counted
            self._compare()

    def _compare(self) -> None:
        """Complain when the legs had different prompts. The answer may be on its way: the log and the counters tell."""
        prefill, decode, counted = self._journey.prefill, self._journey.decode, self._counted
        said = None if self._decode is None else self._decode.counted
        if prefill is None or decode is None or None in (counted, said) or counted == said:
            return
        self._journey.fault = (
            f"{prefill.instance} counted {counted} prompt tokens and {decode.instance} {said}: "
            "they do not make the same prompt of a request"
        )
        self._of.sight.differed(prefill.instance, decode.instance)

    # ---- time

    def look(self, now: float) -> None:
        """See whether something has taken too long."""
        decode, prefill = self._decode, self._prefill
        if self.state is _STREAMING and decode is not None and (self._heard or self._paused):
            self._heard = False
            idle_s = self._patience.idle_s
            decode.due = None if idle_s is None else now + idle_s
        if self._ends_at is not None and now >= self._ends_at:
            self.interrupt(self._out_of_time())
            return
        for leg in (prefill, decode):
            if leg is not None and not leg.is_closed and leg.due is not None and now >= leg.due:
                leg.drop()
                self.leg_failed(leg, EngineTimeout(self._late(leg)))

    def _late(self, leg: EngineLeg) -> str:
        patience = self._patience
        if leg is self._prefill:
            return f"{leg.engine} did not answer within {patience.prefill_s:g} s"
        if self.state is _STREAMING:
            return f"{leg.engine} sent nothing for {patience.idle_s:g} s"
        return f"{leg.engine} sent no token within {patience.first_token_s:g} s"

    def _out_of_time(self) -> OutOfTime:
        seconds = self._patience.total_s(streams=self._planned().streams)
        if self.state is _STREAMING:
            return OutOfTime(f"the stream was not complete within {seconds:g} s")
        return OutOfTime(f"the request was not done within {seconds:g} s")

    # ---- legs

    def _send(self, leg: EngineLeg, body: Pieces, *, asks_for_report: bool = False) -> None:
        """Send a leg; one that cannot be sent has failed."""
        of, plan = self._of, self._planned()
        headers = self._ranked(plan.headers, leg.instance)
        if asks_for_report:
            headers = (*headers, ASK_FOR_REPORT)
        if self._span is not None:
            leg.span, headers = self._span.leg(leg.instance, headers)
        of.fleet.enter(leg.instance, self._attempt_id)
        try:
            of.engines.tell(
                leg,
                leg.instance,
                plan.path,
                headers=headers,
                request=self._attempt_id,
                body=body,
                content_type=plan.content_type,
            )
        except EngineError as error:
            self.leg_failed(leg, error)

    def _ranked(self, headers: Headers, instance: Instance) -> Headers:
        rank = instance.rank
        if rank is None and instance.role is Role.DECODE:
            rank = self._planned().ask.rank
        return headers if rank is None else (*headers, (_RANK, b"%d" % rank))

    def _note_time(self, leg: EngineLeg, now: float) -> float:
        """Note how long a leg has taken until now, and return it in seconds."""
        seconds = now - leg.sent_at
        leg.visit.ms = seconds * 1000
        return seconds

    def _close(self, leg: EngineLeg) -> None:
        """Count the end of a leg, once; what is left of it is dropped."""
        if leg.is_closed:
            return
        leg.is_closed = True
        of, now = self._of, self._of.clock()
        leg.was_sent = leg.is_sent
        if leg.visit.ms is None:
            self._note_time(leg, now)
        of.sight.later.add(of.sight.rode, leg.instance, now - leg.sent_at, leg.failure, self._attempt_id, now)
        of.fleet.ended(leg.instance, self._attempt_id, leg.failure)
        if leg.span is not None:
            leg.span.end(None if leg.fault is None else leg.fault.error)
        if not leg.complete:
            leg.drop()

    def _close_legs(self) -> None:
        """Drop what is still under way, the decode leg first."""
        for leg in (self._decode, self._prefill):
            if leg is not None:
                self._close(leg)
        if self._slot is not None:
            self._of.fleet.leave(self._slot, self._attempt_id)
        self._slot = self._prefill = self._decode = None

    # ---- OVER

    def _status_of(self, error: Exception) -> int:
        """Tell the client what went wrong, or hang up on it; return the status for the log."""
        try:
            return self._tell(error)
        except Exception as bug:
            logger.exception("request %s cannot be answered", self._journey.request_id)
            bug.with_traceback(None)
            self._response.keep_alive = False
            return _BUG

    def _tell(self, error: Exception) -> int:
        """Tell the client what went wrong, as far as it can be told; return the status for the log."""
        journey, response = self._journey, self._response
        if isinstance(error, ClientGone):
            return HUNG_UP
        if isinstance(error, EngineError) and self._decode is not None and not self._decode.is_closed:
            self._decode.failure = failure_of(error)
        if not isinstance(error, ProxyError):
            logger.error("request %s failed", journey.request_id, exc_info=error)
        error.with_traceback(None)  # it leads to frames that hold the request, and the error: a circle
        journey.fault = str(error)
        if response.begun:
            if isinstance(error, TurnedAway):
                response.keep_alive = False
            event = last_event(self._head.path, error)
            self._note_said(event)
            journey.answered = True
            response.end(event)
            return 200
        if isinstance(error, Refused):
            response.begin(
                error.status, self._head_lines(error.content_type.encode("latin-1")), error.body, streams=False
            )
            return error.status
        status, body = error_body(error)
        lines = self._head_lines(JSON_TYPE)
        if isinstance(error, TurnedAway):
            lines += b"retry-after: %d\r\n" % error.retry_after_s
        elif isinstance(error, Unauthorized):
            lines += b"www-authenticate: %b\r\n" % error.asks.encode("latin-1")
        response.begin(status, lines, body, streams=False)
        return status

    def _end(self, status: int) -> None:
        """The request is over: count it, and let go of everything."""
        of, journey, response = self._of, self._journey, self._response
        self.state = _OVER
        self.response_complete = True
        of.over(self)
        ticket = self._ticket
        if ticket is not None:
            of.gate.leave(ticket)
        self._free()
        first_s = None if self._streamed_at is None else self._streamed_at - self._start
        said = journey.before + journey.last if journey.push is Push.AT_ONCE else b""
        journey.before = journey.last = b""
        outcome = Outcome(self._head.path, status, of.clock() - self._start, first_s, said)
        if self._span is not None:
            self._span.end(outcome)
        of.sight.later.add(of.account, journey, outcome)
        self._life = self._interrupt = None
        self._plan = self._replay = self._ticket = None
        self._body, self._head = [], _NO_HEAD  # the connection keeps us until its next request
        response.close()


def _forget_frames(error: BaseException | None) -> None:
    """Have an error, and those that led to it, say no more where they were raised."""
    while error is not None:
        error.with_traceback(None)
        error = error.__cause__ or error.__context__


_PART: Final = 64 * 1024  # bytes of a body that are kept in one piece while it comes: more would be moved again
_NO_HEAD: Final = RequestHead("", ())
