"""Makes and sends the legs of one try: their time, their body, their headers; and reads what the
prefill engine has answered, of which the decode leg is made.

What follows is up to requests/attempt_legs.py. Times are seconds of the request's clock.
"""

from typing import Final

from pdrelay_proxy.core.fleet.load import ASK_FOR_REPORT
from pdrelay_proxy.core.model import Api, GenerationRequest, Instance, PrefillResult
from pdrelay_proxy.core.protocol.engine_errors import leg_error
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.protocol.returned_kv import CachedOn
from pdrelay_proxy.core.protocol.usage import cache_usage
from pdrelay_proxy.core.raw_json import Fields, Pieces
from pdrelay_proxy.core.schemas import Coordinates
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.request_path.returned_kv import cached_on
from pdrelay_proxy.requests.attempt import Attempt
from pdrelay_proxy.requests.leg_accounts import leg_sent
from pdrelay_proxy.requests.leg_bodies import prefill_body
from pdrelay_proxy.requests.legs import DecodeLeg, EngineLeg, LegOwner, PrefillLeg

_OK: Final = 200
_PUSH: Final = TransferMode.PUSH
_RESPONSES: Final = Api.RESPONSES.value


def new_prefill(
    owner: LegOwner, attempt: Attempt, call: GenerationRequest, prefill: Instance, *, reuses: bool
) -> tuple[PrefillLeg, Pieces]:
    """Return a prefill leg that is to be sent, and its body.

    ``reuses``: its answer shall tell the tokens of the prompt.
    """
    services = attempt.life.services
    settings = attempt.settings
    terms = attempt.terms
    hints = attempt.plan.hints
    seconds = settings.first_token_timeout_s
    if terms.is_takeover:
        seconds = min(seconds, terms.seconds_for(prefill))
    now = services.clock()
    leg = PrefillLeg(owner, prefill, now, now + seconds)
    own_fields: Fields | None = None
    if terms.can_open:
        own_fields = services.openings.prefill_fields(call, prefill.id)
        leg.opens = own_fields is not None
    holder: CachedOn | None = None
    if not terms.is_takeover:
        leg.reuses = reuses
        reader = services.fleet.id_reader
        leg.learns = reader is not None and reader.wants_ids(call, hints)
        if settings.return_kv:
            holder = cached_on(services.fleet, hints, prefill.id)
            services.telemetry.kv_return_looked_up(named=holder is not None)
    attempt.life.record.prefill = leg.record
    return leg, prefill_body(
        call,
        attempt.id,
        attempt.transfer,
        reuses=leg.reuses,
        own_fields=own_fields,
        learns=leg.learns,
        cached_on=holder,
        ids=terms.ids,
        pushes=attempt.mode is _PUSH,
    )


def read_prefill(
    attempt: Attempt,
    leg: PrefillLeg,
    call: GenerationRequest,
    body: bytes,
    *,
    sent: Coordinates | None,
) -> PrefillResult:
    """Return what the answer to a prefill leg is good for, and note what it tells; ``sent``: what
    the decode engine has been told of the prefill engine already.

    Raises:
        EngineError, Refused: it is no good answer.
    """
    life = attempt.life
    plan = attempt.plan
    services = life.services
    prefill = leg.instance
    is_auto = attempt.mode is not None
    if leg.status != _OK:
        raise leg_error(prefill, leg.response(body))
    if plan.learns_model:  # the decode engine is told the name, and checks it
        plan.learn_model(services.leg_bodies.learn_model(prefill.id, body))
    handover = services.leg_bodies.read_handover(
        call,
        attempt.id,
        attempt.transfer,
        prefill,
        sent=sent,
        answer=body,
        reuses=leg.reuses,
        tells_ids=leg.opens or leg.learns,
        is_auto=is_auto,
    )
    services.leg_bodies.note_looks_back(
        plan.hints.model, prefill.id, looks_back=handover.looks_back
    )
    if attempt.terms.can_open:
        leg.stream_opening = services.openings.read_opening(
            call, prefill.id, handover, is_asked=leg.opens, is_auto=is_auto
        )
    if attempt.terms.is_takeover:  # the engine may have all of it in its own cache
        if life.cache_usage is None:
            life.cache_usage = cache_usage(call.api, b"", hides=True)
    else:
        # a decode engine that does not wait for the answer cannot repeat its number
        hides = sent is not None
        life.cache_usage = (
            cache_usage(call.api, body, hides=hides) if handover.may_tell_cache else None
        )
    leg.counted = leg.record.tokens = handover.counted
    return handover


def new_decode(
    owner: LegOwner, attempt: Attempt, decode: Instance, prefill: PrefillLeg | None
) -> DecodeLeg:
    """Return a decode leg that is to be sent; ``prefill``: the leg before it."""
    life = attempt.life
    plan = attempt.plan
    services = life.services
    seconds = attempt.settings.first_token_timeout_s
    now = services.clock()
    # a chat says who speaks with its first token, whatever it keeps back
    is_watched = plan.streams and not (plan.may_be_quiet and plan.path == _RESPONSES)
    due = now + seconds if is_watched else None
    if attempt.terms.is_takeover:
        due = now + min(seconds, attempt.terms.seconds_for(decode))
    leg = DecodeLeg(owner, decode, now, due)
    leg.counts = life.record.single_reason is None
    leg.cache_usage = life.cache_usage
    leg.record.expected = attempt.expected
    attempt.expected = None
    life.record.decode = leg.record
    if prefill is not None and prefill.handover is not None and not prefill.is_followed:
        leg.follows = prefill.is_followed = True
        services.telemetry.handed_over(now - prefill.handed_over_at)
    return leg


def why_late(attempt: Attempt, leg: EngineLeg, *, is_streaming: bool) -> str:
    """Say what a leg has not done in its time; ``is_streaming``: a stream is being shown."""
    settings = attempt.settings
    if attempt.terms.is_takeover:
        return f"{leg.engine} did not answer within {attempt.terms.limit(leg.instance)}"
    if isinstance(leg, PrefillLeg):
        return f"{leg.engine} did not answer within {settings.first_token_timeout_s:g} s"
    if is_streaming:
        return f"{leg.engine} sent nothing for {settings.stream_idle_timeout_s:g} s"
    return f"{leg.engine} sent no token within {settings.first_token_timeout_s:g} s"


def send_leg(attempt: Attempt, leg: EngineLeg, body: Pieces) -> EngineError | None:
    """Send a leg; return why it cannot be sent, if so."""
    life = attempt.life
    services = life.services
    plan = attempt.plan
    instance = leg.instance
    leg.record.name = attempt.id
    headers = plan.headers
    if instance.rank is not None or plan.hints.rank is not None:
        headers = plan.headers_for(instance)
    if services.reports and isinstance(leg, PrefillLeg):
        headers = (*headers, ASK_FOR_REPORT)
    if life.span is not None:
        leg.span, headers = life.span.leg(instance, headers)
    if attempt.slot is instance:  # it becomes the leg's own
        attempt.slot = None
    else:
        services.fleet.enter(instance, attempt.id)
    if services.fleet.listeners:
        leg_sent(attempt, leg)
    try:
        services.sender.send(
            leg,
            instance,
            plan.path,
            headers=headers,
            request=attempt.id,
            body=body,
            content_type=plan.content_type,
        )
    except EngineError as error:
        return error
    return None
