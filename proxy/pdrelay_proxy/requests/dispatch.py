"""Sends one request to its engines: chooses them, sends the legs in order, and repeats what may be
repeated.

requests/attempt.py is one try, and requests/attempt_legs.py has its legs. What the client gets of
it is up to requests/client_response.py.
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
from pdrelay_proxy.core.protocol.fault_table import RetryScope
from pdrelay_proxy.core.protocol.usage import cache_usage
from pdrelay_proxy.core.raw_json import NULL
from pdrelay_proxy.core.routing.retries import LegFailed
from pdrelay_proxy.core.routing.route import told_ahead
from pdrelay_proxy.core.routing.routing_hints import with_model
from pdrelay_proxy.errors import NoInstance, ProxyError, forget_frames
from pdrelay_proxy.requests.answering import Answering
from pdrelay_proxy.requests.attempt import Attempt, Terms
from pdrelay_proxy.requests.attempt_legs import AttemptLegs
from pdrelay_proxy.requests.client_response import ClientResponse
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.leg_bodies import decode_body, pushed_body
from pdrelay_proxy.requests.legs import DecodeLeg
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.lifecycle import RequestEvent, RequestState
from pdrelay_proxy.settings import Settings

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


class Dispatch(Answering):
    """What one request has at its engines."""

    __slots__ = ("_client", "_legs", "_life", "_plan", "settings")

    def __init__(
        self, life: RequestLife, plan: RequestPlan, settings: Settings, client: ClientResponse
    ) -> None:
        """``settings``: those that were in force when the request was admitted."""
        self._life = life
        self._plan = plan
        self._client = client
        self._legs: AttemptLegs | None = None  # since engines were chosen
        self.settings = settings

    # ---- for those who look after all requests

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        return () if self._legs is None else self._legs.engines

    @property
    def attempts(self) -> Sequence[Attempt]:
        """List the tries that are under way."""
        return () if self._legs is None else (self._legs.attempt,)

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
        if self._legs is not None:
            self._legs.pause()

    def resume(self) -> None:
        """Let the engine go on."""
        if self._legs is not None:
            self._legs.resume()

    def check_deadlines(self, now: float, /) -> None:
        """Fail a leg that has taken too long, unless the client is slow to read."""
        if self._legs is not None:
            self._legs.check_deadlines(now, paused=self._client.is_paused)

    def close_attempt(self) -> Attempt | None:
        """Drop what is under way; return the attempt."""
        legs = self._legs
        self._legs = None
        if legs is None:
            return None
        legs.close_all()
        return legs.attempt

    # ---- tries

    async def answer(self, terms: Terms) -> None:
        """Try until an engine has given the whole answer; raises ProxyError for the client."""
        failed: LegFailed | None = None
        life = self._life
        while True:
            attempt = Attempt(life, self._plan, self.settings, terms)
            legs = self._legs = AttemptLegs(attempt)
            try:
                prefill, decode = terms.choose(attempt)
                if prefill is None:
                    legs.body = terms.body_alone(attempt)
                self._send_first(legs, prefill, decode)
                lender = legs.lender
                if lender is not None:
                    while lender.handover is None:
                        if lender.fault is not None:
                            raise lender.fault
                        await life
                    terms.handed_over(lender.instance)
                    if self._hand_over(legs, decode):
                        return
                await self._decode(legs, attempt.slot or decode)
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
            or not self._may_repeat(attempt, failed, attempt.usable(role))
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

    def _send_first(self, legs: AttemptLegs, prefill: Instance | None, decode: Instance) -> None:
        """Send what can be sent before an engine has answered, but for the decode leg."""
        life = self._life
        services = life.services
        attempt = legs.attempt
        plan = self._plan
        call = attempt.terms.call
        if call is None or prefill is None:
            life.on(_SINGLE)
            return
        attempt.hold_slot(decode)
        model = services.leg_bodies.model_of(prefill.id) if plan.learns_model else None
        coordinates = told_ahead(
            prefill.id,
            attempt.mode,
            services.push_coordinates,
            needs_model=plan.learns_model and model is None,
        )
        if coordinates is None:
            life.on(_PULL)
            legs.send_prefill(call, prefill, reuses=services.fleet.passes_ids(call, decode))
            return
        if model is not None:
            plan.learn_model(model)
            call = _named(call, model)
        life.record.push = _CONCURRENT
        life.record.transfer = attempt.transfer
        legs.coordinates = coordinates
        # until the prefill engine has answered; it may never do
        life.cache_usage = cache_usage(call.api, b"", hides=True)
        legs.body = pushed_body(call, attempt.id, attempt.transfer, coordinates)
        life.on(_PUSH)
        legs.send_prefill(call, prefill, reuses=False)

    def _hand_over(self, legs: AttemptLegs, decode: Instance) -> bool:
        """Make the decode leg's body of the answer; True: the client gets that answer alone."""
        lender = legs.lender
        opening = None if lender is None else lender.stream_opening
        life = self._life
        if opening is None:
            life.on(_PREFILLED)
        else:
            life.on(_OPENED)
            self._client.open_stream(legs, opening, can_resume=self.settings.resume_streams)
            self._note_files(legs, legs.attempt.slot or decode)
            if opening.is_all:
                legs.settle()
                return True
        self._write_body(legs, legs.attempt.slot or decode)
        return False

    def _note_files(self, legs: AttemptLegs, decode: Instance) -> None:
        """Remember which files of the model a stream has begun with that others may go on with.

        An engine may have been removed since it was chosen; two that share a request have the same.
        """
        facts = self._life.services.fleet.registry.facts
        plan = self._plan
        if plan.files is None:
            plan.files = facts(decode).files_of(plan.hints.model)
        if plan.files is None and legs.prefill is not None:
            plan.files = facts(legs.prefill.instance).files_of(plan.hints.model)

    def _write_body(self, legs: AttemptLegs, decode: Instance) -> None:
        """Write the body of a leg that reads a lender's blocks, as its engine can take it."""
        attempt = legs.attempt
        call = attempt.terms.call
        lender = legs.lender
        if call is None or lender is None or lender.handover is None:
            return
        life = self._life
        handover = lender.handover
        ids = attempt.terms.ids
        if self._plan.learns_model and self._plan.hints.model is not None:
            call = _named(call, self._plan.hints.model)
        if (
            ids is None
            and handover.ids is not NULL
            and (call.api is not _CHAT or life.services.fleet.takes_chat_ids(decode))
        ):
            ids = handover.ids
        legs.body = decode_body(
            call, life.record, attempt.id, handover, lender.stream_opening, ids=ids
        )

    async def _decode(self, legs: AttemptLegs, decode: Instance) -> None:
        """Get the answer from a decode engine, or from another one if this one got nothing of the
        request.

        Raises:
            LegFailed: none has begun to answer.
            EngineError: a stream broke off, or is not complete.
        """
        leg = legs.send_decode(decode)
        life = self._life
        try:
            # what ends with its beginning is waited for
            while leg.shown is None or (leg.is_last and not leg.complete):
                failed = legs.failed()
                if failed is None:
                    await life
                else:
                    decode = self._next_decode(legs, failed)
                    self._write_body(legs, decode)
                    life.on(_NEXT_DECODE)
                    leg = legs.send_decode(decode)
        finally:
            legs.settle()
        if leg.lines is not None:
            await self._stream(legs, leg)
        else:
            self._client.write_leg(legs, leg)

    def _next_decode(self, legs: AttemptLegs, failed: LegFailed) -> Instance:
        """Choose another engine for a decode leg; raises LegFailed if none may have it."""
        if failed.rule.again is not RetryScope.DECODE:
            raise failed
        legs.note_read()
        attempt = legs.attempt
        services = self._life.services
        others = attempt.others(failed.instance, legs.lender, now=services.clock())
        if not others or not self._may_repeat(attempt, failed, others):
            raise failed
        self._life.record.set_aside(_DECODE, failed.failure)
        forget_frames(failed)  # they hold the leg, which holds it
        decode = attempt.choose_decode(others)
        if attempt.prefill is not None:
            services.fleet.took_over(attempt.prefill, decode, self._plan.hints)
        return decode

    # ---- STREAMING

    async def _stream(self, legs: AttemptLegs, leg: DecodeLeg) -> None:
        """Stream an answer to its end; raises EngineError: it broke off, or is not complete;
        StreamCut: it is taken over.
        """
        life = self._life
        client = self._client
        life.on(_FIRST_EVENT)
        client.begin_stream(legs, leg)
        if client.replay is not None:
            self._note_files(legs, leg.instance)
        legs.attempt.terms.begun()
        while not leg.complete and leg.fault is None:
            client.check_stream(leg)
            try:
                await life
            except ProxyError:  # the request has no more time, or the router
                if not leg.finish()[1]:
                    raise
                break  # its last event has passed
        client.check_stream(leg)
        client.end_stream(legs, leg)


def _named(call: GenerationRequest, model: str) -> GenerationRequest:
    """Return a request that names no model with the one that its prefill engine serves."""
    return call.with_fields(with_model(call.api, call.fields, model))
