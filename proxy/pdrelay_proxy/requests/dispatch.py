"""Sends one request to its engines: chooses them, sends the legs in order, and repeats what may be
repeated.

requests/attempt.py is one try. What the client gets of it is up to requests/client_response.py.
"""

from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.model import (
    Api,
    GenerationRequest,
    Instance,
    InstanceId,
    LegOrder,
    Role,
    RoutingHints,
)
from pdrelay_proxy.core.protocol import push, request_bodies
from pdrelay_proxy.core.protocol.disaggregation import PROMPTS
from pdrelay_proxy.core.protocol.fault_table import RetryScope
from pdrelay_proxy.core.protocol.usage import cache_usage
from pdrelay_proxy.core.raw_json import NULL, encode_in_pieces
from pdrelay_proxy.core.routing.retries import LegFailed
from pdrelay_proxy.core.routing.routing_hints import with_model
from pdrelay_proxy.errors import NoInstance, ProxyError, forget_frames
from pdrelay_proxy.requests.answering import Answering
from pdrelay_proxy.requests.attempt import Attempt
from pdrelay_proxy.requests.client_response import ClientResponse
from pdrelay_proxy.requests.engine_choice import EngineChoice
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.leg_bodies import decode_body
from pdrelay_proxy.requests.legs import DecodeLeg, PrefillLeg
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.lifecycle import RequestEvent, RequestState
from pdrelay_proxy.requests.terms import Terms
from pdrelay_proxy.settings import Settings

# Looking a member up takes as long as a call.
_PULL = RequestEvent.PULL
_PUSH = RequestEvent.PUSH
_SINGLE = RequestEvent.SINGLE
_RETRY = RequestEvent.RETRY
_PREFILLED = RequestEvent.PREFILLED
_OPENED = RequestEvent.OPENED
_NEXT_DECODE = RequestEvent.NEXT_DECODE
_FIRST_EVENT = RequestEvent.FIRST_EVENT
_CONTINUING: Final = RequestState.CONTINUING
_DECODE: Final = Role.DECODE
_CHAT: Final = Api.CHAT
_CONCURRENT: Final = LegOrder.CONCURRENT
_READ: Final = push.TransferMode.PULL


class Dispatch(Answering):
    """What one request has at its engines."""

    __slots__ = ("_attempt", "_client", "_life", "_plan", "settings")

    def __init__(
        self, life: RequestLife, plan: RequestPlan, settings: Settings, client: ClientResponse
    ) -> None:
        """``settings``: those that were in force when the request was admitted."""
        self._life = life
        self._plan = plan
        self._client = client
        self._attempt: Attempt | None = None  # since engines were chosen
        self.settings = settings

    # ---- for those who look after all requests

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        return () if self._attempt is None else self._attempt.engines

    @property
    def choices(self) -> Sequence[EngineChoice]:
        """List the choices of engines of the tries that are under way."""
        return () if self._attempt is None else (self._attempt.choice,)

    @property
    def hints(self) -> RoutingHints:
        """Return what the choice of engines depends on."""
        return self._plan.hints

    @property
    def looks_back(self) -> bool:
        """Tell whether no other engine would go on exactly with the stream: the engines' own
        defaults begin anew.
        """
        services = self._life.services
        return services.leg_bodies.look_back(self._plan.hints.model, services.fleet.registry.get)

    def pause(self) -> None:
        """Have the engine wait."""
        if self._attempt is not None:
            self._attempt.pause()

    def resume(self) -> None:
        """Let the engine go on."""
        if self._attempt is not None:
            self._attempt.resume()

    def check_deadlines(self, now: float, /) -> None:
        """Fail a leg that has taken too long, unless the client is slow to read."""
        if self._attempt is not None:
            self._attempt.check_deadlines(now, paused=self._client.is_paused)

    def close_attempt(self) -> Attempt | None:
        """Drop what is under way; return the attempt."""
        attempt = self._attempt
        self._attempt = None
        if attempt is not None:
            attempt.close_all()
        return attempt

    # ---- tries

    async def answer(self, terms: Terms) -> None:
        """Try until an engine has given the whole answer; raises ProxyError for the client."""
        failed: LegFailed | None = None
        life = self._life
        while True:
            attempt = self._attempt = Attempt(life, self._plan, self.settings, terms)
            choice = attempt.choice
            try:
                prefill, decode = terms.choose(choice)
                if prefill is None:
                    attempt.body = terms.body_alone(choice)
                lent_by = self._send_first(attempt, prefill, decode)
                if lent_by is not None:
                    while lent_by.handover is None:
                        if lent_by.fault is not None:
                            raise lent_by.fault
                        await life
                    terms.handed_over(lent_by.instance)
                    if self._hand_over(attempt, lent_by, decode):
                        return
                await self._decode(attempt, choice.slot or decode, lent_by)
                return
            except LegFailed as latest:
                failed = forget_frames(latest)
            except NoInstance:
                if failed is None:
                    raise
                raise failed.error from None
            self._start_over(failed)

    def _start_over(self, failed: LegFailed) -> None:
        """Return if the request may be sent again, else raise the error for the client."""
        life = self._life
        attempt = self.close_attempt()
        role = failed.instance.role
        if attempt is not None:
            attempt.terms.leg_failed(failed.instance)
        if (
            life.state is _CONTINUING
            or attempt is None
            or not self._may_repeat(attempt, failed, attempt.choice.usable(role))
        ):
            raise failed.error
        # what is sent again from the start is held against the engine by ``RetryAttempts.accused``
        if life.broken:
            life.broken = tuple(
                [broken for broken in life.broken if broken.instance is not failed.instance]
            )
        if life.record.ttft_s is None:  # a comment alone may have begun the stream
            life.cache_usage = None  # another engine computes the prompt
        life.record.set_aside(role, failed.failure)
        life.record.start_over()
        life.on(_RETRY)

    def _may_repeat(self, attempt: Attempt, failed: LegFailed, others: Sequence[Instance]) -> bool:
        """Tell whether a leg may be sent again, with so many engines of its role, and count it."""
        terms = attempt.terms
        may_be_alone = self.settings.decode_only_fallback and self._plan.call is not None
        if not terms.take_retry(failed, others, may_be_alone=may_be_alone):
            return False
        services = self._life.services
        return not terms.retries.is_charged or services.budget.grants(now=services.clock())

    # ---- PREFILLING, BOTH, DECODING

    def _send_first(
        self, attempt: Attempt, prefill: Instance | None, decode: Instance
    ) -> PrefillLeg | None:
        """Send what can be sent before an engine has answered; return the leg whose answer the
        decode leg needs.
        """
        life = self._life
        call = attempt.terms.call
        if call is None or prefill is None:
            life.on(_SINGLE)
            return None
        attempt.choice.hold_slot(decode)
        coordinates = None
        if attempt.choice.mode is not _READ:
            coordinates = life.services.push_coordinates.coordinates(prefill.id)
        if coordinates is not None and self._plan.learns_model:
            self._plan.learn_model(life.services.leg_bodies.model_of(prefill.id))
            if self._plan.hints.model is None:
                coordinates = None  # its answer tells which model the decode engine must serve
            else:
                call = self._named(call, self._plan.hints.model)
        if coordinates is None:
            life.on(_PULL)
            reuses = life.services.fleet.passes_ids(call, decode)
            return attempt.send_prefill(call, prefill, reuses=reuses)
        record = life.record
        record.push = _CONCURRENT
        record.transfer = attempt.transfer
        attempt.coordinates = coordinates
        # until the prefill engine has answered; it may never do
        life.cache_usage = cache_usage(call.api, b"", hides=True)
        params = push.decode_params(coordinates, call.api, attempt.id, attempt.transfer)
        fields = request_bodies.decode_fields(
            request_bodies.named(call.api, call.fields, attempt.id), params
        )
        attempt.body = encode_in_pieces(fields, PROMPTS[call.api], call.shared)
        life.on(_PUSH)
        attempt.send_prefill(call, prefill, reuses=False)
        return None

    def _hand_over(self, attempt: Attempt, leg: PrefillLeg, decode: Instance) -> bool:
        """Make the decode leg's body of the answer; True: the client gets that answer alone."""
        opening = leg.stream_opening
        life = self._life
        if opening is None:
            life.on(_PREFILLED)
        else:
            life.on(_OPENED)
            self._client.open_stream(attempt, opening, can_resume=self.settings.resume_streams)
            self._note_files(attempt.choice.slot or decode, leg)
            if opening.is_all:
                attempt.settle(leg)
                return True
        self._write_body(attempt, leg, attempt.choice.slot or decode)
        return False

    def _note_files(self, decode: Instance, prefill: PrefillLeg | None) -> None:
        """Remember which files of the model a stream has begun with that others may go on with.

        An engine may have been removed since it was chosen; two that share a request have the same.
        """
        facts = self._life.services.fleet.registry.facts
        plan = self._plan
        if plan.files is None:
            plan.files = facts(decode).files_of(plan.hints.model)
        if plan.files is None and prefill is not None:
            plan.files = facts(prefill.instance).files_of(plan.hints.model)

    def _named(self, call: GenerationRequest, model: str) -> GenerationRequest:
        """Return a request that names no model with the one that its prefill engine serves."""
        return GenerationRequest(
            call.api, with_model(call.api, call.fields, model), call.headers, call.rank, call.shared
        )

    def _write_body(self, attempt: Attempt, leg: PrefillLeg, decode: Instance) -> None:
        """Write a decode leg's body, as its engine can take it; ``leg``: the one before it."""
        call = attempt.terms.call
        handover = leg.handover
        if call is None or handover is None:
            return
        life = self._life
        ids = attempt.terms.ids
        if self._plan.learns_model and self._plan.hints.model is not None:
            call = self._named(call, self._plan.hints.model)
        if (
            ids is None
            and handover.ids is not NULL
            and (call.api is not _CHAT or life.services.fleet.takes_chat_ids(decode))
        ):
            ids = handover.ids
        attempt.body = decode_body(
            call, life.record, attempt.id, handover, leg.stream_opening, ids=ids
        )

    async def _decode(self, attempt: Attempt, decode: Instance, lent_by: PrefillLeg | None) -> None:
        """Get the answer from a decode engine, or from another one if this one got nothing of the
        request.

        ``lent_by``: the leg whose blocks the decode engine reads.

        Raises:
            LegFailed: none has begun to answer.
            EngineError: a stream broke off, or is not complete.
        """
        leg = attempt.send_decode(decode)
        life = self._life
        try:
            # what ends with its beginning is waited for
            while leg.shown is None or (leg.is_last and not leg.is_over):
                failed = attempt.failed()
                if failed is None:
                    await life
                else:
                    decode = self._next_decode(attempt, failed, lent_by)
                    if lent_by is not None:
                        self._write_body(attempt, lent_by, decode)
                    life.on(_NEXT_DECODE)
                    leg = attempt.send_decode(decode)
        finally:
            if lent_by is not None:
                attempt.settle(lent_by)
        if leg.lines is not None:
            await self._stream(attempt, leg)
        else:
            self._client.write_leg(attempt, leg)

    def _next_decode(
        self, attempt: Attempt, failed: LegFailed, lent_by: PrefillLeg | None
    ) -> Instance:
        """Choose another engine for a decode leg; raises LegFailed if none may have it."""
        if failed.rule.again is not RetryScope.DECODE:
            raise failed
        if lent_by is not None:
            attempt.note_read(lent_by)
        others = attempt.choice.others(failed.instance, lent_by, now=self._life.services.clock())
        if not others or not self._may_repeat(attempt, failed, others):
            raise failed
        self._life.record.set_aside(_DECODE, failed.failure)
        forget_frames(failed)  # they hold the leg, which holds it
        decode = attempt.choice.choose_decode(others)
        if attempt.prefill is not None:
            self._life.services.fleet.took_over(attempt.prefill.instance, decode, self._plan.hints)
        return decode

    # ---- STREAMING

    async def _stream(self, attempt: Attempt, leg: DecodeLeg) -> None:
        """Stream an answer to its end; raises EngineError: it broke off, or is not complete;
        StreamCut: it is taken over.
        """
        life = self._life
        client = self._client
        life.on(_FIRST_EVENT)
        client.begin_stream(attempt, leg)
        if client.replay is not None:
            self._note_files(leg.instance, attempt.prefill)
        attempt.terms.begun()
        while not leg.is_over and leg.fault is None:
            client.check_stream(leg)
            try:
                await life
            except ProxyError:  # the request has no more time, or the router
                if not leg.finish()[1]:
                    raise
                break  # its last event has passed
        client.check_stream(leg)
        client.end_stream(attempt, leg)
