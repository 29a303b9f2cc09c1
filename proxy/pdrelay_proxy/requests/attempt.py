"""One try of a request: the legs that it has sent, and what follows from their news.

A request that is sent again gets another attempt, with another id for both engines: they match
their halves by it. requests/leg_sending.py makes and sends them, requests/leg_accounts.py counts
them, requests/lent_blocks.py has the prefill engine's blocks freed.
"""

import logging
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.model import (
    GenerationRequest,
    Instance,
    InstanceId,
    RequestId,
    TransferId,
)
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
from pdrelay_proxy.requests.engine_choice import EngineChoice
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.leg_sending import LegSending
from pdrelay_proxy.requests.legs import DecodeLeg, EngineLeg, LegOwner, PrefillLeg
from pdrelay_proxy.requests.lent_blocks import LentBlocks
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.lifecycle import RequestState
from pdrelay_proxy.requests.terms import Terms
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)
_OK: Final = 200


class Attempt(LegOwner):
    """One try.

    It is the LegOwner of its legs; the life's coroutine is woken when one of them has news.
    """

    __slots__ = (
        "_life",
        "_plan",
        "_sending",
        "_settings",
        "body",
        "choice",
        "coordinates",
        "decode",
        "is_streaming",
        "prefill",
        "terms",
    )

    def __init__(
        self,
        life: RequestLife,
        plan: RequestPlan,
        settings: Settings,
        terms: Terms,
    ) -> None:
        record = life.record
        request = record.attempt_id if record.retries or record.moves else record.request_id
        self._life = life
        self._plan = plan
        self._settings = settings
        self.terms = terms
        self.choice = EngineChoice(
            life.services.fleet, plan, settings, terms.retries, record, request
        )
        self._sending = LegSending(life, plan, settings, self.choice, request, terms)
        self.body = plan.body  # of the decode leg
        self.prefill: PrefillLeg | None = None
        self.decode: DecodeLeg | None = None
        # what the decode engine was told of the prefill engine in advance
        self.coordinates: Coordinates | None = None
        self.is_streaming = False  # a stream is being shown

    @property
    def id(self) -> RequestId:
        """Return what engines know this try by."""
        return self._sending.request

    @property
    def transfer(self) -> TransferId:
        """Return what engines call the KV blocks of this try."""
        return self._sending.transfer

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
        leg, body = self._sending.new_prefill(self, call, prefill, reuses=reuses)
        self.prefill = leg
        self.choice.prefill = prefill
        error = self._sending.send(leg, body)
        if error is not None:
            self.leg_failed(leg, error)
        return leg

    def send_decode(self, decode: Instance) -> DecodeLeg:
        """Send a decode leg; the slot that is held at its engine becomes its own."""
        leg = self._sending.new_decode(self, decode, self.prefill)
        self.decode = leg
        error = self._sending.send(leg, self.body)
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

    def note_read(self, lent_by: PrefillLeg) -> None:
        """Note whether a decode engine may have come for a prefill's blocks: the two settle it."""
        decode = self.decode
        if decode is None or decode.refused_in_stream:
            return
        if decode.complete or decode.may_be_read:
            lent_by.is_read = True

    def settle(self, lent_by: PrefillLeg) -> None:
        """Have the blocks of a prefill freed, unless a decode engine may have come for them."""
        self.note_read(lent_by)
        if not lent_by.is_read and lent_by.handover is not None:
            self._lent.release(
                lent_by.instance, lent_by.handover, self.choice.readers(lent_by.instance)
            )

    def _abandon(self, leg: EngineLeg) -> None:
        """Free what a prefill that was dropped, or has failed, may have leased by now.

        A decode leg would settle that itself, and so does the release of an answer that could be
        read.
        """
        if leg.was_sent and self.decode is None:
            self._lent.abandon(leg.instance)

    @property
    def _lent(self) -> LentBlocks:
        """Return what the two engines know the blocks of this try by; few requests need it."""
        return LentBlocks(self._life.services, self._plan, self.id, self.transfer)

    # ---- what the legs tell (LegOwner)

    def prefill_answered(self, leg: PrefillLeg, body: bytes, /) -> None:
        """Take the handover out of the prefill engine's answer."""
        services = self._life.services
        came = services.clock()
        call = self._plan.call
        services.sender.done(leg)
        if services.reports and leg.load:
            services.fleet.reported(leg.instance, leg.load)
        if call is None:
            return
        try:
            handover = self._sending.read_prefill(leg, call, body, sent=self.coordinates)
        except (EngineError, Refused) as error:
            self.leg_failed(leg, error)
            return
        services.accounts.prompt_computed(
            leg, self._plan, self._life.record, self.terms.retries, came
        )
        leg.handed_over_at = came
        leg.handover = handover
        if self._life.span is not None and self.decode is None:
            self._life.span.handed_over()
        self.close(leg)
        if self.decode is not None:
            self.decode.cache_usage = self._life.cache_usage
            services.accounts.compare_prompts(self._life.record, leg, self.decode)
        self._life.wake()
        # Last: the decode leg does not wait for it.
        if leg.learns and (reader := services.fleet.id_reader) is not None:
            reader.ids_told(self._plan.hints, handover.read)

    def stream_begun(self, leg: DecodeLeg, counted: int | None, /) -> None:
        """Note that a stream has begun well."""
        life = self._life
        life.services.accounts.answered(leg, self._plan, life.record, self.terms.retries)
        if counted is not None:
            self.prompt_counted(leg, counted)
        if not leg.is_last:  # else its end follows at once, and all is written in one go
            life.wake()

    def decode_answered(self, leg: DecodeLeg, body: bytes, /) -> None:
        """Judge an answer that is no stream."""
        life = self._life
        life.services.sender.done(leg)
        try:
            leg.read_answer(body, is_made=self._plan.path not in UNCACHED)
        except (EngineError, Refused) as error:
            self.leg_failed(leg, error)
            return
        life.services.accounts.answered(leg, self._plan, life.record, self.terms.retries)
        counted = prompt_tokens(body) if leg.counts else None
        if counted is not None:
            self.prompt_counted(leg, counted)
        life.wake()

    def prompt_counted(self, leg: DecodeLeg, counted: int, /) -> None:
        """Take in how many tokens of prompt the decode engine has counted."""
        leg.counts = False
        leg.counted = counted
        if self.prefill is not None and self.prefill.counted != counted:
            self._life.services.accounts.compare_prompts(self._life.record, self.prefill, leg)

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
            self._life.services.fleet.lacks_path(self._plan.path, leg.instance)
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
            logger.error("request %s failed behind its end", self.id, exc_info=bug)

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
            idle_s = self._settings.stream_idle_timeout_s
            decode.due = None if self._plan.may_be_quiet else now + idle_s
        for leg in (self.prefill, decode):
            if leg is not None and not leg.is_closed and leg.due is not None and now >= leg.due:
                why = self._sending.why_late(leg, is_streaming=self.is_streaming)
                # one that waits for a connection has sent nothing
                self.leg_failed(leg, EngineTimeout(why, reached=leg.source is not None))

    # ---- the end

    def close(self, leg: EngineLeg) -> None:
        """Count the end of a leg, once; what is left of it is dropped."""
        if leg.is_closed:
            return
        life = self._life
        complete = leg.complete
        leg.was_sent = complete or leg.is_sent
        leg.is_closed = True
        if leg.held:
            life.services.gate.free(leg.held)
            leg.held = 0
        if leg.failure is not None and VERDICTS[leg.failure].held is Held.IF_SERVED_ELSEWHERE:
            lines = None if leg is not self.decode or self.decode is None else self.decode.lines
            is_rest = life.state is RequestState.CONTINUING
            broken = life.services.accounts.broken(leg, leg.failure, lines, is_rest=is_rest)
            if broken is not None:
                life.broken = (*life.broken, broken)
        life.services.accounts.over(
            leg, self._plan, life.record, self.prefill, self.decode, self.terms.is_takeover
        )
        if leg.span is not None or not complete:
            leg.let_go()

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
