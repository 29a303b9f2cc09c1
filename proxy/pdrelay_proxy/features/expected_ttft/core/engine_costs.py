"""What it takes an engine to serve a request, for policies; and what its legs took, from those that
send them.
"""

from collections.abc import Callable
from statistics import median
from typing import Final

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, RequestId, Role, RoutingHints
from pdrelay_proxy.core.routing.leg_listener import LegListener
from pdrelay_proxy.core.routing.policy_parts import PromptMatches
from pdrelay_proxy.features.expected_ttft.core.engine_speed import (
    UNKNOWN,
    EngineSpeed,
    EngineSpeeds,
    Line,
    LineFit,
    Priors,
)
from pdrelay_proxy.features.expected_ttft.core.token_counts import TokenCounts

_PRIORS_S: Final = 1.0  # seconds for which what is likely of an engine is not computed again
_SURE: Final = 1.0  # measurements from which on an engine tells something about the others
_DECODE: Final = Role.DECODE  # looking a member up takes as long as a call


class EngineCosts(LegListener):
    """Estimates, and learns from legs."""

    def __init__(
        self,
        registry: Registry,
        speeds: EngineSpeeds,
        caches: PromptMatches,
        clock: Callable[[], float],
        *,
        weight: float,
        itl_most_s: float | None,
    ) -> None:
        """``weight``: for how many tokens a request's time between tokens counts beside its time to
        first token.

        ``itl_most_s``: the longest pause that a prompt may cause in streams of a decode engine that
        computes it alone; None: prompts are always split.
        """
        self._registry = registry
        self._speeds = speeds
        self._caches = caches
        self._clock = clock  # seconds; the one of the fleet
        self._weight = weight
        self._itl_most_s = itl_most_s
        self._tokens = TokenCounts()
        self._priors: dict[Role, Priors] = {}
        self._priors_at = -_PRIORS_S

    # ---- what a choice would cost

    def prefill(self, instance: Instance, hints: RoutingHints) -> ExpectedTime:
        """Return what a prefill engine's part of a request takes."""
        return self._computing(self._registry.get(instance.id), instance, hints, is_there=False)

    def decode(self, instance: Instance, hints: RoutingHints) -> ExpectedTime:
        """Return what a decode engine's part takes that gets what it lacks from a prefill
        engine.
        """
        member = self._registry.get(instance.id)
        tokens, hit = self._counts(instance, hints, is_there=False)
        if member is None:
            return ExpectedTime(tokens=tokens, decode_hit=hit)
        speed = self._speeds.of(member)
        priors = self._likely(_DECODE)
        now = self._clock()
        line = speed.transfer.among(priors.transfer, now)
        step_s = self._step_s(speed, priors, now)
        return ExpectedTime(
            tokens=tokens,
            transfer_s=line.at(speed.loading.left(line.slope_s, now) + tokens - hit),
            decode_s=step_s,
            burden_s=step_s * self._weight,
            decode_hit=hit,
        )

    def alone(self, instance: Instance, hints: RoutingHints) -> ExpectedTime:
        """Return what a request takes that a decode engine serves alone."""
        member = self._registry.get(instance.id)
        found = self._computing(member, instance, hints, is_there=True)
        if member is None:
            return found
        step_s = self._step_s(self._speeds.of(member), self._likely(_DECODE), self._clock())
        # its first token comes out of the step that computes the end of the prompt
        return ExpectedTime(
            tokens=found.tokens,
            queue_s=found.queue_s,
            prefill_s=found.prefill_s,
            pause_s=step_s + found.pause_s,
            burden_s=found.burden_s + step_s * self._weight,
            decode_hit=found.prefill_hit,
        )

    def spares(self, alone: ExpectedTime) -> bool:
        """Tell whether a decode engine can compute a prompt without a pause in its streams that is
        too long.
        """
        most = self._itl_most_s
        return most is not None and alone.pause_s <= most

    def spares_alone(self, instance: Instance, hints: RoutingHints) -> bool:
        """Tell the same of an engine and a prompt."""
        return self.spares(self.alone(instance, hints))

    @property
    def may_be_alone(self) -> bool:
        """Whether a decode engine ever computes a prompt alone because that is faster."""
        return self._itl_most_s is not None

    def cached(self, instance: Instance, hints: RoutingHints) -> int:
        """Return how many bytes of the prompt a decode engine has."""
        return self._caches.matched(instance, hints, is_there=True)

    def matched(self, instance: Instance, hints: RoutingHints) -> int:
        """Return how many bytes of the prompt an engine has, or will soon."""
        return self._caches.matched(instance, hints) if hints.prompt else 0

    def recent(self, instance: Instance) -> float:
        """Return the tokens of the legs that an engine was sent lately."""
        member = self._registry.get(instance.id)
        return 0.0 if member is None else self._speeds.of(member).recent(self._clock())

    def _computing(
        self, member: Member | None, instance: Instance, hints: RoutingHints, *, is_there: bool
    ) -> ExpectedTime:
        tokens, hit = self._counts(instance, hints, is_there=is_there)
        if member is None:
            return ExpectedTime(tokens=tokens, prefill_hit=hit)
        speed = self._speeds.of(member)
        now = self._clock()
        line = speed.prefill.among(self._likely(instance.role).prefill, now)
        ahead = (
            speed.computing.left(line.slope_s, now) + _elsewhere(member, now) * speed.tokens_mean
        )
        # Requests behind this one wait for what it has computed, the busier the engine. Without
        # that, conversations leave the engine that has them for the first shorter queue, and at
        # high load all compute more than is new.
        new = max(1, tokens - hit)
        busy = speed.busy(line.slope_s, now)
        return ExpectedTime(
            tokens=tokens,
            queue_s=ahead * line.slope_s,
            prefill_s=line.at(new),
            pause_s=(ahead + new) * line.slope_s,
            burden_s=new * line.slope_s * busy * busy,
            prefill_hit=hit,
        )

    def _step_s(self, speed: EngineSpeed, priors: Priors, now: float) -> float:
        return speed.step.among(priors.step, now).at(len(speed.entered) + 1)

    def _counts(
        self, instance: Instance, hints: RoutingHints, *, is_there: bool
    ) -> tuple[int, int]:
        """Return the tokens of a prompt, and how many of them an engine has."""
        if not hints.prompt:
            return 0, 0
        per_byte = self._tokens.per_byte(hints)
        matched = self._caches.matched(instance, hints, is_there=is_there)
        tokens = max(1, int(len(hints.prompt) * per_byte))
        return tokens, min(int(matched * per_byte), tokens)

    def _likely(self, role: Role) -> Priors:
        """Return what the engines of a role are like, as their median."""
        now = self._clock()
        if now >= self._priors_at + _PRIORS_S or not self._priors:
            self._priors_at = now
            self._speeds.keep(self._registry.members())
            for each in (Role.PREFILL, _DECODE):
                members = [
                    member
                    for member in self._registry.members()
                    if member.as_role(each) is not None
                ]
                speeds = [self._speeds.of(member) for member in members]
                before = self._priors.get(Role.PREFILL, UNKNOWN) if each is _DECODE else UNKNOWN
                self._priors[each] = Priors(
                    _median([speed.prefill for speed in speeds], before.prefill),
                    _median([speed.transfer for speed in speeds], before.transfer),
                    _median([speed.step for speed in speeds], before.step),
                )
        return self._priors[role]

    # ---- what legs take

    def slot_held(self, decode: Instance, request: RequestId, /) -> None:
        """Count what the engine will have to do."""
        if (member := self._registry.get(decode.id)) is not None:
            self._speeds.of(member).reserve(request)

    def leg_sent(
        self,
        engine: Instance,
        request: RequestId,
        hints: RoutingHints,
        /,
        *,
        computes: bool,
        is_timed: bool,
    ) -> None:
        """Begin to measure how long the engine takes for what it lacks of the prompt."""
        member = self._registry.get(engine.id)
        if member is None:
            return
        tokens, hit = self._counts(engine, hints, is_there=computes and engine.role is _DECODE)
        if tokens and not is_timed:
            self._speeds.of(member).reserve(request)
            self._caches.sent(engine, hints)
        elif tokens:  # else it has none that are known
            priors = self._likely(engine.role)
            self._speeds.of(member).send(
                request, max(1, tokens - hit), priors, self._clock(), computes=computes
            )
            self._caches.sent(engine, hints)

    def prompt_computed(
        self, prefill: Instance, request: RequestId, hints: RoutingHints, counted: int | None, /
    ) -> None:
        """Learn how fast the engine computes, and how many tokens such a prompt has."""
        self._done(prefill, request)
        if counted is not None:
            self._tokens.counted(hints, counted)

    def stream_begun(self, decode: Instance, request: RequestId, _hints: RoutingHints, /) -> None:
        """Learn how fast the engine computes, or gets what another one has computed."""
        self._done(decode, request)

    def left(self, engine: Instance, request: RequestId, /) -> None:
        """Stop to count what the engine has to do for it."""
        if (member := self._registry.get(engine.id)) is not None:
            self._speeds.of(member).leave(request, self._clock())

    def _done(self, engine: Instance, request: RequestId) -> None:
        if (member := self._registry.get(engine.id)) is not None:
            self._speeds.of(member).answered(request, self._likely(engine.role), self._clock())

    @property
    def times_streams(self) -> bool:
        """Whether ``stepped`` is called."""
        return True

    def stepped(self, instance: InstanceId, gaps: list[float], /) -> None:
        """The streams of a decode engine got their tokens so many seconds apart, in the last
        moment.
        """
        if gaps and (member := self._registry.get(instance)) is not None:
            self._speeds.of(member).stepped(
                sum(gaps) / len(gaps), self._likely(_DECODE), self._clock()
            )


def _elsewhere(member: Member, now: float) -> int:
    """Return how many requests an engine has of other routers, as far as is known."""
    load = member.load
    return max(load.at_other_routers, load.waiting(now=now) - load.in_flight)


def _median(fits: list[LineFit], otherwise: Line) -> Line:
    lines = [fit.line for fit in fits if fit.line is not None and fit.count >= _SURE]
    if not lines:
        return otherwise
    return Line(median([line.base_s for line in lines]), median([line.slope_s for line in lines]))
