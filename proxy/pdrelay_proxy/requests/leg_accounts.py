"""What legs are counted as: the fleet, its listeners and telemetry hear when one is sent, has
answered, and is over.

Nothing here decides what happens to a request.
"""

from typing import Final

from pdrelay_proxy.core.model import Instance, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.sse import WholeLines
from pdrelay_proxy.core.routing.retries import BrokenAnswer
from pdrelay_proxy.requests.attempt import Attempt
from pdrelay_proxy.requests.legs import DecodeLeg, EngineLeg, PrefillLeg, ReadTimes

_OK: Final = 200
_DECODE: Final = Role.DECODE
_TIMEOUT: Final = Failure.TIMEOUT


def leg_sent(attempt: Attempt, leg: EngineLeg) -> None:
    """Tell the listeners of a leg.

    It is timed by a prefill engine's answer, or by the first event of a stream; not what is pushed,
    which waits for the prefill engine.
    """
    plan = attempt.plan
    computes = is_timed = True  # as of a prefill leg
    if isinstance(leg, DecodeLeg):
        computes = attempt.prefill is None
        is_timed = plan.streams and (computes or leg.follows)
    for listener in attempt.fleet.listeners:
        listener.leg_sent(
            leg.instance, leg.record.name, plan.hints, computes=computes, is_timed=is_timed
        )


def prompt_computed(attempt: Attempt, leg: PrefillLeg, now: float) -> None:
    """A prefill engine has answered well."""
    leg.answered_s = now - leg.record.sent_at
    leg.record.ms = leg.answered_s * 1000
    for listener in attempt.fleet.listeners:
        listener.prompt_computed(
            leg.instance, leg.record.name, attempt.plan.hints, leg.record.tokens
        )
    if attempt.retries.accused:
        _blame(attempt, leg.instance)


def leg_answered(attempt: Attempt, leg: DecodeLeg) -> None:
    """A decode engine has answered well, or has begun a stream."""
    services = attempt.life.services
    plan = attempt.plan
    now = services.clock()
    instance = leg.instance
    if leg.follows:
        services.telemetry.transfer_expected(instance.id)
    answered_s = leg.answered_s = now - leg.record.sent_at
    leg.record.ms = answered_s * 1000
    if attempt.retries.accused:
        _blame(attempt, instance)
    if leg.lines is not None:
        for listener in attempt.fleet.listeners:
            listener.stream_begun(instance, leg.record.name, plan.hints)
        # one that goes on for another has been quiet since
        last_token_at = attempt.life.record.last_token_at
        gaps = services.telemetry.gaps(
            plan.path, None if attempt.fleet.stepped is None else instance.id
        )
        leg.reads = ReadTimes(services.clock, gaps, now)
        if last_token_at is not None:
            gaps.append(now - last_token_at)
        services.good_legs.answered(instance, plan.path, leg.record.name, answered_s, now)
        leg.answered_s = None


def _blame(attempt: Attempt, witness: Instance) -> None:
    """Hold engines to account that have failed where this one answers well."""
    fleet = attempt.fleet
    life = attempt.life
    for guilty, failure in attempt.retries.guilty(witness):
        fleet.blamed(guilty, failure)
        if guilty.role is _DECODE:
            fleet.pair_history.blamed(life.record, guilty.id, now=life.services.clock())


def compare_prompts(attempt: Attempt, prefill: PrefillLeg, decode: DecodeLeg) -> None:
    """Complain when the legs had different prompts.

    The answer may be on its way: the log and the counters tell.
    """
    if prefill.counted is None or decode.counted is None or prefill.counted == decode.counted:
        return
    attempt.life.record.error = (
        f"{prefill.instance.id} counted {prefill.counted} prompt tokens and "
        f"{decode.instance.id} {decode.counted}: "
        "they do not make the same prompt of a request"
    )
    attempt.life.services.telemetry.differed(prefill.instance.id, decode.instance.id)


def leg_over(
    attempt: Attempt, leg: EngineLeg, prefill: PrefillLeg | None, decode: DecodeLeg | None
) -> None:
    """A leg is over; ``prefill``, ``decode``: both legs of its try."""
    fleet = attempt.fleet
    services = attempt.life.services
    plan = attempt.plan
    now = services.clock()
    # Each look at a leg of either kind takes as long as ten at an object of one class.
    instance = leg.instance
    failure = leg.failure
    answered_s = leg.answered_s
    own = leg.record
    is_stream = False
    if decode is not None and decode is leg:
        is_stream = decode.lines is not None
        if decode.reads is not None:
            attempt.life.record.last_token_at = decode.reads.last
        if fleet.listeners and leg.status == _OK and leg.fault is None and plan.call is not None:
            for listener in fleet.listeners:
                listener.answered(instance, plan.hints, attempt.life.record)
    seconds = now - own.sent_at
    if failure is None and answered_s is not None:
        services.good_legs.over(instance, plan.path, own.name, answered_s, seconds, now)
    else:
        _count_end(attempt, leg, prefill, seconds, now)
    if failure is None or (failure is _TIMEOUT and attempt.terms.is_takeover):
        # A takeover gives an engine little of its time: probes tell whether it lives.
        fleet.leave(instance, own.name)
    else:
        fleet.ended(instance, own.name, failure, was_begun=is_stream)


def _count_end(
    attempt: Attempt, leg: EngineLeg, prefill: PrefillLeg | None, seconds: float, now: float
) -> None:
    """Count the end of a leg whose good answer was counted before, or that has none."""
    services = attempt.life.services
    failure = leg.failure
    if leg.record.ms is None:
        leg.record.ms = seconds * 1000
    if failure is None:
        services.good_legs.ended(leg.instance, seconds, now, leg.complete)
        return
    telemetry = services.telemetry
    telemetry.later.add(telemetry.leg_failed, leg.instance, seconds, failure, leg.record.name, now)
    if prefill is not None and prefill is not leg and prefill.handover is not None:
        pair = prefill.instance.id, leg.instance.id
        telemetry.later.add(attempt.fleet.pair_history.failed, pair, failure, now)


def broken_answer(
    leg: EngineLeg, failure: Failure, lines: WholeLines | None, *, is_rest: bool
) -> BrokenAnswer | None:
    """Return what an engine did not bring to its end, if it did more than fail: how the request
    ends shows whether that is held against it.

    ``lines``: of its stream, if it has begun one; ``is_rest``: the client has a token of another
    engine.
    """
    is_stream = lines is not None
    has_said_so = lines is not None and lines.erred
    is_break = leg.has_good_beginning and not has_said_so and (is_stream or not leg.complete)
    if is_break or is_stream or is_rest:
        return BrokenAnswer(leg.instance, failure, is_break=is_break, is_stream=is_stream)
    return None
