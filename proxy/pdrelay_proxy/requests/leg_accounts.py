"""What legs are counted as: the fleet, its listeners and telemetry hear when one is sent, has
answered, and is over.

Nothing here decides what happens to a request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.core.model import Instance, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.sse import WholeLines
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.routing.retries import BrokenAnswer, RetryAttempts
from pdrelay_proxy.io.request_path.good_legs import GoodLegs
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.legs import DecodeLeg, EngineLeg, PrefillLeg

_OK: Final = 200
_DECODE: Final = Role.DECODE  # looking a member up takes as long as a call
_TIMEOUT: Final = Failure.TIMEOUT


@dataclass(slots=True, eq=False)
class LegAccounts:
    """Of all requests. Times are seconds of ``clock``."""

    fleet: LiveFleet
    telemetry: Telemetry
    good_legs: GoodLegs
    clock: Callable[[], float]

    def sent(self, leg: EngineLeg, plan: RequestPlan) -> None:
        """Tell the listeners of a leg.

        It is timed by a prefill engine's answer, or by the first event of a stream; not what is
        pushed, which waits for the prefill engine.
        """
        computes = is_timed = True  # as of a prefill leg
        if isinstance(leg, DecodeLeg):
            computes = leg.is_alone
            is_timed = plan.streams and (leg.is_alone or leg.follows)
        for listener in self.fleet.listeners:
            listener.leg_sent(
                leg.instance, leg.record.name, plan.hints, computes=computes, is_timed=is_timed
            )

    def prompt_computed(
        self,
        leg: PrefillLeg,
        plan: RequestPlan,
        record: RequestRecord,
        retries: RetryAttempts,
        now: float,
    ) -> None:
        """A prefill engine has answered well."""
        leg.answered_s = now - leg.record.sent_at
        leg.record.ms = leg.answered_s * 1000
        for listener in self.fleet.listeners:
            listener.prompt_computed(leg.instance, leg.record.name, plan.hints, leg.record.tokens)
        if retries.accused:
            self._blame(leg.instance, record, retries)

    def answered(
        self, leg: DecodeLeg, plan: RequestPlan, record: RequestRecord, retries: RetryAttempts
    ) -> None:
        """A decode engine has answered well, or has begun a stream."""
        now = self.clock()
        instance = leg.instance
        if leg.follows:
            self.telemetry.transfer_expected(instance.id)
        answered_s = leg.answered_s = now - leg.record.sent_at
        leg.record.ms = answered_s * 1000
        if retries.accused:
            self._blame(instance, record, retries)
        if leg.lines is not None:
            for listener in self.fleet.listeners:
                listener.stream_begun(instance, leg.record.name, plan.hints)
            self._time_tokens(leg, plan.path, record.last_token_at, now)
            self.good_legs.answered(instance, plan.path, leg.record.name, answered_s, now)
            leg.answered_s = None

    def _blame(self, witness: Instance, record: RequestRecord, retries: RetryAttempts) -> None:
        """Hold engines to account that have failed where this one answers well."""
        for guilty, failure in retries.guilty(witness):
            self.fleet.blamed(guilty, failure)
            if guilty.role is _DECODE:
                self.fleet.pair_history.blamed(record, guilty.id, now=self.clock())

    def _time_tokens(
        self, leg: DecodeLeg, path: str, last_token_at: float | None, now: float
    ) -> None:
        """Have a stream's reads timed; one that goes on for another has been quiet since."""
        name = None if self.fleet.stepped is None else leg.instance.id
        gaps = leg.gaps = self.telemetry.gaps(path, name)
        leg.read_at = now
        if last_token_at is not None:
            gaps.append(now - last_token_at)

    def compare_prompts(
        self, record: RequestRecord, prefill: PrefillLeg | None, decode: DecodeLeg
    ) -> None:
        """Complain when the legs had different prompts.

        The answer may be on its way: the log and the counters tell.
        """
        if (
            prefill is None
            or prefill.counted is None
            or decode.counted is None
            or prefill.counted == decode.counted
        ):
            return
        record.error = (
            f"{prefill.instance.id} counted {prefill.counted} prompt tokens and "
            f"{decode.instance.id} {decode.counted}: "
            "they do not make the same prompt of a request"
        )
        self.telemetry.differed(prefill.instance.id, decode.instance.id)

    def over(  # noqa: PLR0917 (by name it costs more)
        self,
        leg: EngineLeg,
        plan: RequestPlan,
        record: RequestRecord,
        prefill: PrefillLeg | None,
        decode: DecodeLeg | None,
        is_takeover: bool,  # noqa: FBT001
    ) -> None:
        """A leg is over; ``prefill``, ``decode``: both legs of its try; ``is_takeover``: of a
        stream that was taken over.
        """
        fleet = self.fleet
        now = self.clock()
        # Each look at a leg of either kind takes as long as ten at an object of one class.
        instance = leg.instance
        failure = leg.failure
        answered_s = leg.answered_s
        own = leg.record
        is_stream = False
        if decode is not None and decode is leg:
            is_stream = decode.lines is not None
            if decode.gaps is not None:
                record.last_token_at = decode.read_at
            if (
                fleet.listeners
                and leg.status == _OK
                and leg.fault is None
                and plan.call is not None
            ):
                for listener in fleet.listeners:
                    listener.answered(instance, plan.hints, record)
        seconds = now - own.sent_at
        if failure is None and answered_s is not None:
            self.good_legs.over(instance, plan.path, own.name, answered_s, seconds, now)
        else:
            self._count_end(leg, prefill, seconds, now)
        if failure is None or (failure is _TIMEOUT and is_takeover):
            # A takeover gives an engine little of its time: probes tell whether it lives.
            fleet.leave(instance, own.name)
        else:
            fleet.ended(instance, own.name, failure, was_begun=is_stream)

    def broken(
        self, leg: EngineLeg, failure: Failure, lines: WholeLines | None, *, is_rest: bool
    ) -> BrokenAnswer | None:
        """Return what an engine did not bring to its end, if it did more than fail: how the request
        ends shows whether that is held against it.

        ``lines``: of its stream, if it has begun one; ``is_rest``: the client has a token of
        another engine.
        """
        is_stream = lines is not None
        has_said_so = lines is not None and lines.erred
        is_break = leg.has_good_beginning and not has_said_so and (is_stream or not leg.complete)
        if is_break or is_stream or is_rest:
            return BrokenAnswer(leg.instance, failure, is_break=is_break, is_stream=is_stream)
        return None

    def _count_end(
        self, leg: EngineLeg, prefill: PrefillLeg | None, seconds: float, now: float
    ) -> None:
        """Count the end of a leg whose good answer was counted before, or that has none."""
        failure = leg.failure
        if leg.record.ms is None:
            leg.record.ms = seconds * 1000
        if failure is None:
            self.good_legs.ended(leg.instance, seconds, now, leg.complete)
            return
        telemetry = self.telemetry
        telemetry.later.add(
            telemetry.leg_failed, leg.instance, seconds, failure, leg.record.name, now
        )
        if prefill is not None and prefill is not leg and prefill.handover is not None:
            pair = prefill.instance.id, leg.instance.id
            telemetry.later.add(self.fleet.pair_history.failed, pair, failure, now)
