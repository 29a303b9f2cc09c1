"""One try of a request: the legs it has sent, what they have told, and how they are counted.

A request that is sent again gets another attempt, with another id for both engines: they match their halves by it.
"""

import logging
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.fleet.load import ASK_FOR_REPORT
from pdrelay_proxy.core.model import (
    GenerationRequest,
    Instance,
    InstanceId,
    PrefillResult,
    Role,
    SingleEngineReason,
)
from pdrelay_proxy.core.protocol.engine_errors import leg_error
from pdrelay_proxy.core.protocol.fault_table import VERDICTS, Failure, Held
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.protocol.response_filter import check_type, clean_answer
from pdrelay_proxy.core.protocol.usage import cache_usage, prompt_tokens, usage_alone, with_cache_usage
from pdrelay_proxy.core.raw_json import Pieces
from pdrelay_proxy.core.routing.retries import BrokenAnswer, LegFailed, RetryAttempts
from pdrelay_proxy.core.schemas import Coordinates
from pdrelay_proxy.errors import EngineError, EngineTimeout, NoKvParams, Refused, RouterFull
from pdrelay_proxy.io.request_path.returned_kv import cached_on
from pdrelay_proxy.requests.engine_choice import EngineChoice
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.leg_bodies import prefill_body
from pdrelay_proxy.requests.legs import DecodeLeg, EngineLeg, LegOwner, PrefillLeg
from pdrelay_proxy.requests.lent_blocks import LentBlocks
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.lifecycle import RequestState
from pdrelay_proxy.requests.stream_move import StreamMove, move_timeout
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)
_OK: Final = 200
_BY_CACHE: Final = (SingleEngineReason.CACHED, SingleEngineReason.FASTER)  # what the engine has decided
_DECODE: Final = Role.DECODE  # looking a member up takes as long as a call
_PUSH: Final = TransferMode.PUSH
_TIMEOUT: Final = Failure.TIMEOUT
_IF_SERVED: Final = Held.IF_SERVED_ELSEWHERE
_CONTINUING: Final = RequestState.CONTINUING


class Attempt(LegOwner):
    """One try. It is the LegOwner of its legs; the life's coroutine is woken when one of them has news."""

    __slots__ = (
        "_life",
        "_plan",
        "_services",
        "_settings",
        "_shows_token",
        "_span",
        "body",
        "choice",
        "coordinates",
        "counted",
        "decode",
        "id",
        "is_streaming",
        "move",
        "prefill",
        "record",
        "retries",
        "transfer",
    )

    def __init__(
        self,
        life: RequestLife,
        plan: RequestPlan,
        settings: Settings,
        retries: RetryAttempts,
        shows_token: bool = False,  # noqa: FBT001, FBT002 (by name it costs 1,000 instructions more)
    ) -> None:
        """``shows_token``: the client may see the token of a prefill engine whose blocks are read."""
        services = life.services
        record = life.record
        self._services = services
        self._plan = plan
        self._settings = settings
        self._shows_token = shows_token
        self._life = life
        self._span = life.span
        self.record = record
        self.retries = retries
        self.id = record.attempt_id if record.retries or record.moves else record.request_id
        self.choice = EngineChoice(services.fleet, plan, settings, retries, record, self.id)
        self.transfer = services.new_transfer()
        self.body = plan.body  # of the decode leg
        self.prefill: PrefillLeg | None = None
        self.decode: DecodeLeg | None = None
        self.coordinates: Coordinates | None = None  # what the decode engine was told of the prefill engine in advance
        self.counted: int | None = None  # tokens of the prompt, as the prefill engine says
        self.is_streaming = False  # a stream is being shown
        self.move: StreamMove | None = None  # the stream comes from an engine that drains

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        legs = (self.prefill, self.decode)
        return [leg.instance.id for leg in legs if leg is not None and not leg.is_closed]

    # ---- sending

    def send_prefill(self, call: GenerationRequest, prefill: Instance, *, reuses: bool) -> PrefillLeg:
        """Send the prefill leg; ``reuses``: its answer shall tell the tokens of the prompt."""
        services = self._services
        settings = self._settings
        shows = self._shows_token and services.leg_bodies.may_show(call, prefill.id)
        learns = services.fleet.learner is not None and services.fleet.asks_for_ids(call, self._plan.ask)
        holder, ids, move, seconds = None, None, self.move, settings.first_token_timeout_s
        if move is not None:
            ids, reuses, learns = move.ids, False, False
            seconds = min(seconds, move.seconds_for(prefill))
        elif settings.return_kv:
            holder = cached_on(services.fleet, self._plan.ask, prefill.id)
            services.telemetry.kv_return_looked_up(named=holder is not None)
        body = prefill_body(
            call,
            self.id,
            self.transfer,
            reuses=reuses,
            shows=shows,
            learns=learns,
            cached_on=holder,
            ids=ids,
            pushes=self.choice.mode is _PUSH,
        )
        now = services.clock()
        leg = PrefillLeg(self, prefill, now, now + seconds)
        leg.reuses, leg.shows, leg.learns = reuses, shows, learns
        self.prefill = leg
        self.choice.prefill = prefill
        self.record.prefill = leg.record
        self._send(leg, body, asks_for_report=services.reports)
        return leg

    def send_decode(self, decode: Instance) -> DecodeLeg:
        """Send a decode leg; the slot that is held at its engine becomes its own."""
        services = self._services
        now = services.clock()
        prefill = self.prefill
        seconds = self._settings.first_token_timeout_s if self._plan.streams else None
        if self.move is not None:
            seconds = min(self._settings.first_token_timeout_s, move_timeout(self._settings))
        leg = DecodeLeg(self, decode, now, None if seconds is None else now + seconds, services.clock)
        leg.counts = self.record.single_reason is None
        leg.cache_usage = self._life.cache_usage
        self.decode, self.record.decode = leg, leg.record
        leg.record.expected = self.choice.expected
        self.choice.expected = None
        if prefill is not None and prefill.handover is not None and not prefill.is_followed:
            leg.follows = prefill.is_followed = True
            services.telemetry.handed_over(now - prefill.handed_over_at)
        self._send(leg, self.body)
        return leg

    def _send(self, leg: EngineLeg, body: Pieces, *, asks_for_report: bool = False) -> None:
        """Send a leg; one that cannot be sent has failed."""
        services = self._services
        plan = self._plan
        instance = leg.instance
        leg.record.name = self.id
        headers = plan.headers
        if instance.rank is not None or plan.ask.rank is not None:
            headers = plan.headers_for(instance)
        if asks_for_report:
            headers = (*headers, ASK_FOR_REPORT)
        if self._span is not None:
            leg.span, headers = self._span.leg(instance, headers)
        if self.choice.slot is instance:
            self.choice.slot = None
        else:
            services.fleet.enter(instance, self.id)
        if services.fleet.listeners:
            self._tell_sent(leg)
        try:
            services.sender.tell(
                leg,
                instance,
                plan.path,
                headers=headers,
                request=self.id,
                body=body,
                content_type=plan.content_type,
            )
        except EngineError as error:
            self.leg_failed(leg, error)

    def _tell_sent(self, leg: EngineLeg) -> None:
        """Tell the listeners of a leg.

        It is timed by a prefill engine's answer, or by the first event of a stream; not what is pushed, which waits for
        the prefill engine.
        """
        decode, is_prefill = self.decode, leg is self.prefill
        computes = is_prefill or self.prefill is None
        is_timed = is_prefill or (
            self._plan.streams and (computes or (decode is not None and decode is leg and decode.follows))
        )
        for listener in self._services.fleet.listeners:
            listener.leg_sent(leg.instance, self.id, self._plan.ask, computes=computes, is_timed=is_timed)

    def may_repeat(self, failed: LegFailed, others: Sequence[Instance]) -> bool:
        """Tell whether a leg may be sent again, with so many engines of its role, and count it.

        A stream moves to another decode engine or goes back: what is not sent again must not use up the budget, for
        all moves to an engine fail at the same time when it dies.
        """
        move = self.move
        needs_other = move is not None and not move.is_alone and failed.instance.role is Role.DECODE
        may_be_alone = move is None and self.decode_fallback()
        if not self.retries.take(failed, others, needs_other=needs_other, may_be_alone=may_be_alone):
            return False
        return not self.retries.is_charged or self._services.budget.grants(now=self._services.clock())

    def decode_fallback(self) -> bool:
        """Tell whether a decode engine may serve the request alone."""
        return self._settings.decode_only_fallback and self._plan.call is not None

    def failed(self) -> LegFailed | None:
        """Return why nothing will be shown, while nothing is: that a push has failed may be why the other leg will."""
        prefill, decode = self.prefill, self.decode
        if self.coordinates is not None and prefill is not None and prefill.fault is not None:
            return prefill.fault
        return None if decode is None else decode.fault

    def note_read(self, lent_by: PrefillLeg) -> None:
        """Note whether a decode engine may have come for the blocks of a prefill: then the two settle it."""
        decode = self.decode
        if decode is not None and (decode.complete or decode.may_be_read):
            lent_by.is_read = True

    def settle(self, lent_by: PrefillLeg) -> None:
        """Have the blocks of a prefill freed, unless a decode engine may have come for them."""
        self.note_read(lent_by)
        if not lent_by.is_read:
            self._release(lent_by)

    def _release(self, leg: PrefillLeg) -> None:
        """Free the blocks of a prefill that is not read."""
        handover = leg.handover
        decode = self.record.decode
        if handover is None:
            return
        tried = None if decode is None else decode.instance  # it may be why the leg was not sent: it is asked last
        fitting = self.retries.first(self._services.fleet.fitting(leg.instance, self.choice.usable(Role.DECODE)))
        decodes = sorted(fitting, key=lambda instance: instance.id == tried)
        LentBlocks(self._services, self._plan, self.id, self.transfer).release(leg.instance, handover, decodes)

    def _abandon(self, leg: EngineLeg) -> None:
        """Free what a prefill that was dropped, or has failed, may have leased by now.

        A decode leg would settle that itself, and so does the release of an answer that could be read.
        """
        if leg.was_sent and self.decode is None:
            LentBlocks(self._services, self._plan, self.id, self.transfer).abandon(leg.instance)

    # ---- what the legs tell (LegOwner)

    def prefill_answered(self, leg: PrefillLeg, body: bytes, /) -> None:
        """Take the handover out of the prefill engine's answer."""
        services = self._services
        came = services.clock()
        call = self._plan.call
        services.sender.done(leg)
        if services.reports and leg.load:
            services.fleet.reported(leg.instance, leg.load)
        handover = None if call is None else self._read_handover(leg, call, body)
        if call is None or handover is None:
            return
        services.leg_bodies.note_looks_back(self._plan.ask.model, leg.instance.id, looks_back=handover.looks_back)
        if self._shows_token:
            leg.first = services.leg_bodies.first_token(
                call, leg.instance.id, handover, shows=leg.shows, is_auto=self.choice.mode is not None
            )
        leg.answered_s = came - leg.record.sent_at
        leg.record.ms = leg.answered_s * 1000
        if self.move is None:  # an engine that hands a stream over has all of it in its own cache
            self._life.cache_usage = cache_usage(call.api, body) if handover.may_tell_cache else None
        for listener in services.fleet.listeners:
            listener.prompt_computed(leg.instance, self.id, self._plan.ask, handover.counted)
        if self.retries.accused:
            self._blame(leg.instance)
        leg.handed_over_at, leg.handover = came, handover
        if self._span is not None and self.decode is None:
            self._span.handed_over()
        self.close(leg)
        self.counted = leg.record.tokens = handover.counted
        if self.decode is not None:
            self.decode.cache_usage = self._life.cache_usage
            self._compare()
        self._life.wake()
        if leg.learns:  # last: the decode leg does not wait for it
            services.fleet.learn(self._plan.ask, handover.read)

    def _read_handover(self, leg: PrefillLeg, call: GenerationRequest, body: bytes) -> PrefillResult | None:
        """Return what the prefill engine's answer is good for; None: nothing, and the leg has failed."""
        try:
            if leg.status != _OK:
                raise self._error_of(leg, body)
            if self._plan.learns_model:  # the decode engine is told the name, and checks it
                self._plan.ask.model = self._services.leg_bodies.learn_model(leg.instance.id, body)
            return self._services.leg_bodies.take(
                call,
                self.id,
                self.transfer,
                leg.instance,
                told=self.coordinates,
                answer=body,
                reuses=leg.reuses,
                tells_ids=leg.shows or leg.learns,
                is_auto=self.choice.mode is not None
                or self.move is not None,  # a move asks to be lent what might be pushed
            )
        except (EngineError, Refused) as error:
            self.leg_failed(leg, error)
            return None

    def _error_of(self, leg: EngineLeg, body: bytes) -> EngineError | Refused:
        """Say what an answer other than 200 means."""
        return leg_error(leg.instance, leg.response(body))

    def stream_begun(self, leg: DecodeLeg, counted: int | None, /) -> None:
        """Note that a stream has begun well."""
        self._answered_well(leg, counted)
        if not leg.is_last:  # else its end follows at once, and all is written in one go
            self._life.wake()

    def decode_answered(self, leg: DecodeLeg, body: bytes, /) -> None:
        """Judge an answer that is no stream."""
        self._services.sender.done(leg)
        if leg.status != _OK:
            self.leg_failed(leg, self._error_of(leg, body))
            return
        try:
            check_type(leg.engine, leg.content_type)
            shown = clean_answer(leg.engine, leg.content_type, body)
            if leg.cache_usage is not None:
                leg.record.own_usage = usage_alone(shown)
                shown = with_cache_usage(shown, leg.cache_usage)
            leg.shown = shown
        except EngineError as error:
            self.leg_failed(leg, error)
            return
        self._answered_well(leg, prompt_tokens(body) if leg.counts else None)
        self._life.wake()

    def _answered_well(self, leg: DecodeLeg, counted: int | None) -> None:
        services = self._services
        now = services.clock()
        if leg.follows:
            services.telemetry.transfer_expected(leg.instance.id)
        leg.answered_s = now - leg.record.sent_at
        leg.record.ms = leg.answered_s * 1000
        if self.retries.accused:
            self._blame(leg.instance)
        if leg.lines is not None:
            for listener in services.fleet.listeners:
                listener.stream_begun(leg.instance, self.id, self._plan.ask)
            self._time_tokens(leg, now)
            services.good_legs.answered(leg.instance, self._plan.path, self.id, leg.answered_s, now)
            leg.answered_s = None
        if counted is not None:
            self.prompt_counted(leg, counted)

    def _blame(self, witness: Instance) -> None:
        for guilty, failure in self.retries.guilty(witness):
            self._services.fleet.blamed(guilty, failure)
            if guilty.role is _DECODE:
                self._services.telemetry.pair_blamed(self.record, guilty.id)

    def _time_tokens(self, leg: DecodeLeg, now: float) -> None:
        """Have the reads of a stream timed; one that goes on for another has been quiet since that one's last."""
        services = self._services
        name = None if services.fleet.costs is None else leg.instance.id
        gaps = leg.gaps = services.telemetry.gaps(self._plan.path, name)
        leg.read_at = now
        if self.record.last_token_at is not None:
            gaps.append(now - self.record.last_token_at)

    def prompt_counted(self, leg: DecodeLeg, counted: int, /) -> None:
        """Take in how many tokens of prompt the decode engine has counted."""
        leg.counts, leg.counted = False, counted
        self._compare()

    def stream_ended(self, leg: DecodeLeg, /) -> None:
        """All of a stream is here."""
        self._services.sender.done(leg)
        if leg.lines is None:
            self.leg_failed(leg, EngineError(f"{leg.engine} ended its stream before the first event"))
        else:
            self._life.wake()

    def leg_failed(self, leg: EngineLeg, error: EngineError | Refused, /) -> None:
        """Note that a leg has failed, and how."""
        if leg.is_closed:
            return
        failed = LegFailed(leg.instance, error)
        failed.__cause__ = error
        _forget_frames(error)  # they hold the leg, which holds the error: a circle
        leg.fault, leg.failure = failed, failed.failure
        if failed.failure is Failure.NO_SUCH_PATH:
            self._services.fleet.lacks_path(self._plan.path, leg.instance)
        if leg is self.prefill:
            self._unlearn(failed)
            if self.is_streaming or (self.decode is not None and self.decode.shown is not None):
                self.record.prefill_error = str(failed)  # the client is not concerned
        self.close(leg)
        # It had a prompt to show for it, and so a lease; or may have finished as its time was over.
        keeps_kv = leg.status == _OK and not isinstance(error, NoKvParams)
        if leg is self.prefill and (keeps_kv or failed.failure is _TIMEOUT):
            self._abandon(leg)
        self._life.wake()

    def hold(self, leg: EngineLeg, size: int, /) -> None:
        """Charge bytes of an answer that is kept, until its leg is closed."""
        try:
            self._services.gate.hold(size)
        except RouterFull as full:  # no engine has failed: the request ends, and so does the leg
            self._life.interrupt(full.with_traceback(None))
        else:
            leg.held += size

    def crash(self, bug: Exception, /) -> None:
        """The router has a bug."""
        if self._life.is_running:
            self._life.interrupt(bug)
        else:
            logger.error("request %s failed behind its end", self.id, exc_info=bug)

    def _unlearn(self, failed: LegFailed) -> None:
        """Forget where an engine is whose leg has failed: it may come back as another one.

        One that has moved has just been learned.
        """
        if VERDICTS[failed.failure].may_move:
            self._services.push_coordinates.forget(failed.instance.id)
            self._services.leg_bodies.forget(failed.instance.id)

    def _compare(self) -> None:
        """Complain when the legs had different prompts. The answer may be on its way: the log and the counters tell."""
        prefill, decode, counted = self.record.prefill, self.record.decode, self.counted
        said = None if self.decode is None else self.decode.counted
        if prefill is None or decode is None or counted is None or said is None or counted == said:
            return
        self.record.error = (
            f"{prefill.instance} counted {counted} prompt tokens and {decode.instance} {said}: "
            "they do not make the same prompt of a request"
        )
        self._services.telemetry.differed(prefill.instance, decode.instance)

    # ---- streaming

    def token_shown(self) -> None:
        """The client has the prefill engine's token: the decode engine gets it as the last one of its prompt."""
        self.record.last_token_at = self._services.clock()
        if self.counted is not None:
            self.counted += 1

    def pause(self) -> None:
        """Let the engine of a stream wait."""
        if self.is_streaming and self.decode is not None:
            self.decode.hold()

    def resume(self) -> None:
        """Go on; the engine has its full time again."""
        if self.is_streaming and self.decode is not None:
            self.decode.heard = True
            self.decode.go_on()

    # ---- time

    def look(self, now: float, *, paused: bool) -> None:
        """See whether a leg has taken too long; ``paused``: the engine of the stream has to wait."""
        decode = self.decode
        if self.is_streaming and decode is not None and (decode.heard or paused):
            decode.heard = False
            decode.due = now + self._settings.stream_idle_timeout_s
        for leg in (self.prefill, decode):
            if leg is not None and not leg.is_closed and leg.due is not None and now >= leg.due:
                # one that waits for a connection has sent nothing
                self.leg_failed(leg, EngineTimeout(self._late(leg), reached=leg.source is not None))

    def _late(self, leg: EngineLeg) -> str:
        settings, decode = self._settings, self.decode
        if self.move is not None and not self.is_streaming:
            seconds = move_timeout(settings) if leg is decode else self.move.seconds_for(leg.instance)
            return f"{leg.engine} did not answer within {seconds:g} s, the time for a move"
        if leg is self.prefill:
            return f"{leg.engine} did not answer within {settings.first_token_timeout_s:g} s"
        if self.is_streaming:
            return f"{leg.engine} sent nothing for {settings.stream_idle_timeout_s:g} s"
        return f"{leg.engine} sent no token within {settings.first_token_timeout_s:g} s"

    # ---- the end

    def close(self, leg: EngineLeg) -> None:
        """Count the end of a leg, once; what is left of it is dropped."""
        if leg.is_closed:
            return
        services = self._services
        fleet = services.fleet
        now = services.clock()
        decode = self.decode
        # Each look at a leg of either kind takes as long as ten at an object of one class.
        instance, complete, failure, answered_s = leg.instance, leg.complete, leg.failure, leg.answered_s
        leg.was_sent = complete or leg.is_sent
        leg.is_closed = True
        if leg.held:
            services.gate.free(leg.held)
            leg.held = 0
        is_stream = False
        if decode is not None and decode is leg:
            is_stream = decode.lines is not None
            if decode.gaps is not None:
                self.record.last_token_at = decode.read_at
            if fleet.listeners and leg.status == _OK and leg.fault is None:
                self._tell_answered(instance)
        seconds = now - leg.record.sent_at
        if failure is None and answered_s is not None:
            services.good_legs.over(instance, self._plan.path, self.id, answered_s, seconds, now)
        else:
            self._count_end(leg, seconds, now, is_stream=is_stream)
        if failure is None or (failure is _TIMEOUT and self.move is not None):
            # A move gives an engine little of its time: probes tell whether it lives.
            fleet.leave(instance, self.id)
        else:
            fleet.ended(instance, self.id, failure, was_begun=is_stream)
        if leg.span is not None or not complete:
            _let_go(leg)

    def _tell_answered(self, decode: Instance) -> None:
        if self._plan.call is not None:
            for listener in self._services.fleet.listeners:
                listener.answered(decode, self._plan.ask, self.record)

    def _note_broken(self, leg: EngineLeg, failure: Failure, *, is_stream: bool) -> None:
        """Keep what an engine did not bring to its end: how the request ends shows whether it is held against it."""
        decode = self.decode
        has_said_so = is_stream and decode is not None and decode.lines is not None and decode.lines.erred
        is_break = leg.has_good_beginning and not has_said_so and (is_stream or not leg.complete)
        if is_break or is_stream or self._life.state is _CONTINUING:
            broken = BrokenAnswer(leg.instance, failure, is_break=is_break, is_stream=is_stream)
            self._life.broken = (*self._life.broken, broken)

    def _count_end(self, leg: EngineLeg, seconds: float, now: float, *, is_stream: bool) -> None:
        """Count the end of a leg whose good answer was counted before, or that has none."""
        services = self._services
        failure = leg.failure
        if leg.record.ms is None:
            leg.record.ms = seconds * 1000
        if failure is None:
            services.good_legs.ended(leg.instance, seconds, now, leg.complete)
        else:
            if VERDICTS[failure].held is _IF_SERVED:
                self._note_broken(leg, failure, is_stream=is_stream)
            telemetry = services.telemetry
            telemetry.later.add(telemetry.leg_ended, leg.instance, seconds, failure, self.id, now)
            prefill = self.prefill
            if prefill is not None and prefill is not leg and prefill.handover is not None:
                telemetry.later.add(telemetry.pair_failed, prefill.instance.id, leg.instance.id, failure, now)

    def close_all(self) -> None:
        """Drop what is still under way, the decode leg first."""
        for leg in (self.decode, self.prefill):
            if leg is not None and not leg.is_closed:
                self.close(leg)
                if leg is self.prefill and not leg.complete:
                    self._abandon(leg)
        if self.choice.slot is not None:
            self.choice.leave_slot()
        self.prefill = self.decode = None  # they hold us


def _let_go(leg: EngineLeg) -> None:
    """End the span of a leg, and drop what is left of it."""
    if leg.span is not None:
        leg.span.end(None if leg.fault is None else leg.fault.error)
    if not leg.complete:
        leg.drop()


def _forget_frames(error: BaseException | None) -> None:
    """Have an error, and those that led to it, say no more where they were raised."""
    while error is not None:
        error.with_traceback(None)
        error = error.__cause__ or error.__context__
