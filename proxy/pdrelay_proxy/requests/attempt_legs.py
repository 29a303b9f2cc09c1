"""The legs that one try of a request has sent, and what follows from their news.

requests/leg_sending.py makes and sends them, requests/leg_accounts.py counts them,
requests/lent_blocks.py has the prefill engine's blocks freed.
"""

import logging
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.model import GenerationRequest, Instance, InstanceId
from pdrelay_proxy.core.protocol.endpoints import UNCACHED
from pdrelay_proxy.core.protocol.fault_table import VERDICTS, Failure, Held
from pdrelay_proxy.core.protocol.stream_opening import Opening
from pdrelay_proxy.core.protocol.usage import prompt_tokens
from pdrelay_proxy.core.routing.retries import LegFailed
from pdrelay_proxy.core.schemas import Coordinates
from pdrelay_proxy.errors import (
    EngineError,
    EngineTimeout,
    NoKvParams,
    Refused,
    RouterFull,
    forget_frames,
)
from pdrelay_proxy.requests.attempt import Attempt
from pdrelay_proxy.requests.leg_accounts import (
    broken_answer,
    compare_prompts,
    leg_answered,
    leg_over,
    prompt_computed,
)
from pdrelay_proxy.requests.leg_sending import (
    new_decode,
    new_prefill,
    read_prefill,
    send_leg,
    why_late,
)
from pdrelay_proxy.requests.legs import DecodeLeg, EngineLeg, LegOwner, PrefillLeg
from pdrelay_proxy.requests.lent_blocks import abandon_blocks, release_blocks
from pdrelay_proxy.requests.lifecycle import RequestState

logger = logging.getLogger(__name__)
_OK: Final = 200


class AttemptLegs(LegOwner):
    """The legs of one try; the life's coroutine is woken when one of them has news."""

    __slots__ = (
        "_life",
        "attempt",
        "body",
        "coordinates",
        "decode",
        "is_streaming",
        "prefill",
    )

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self._life = attempt.life
        self.body = attempt.plan.body  # of the decode leg
        self.prefill: PrefillLeg | None = None
        self.decode: DecodeLeg | None = None
        # what the decode engine was told of the prefill engine in advance
        self.coordinates: Coordinates | None = None
        self.is_streaming = False  # a stream is being shown

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        legs = (self.prefill, self.decode)
        return [leg.instance.id for leg in legs if leg is not None and not leg.is_closed]

    # ---- sending

    def send_prefill(
        self, call: GenerationRequest, prefill: Instance, *, reuses: bool
    ) -> PrefillLeg:
        """Send the prefill leg; ``reuses``: its answer shall tell the tokens of the prompt."""
        leg, body = new_prefill(self, self.attempt, call, prefill, reuses=reuses)
        self.prefill = leg
        self.attempt.prefill = prefill
        error = send_leg(self.attempt, leg, body)
        if error is not None:
            self.leg_failed(leg, error)
        return leg

    def send_decode(self, decode: Instance) -> DecodeLeg:
        """Send a decode leg; the slot that is held at its engine becomes its own."""
        leg = new_decode(self, self.attempt, decode, self.prefill)
        self.decode = leg
        error = send_leg(self.attempt, leg, self.body)
        if error is not None:  # one that cannot be sent has failed
            self.leg_failed(leg, error)
        return leg

    def failed(self) -> LegFailed | None:
        """Return why nothing will be shown, while nothing is: that a push has failed may be why the
        other leg will.
        """
        prefill = self.prefill
        decode = self.decode
        if self.coordinates is not None and prefill is not None and prefill.fault is not None:
            return prefill.fault
        return None if decode is None else decode.fault

    @property
    def lender(self) -> PrefillLeg | None:
        """Return the prefill leg whose blocks the decode engine reads; None: it waits for none."""
        return self.prefill if self.coordinates is None else None

    def note_read(self) -> None:
        """Note whether a decode engine may have come for the lender's blocks: the two settle it."""
        lender = self.lender
        decode = self.decode
        if lender is None or decode is None or decode.refused_in_stream:
            return
        if decode.may_be_read:
            lender.is_read = True

    def settle(self) -> None:
        """Have the lender's blocks freed, unless a decode engine may have come for them."""
        self.note_read()
        lender = self.lender
        if lender is not None and not lender.is_read and lender.handover is not None:
            release_blocks(self.attempt, lender.instance, lender.handover)

    def _abandon(self, leg: EngineLeg) -> None:
        """Free what a prefill that was dropped, or has failed, may have leased by now.

        A decode leg would settle that itself, and so does the release of an answer that could be
        read.
        """
        if leg.was_sent and self.decode is None:
            abandon_blocks(self.attempt, leg.instance)

    # ---- what the legs tell (LegOwner)

    def prefill_answered(self, leg: PrefillLeg, body: bytes, /) -> None:
        """Take the handover out of the prefill engine's answer."""
        services = self._life.services
        came = services.clock()
        call = self.attempt.plan.call
        services.sender.done(leg)
        if services.reports and leg.load:
            services.fleet.reported(leg.instance, leg.load)
        if call is None:
            return
        try:
            handover = read_prefill(self.attempt, leg, call, body, sent=self.coordinates)
        except (EngineError, Refused) as error:
            self.leg_failed(leg, error)
            return
        prompt_computed(self.attempt, leg, came)
        leg.handed_over_at = came
        leg.handover = handover
        if self._life.span is not None and self.decode is None:
            self._life.span.handed_over()
        self.close(leg)
        if self.decode is not None:
            self.decode.cache_usage = self._life.cache_usage
            compare_prompts(self.attempt, leg, self.decode)
        self._life.wake()
        # Last: the decode leg does not wait for it.
        if leg.learns and (reader := services.fleet.id_reader) is not None:
            reader.ids_told(self.attempt.plan.hints, handover.read)

    def stream_begun(self, leg: DecodeLeg, counted: int | None, /) -> None:
        """Note that a stream has begun well."""
        leg_answered(self.attempt, leg)
        if counted is not None:
            self.prompt_counted(leg, counted)
        if not leg.is_last:  # else its end follows at once, and all is written in one go
            self._life.wake()

    def decode_answered(self, leg: DecodeLeg, body: bytes, /) -> None:
        """Judge an answer that is no stream."""
        life = self._life
        life.services.sender.done(leg)
        try:
            leg.read_answer(body, is_made=self.attempt.plan.path not in UNCACHED)
        except (EngineError, Refused) as error:
            self.leg_failed(leg, error)
            return
        leg_answered(self.attempt, leg)
        counted = prompt_tokens(body) if leg.counts else None
        if counted is not None:
            self.prompt_counted(leg, counted)
        life.wake()

    def prompt_counted(self, leg: DecodeLeg, counted: int, /) -> None:
        """Take in how many tokens of prompt the decode engine has counted."""
        leg.counts = False
        leg.counted = counted
        if self.prefill is not None and self.prefill.counted != counted:
            compare_prompts(self.attempt, self.prefill, leg)

    def stream_ended(self, leg: DecodeLeg, /) -> None:
        """All of a stream is here."""
        self._life.services.sender.done(leg)
        if leg.lines is None:
            self.leg_failed(
                leg, EngineError(f"{leg.engine} ended its stream before the first event")
            )
        else:
            self._life.wake()

    def leg_failed(self, leg: EngineLeg, error: EngineError | Refused, /) -> None:
        """Note that a leg has failed, and how."""
        if leg.is_closed:
            return
        failed = LegFailed(leg.instance, error)
        failed.__cause__ = error
        forget_frames(error)
        leg.fault = failed
        leg.failure = failed.failure
        if failed.failure is Failure.NO_SUCH_PATH:
            self._life.services.fleet.lacks_path(self.attempt.plan.path, leg.instance)
        if leg is self.prefill:
            if VERDICTS[failed.failure].may_move:  # one that has moved has just been learned
                self._life.services.forget_engine(leg.instance.id)
            if self.is_streaming or (self.decode is not None and self.decode.shown is not None):
                self._life.record.prefill_error = str(failed)  # the client is not concerned
        self.close(leg)
        # It had a prompt to show for it, and so a lease; or may have finished as its time was over.
        keeps_kv = leg.status == _OK and not isinstance(error, NoKvParams)
        if leg is self.prefill and (keeps_kv or failed.failure is Failure.TIMEOUT):
            self._abandon(leg)
        self._life.wake()

    def hold(self, leg: EngineLeg, size: int, /) -> None:
        """Charge bytes of an answer that is kept, until its leg is closed."""
        try:
            self._life.services.gate.hold(size)
        except RouterFull as full:  # no engine has failed: the request ends, and so does the leg
            self._life.interrupt(full.with_traceback(None))
        else:
            leg.held += size

    def crash(self, bug: Exception, /) -> None:
        """The router has a bug."""
        if self._life.is_running:
            self._life.interrupt(bug)
        else:
            logger.error("request %s failed behind its end", self.attempt.id, exc_info=bug)

    # ---- streaming

    def opened(self, opening: Opening) -> None:
        """The client has the opening of its stream: the decode engine gets the tokens of that at
        the end of its prompt.
        """
        self._life.record.last_token_at = self._life.services.clock()
        if self.prefill is not None and self.prefill.counted is not None:
            self.prefill.counted += opening.tokens

    def pause(self) -> None:
        """Let the engine of a stream wait."""
        if self.is_streaming and self.decode is not None:
            self.decode.hold()

    def resume(self) -> None:
        """Go on; the engine has its full time again."""
        if self.is_streaming and self.decode is not None:
            self.decode.heard = True
            self.decode.resume()

    # ---- time

    def check_deadlines(self, now: float, *, paused: bool) -> None:
        """Fail each leg that has taken too long; ``paused``: the stream's engine has to wait."""
        decode = self.decode
        if self.is_streaming and decode is not None and (decode.heard or paused):
            decode.heard = False
            idle_s = self.attempt.settings.stream_idle_timeout_s
            decode.due = None if self.attempt.plan.may_be_quiet else now + idle_s
        for leg in (self.prefill, decode):
            if leg is not None and not leg.is_closed and leg.due is not None and now >= leg.due:
                why = why_late(self.attempt, leg, is_streaming=self.is_streaming)
                # one that waits for a connection has sent nothing
                self.leg_failed(leg, EngineTimeout(why, reached=leg.source is not None))

    # ---- the end

    def close(self, leg: EngineLeg) -> None:
        """Count the end of a leg, once; what is left of it is dropped."""
        if leg.is_closed:
            return
        life = self._life
        leg.was_sent = leg.is_sent
        leg.is_closed = True
        if leg.held:
            life.services.gate.free(leg.held)
            leg.held = 0
        if leg.failure is not None and VERDICTS[leg.failure].held is Held.IF_SERVED_ELSEWHERE:
            lines = None if leg is not self.decode or self.decode is None else self.decode.lines
            is_rest = life.state is RequestState.CONTINUING
            broken = broken_answer(leg, leg.failure, lines, is_rest=is_rest)
            if broken is not None:
                life.broken = (*life.broken, broken)
        leg_over(self.attempt, leg, self.prefill, self.decode)
        if leg.span is not None or not leg.complete:
            leg.let_go()

    def close_all(self) -> None:
        """Drop what is still under way, the decode leg first."""
        for leg in (self.decode, self.prefill):
            if leg is not None and not leg.is_closed:
                self.close(leg)
                if leg is self.prefill and not leg.complete:
                    self._abandon(leg)
        self.attempt.leave_slot()
        self.prefill = self.decode = None  # they hold us
