"""Estimates what a request costs at an engine, and learns from the legs that are sent."""

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

_PRIORS_S: Final = 1.0  # seconds between two computations of the priors
_SURE: Final = 1.0  # measurements of an engine from which on it counts in the priors
_DECODE: Final = Role.DECODE


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
        """``weight``: the ITL of so many tokens counts beside the TTFT.

        ``itl_most_s``: the longest pause that a prompt may cause in the streams of a decode engine
        that computes it alone; None: prompts are always split.
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

    # ---- estimates

    def prefill(self, instance: Instance, hints: RoutingHints) -> ExpectedTime:
        """Return the expected time of a prefill engine's part of a request."""
        return self._computing(self._registry.get(instance.id), instance, hints, is_there=False)

    def decode(self, instance: Instance, hints: RoutingHints) -> ExpectedTime:
        """Return the expected time of a decode engine's part, with the load of KV."""
        member = self._registry.get(instance.id)
        tokens, hit = self._counts(instance, hints, is_there=False)
        if member is None:
            return ExpectedTime(tokens=tokens, decode_hit=hit)
        speed = self._speeds.for_member(member)
        priors = self._likely(_DECODE)
        now = self._clock()
        line = speed.transfer.among(priors.transfer, now)
        step_s = self._step_s(speed, priors, now)
        return ExpectedTime(
            tokens=tokens,
            transfer_s=line.at(speed.loading.remaining(line.slope_s, now) + tokens - hit),
            decode_s=step_s,
            burden_s=step_s * self._weight,
            decode_hit=hit,
        )

    def alone(self, instance: Instance, hints: RoutingHints) -> ExpectedTime:
        """Return the expected time of a request that a decode engine serves alone."""
        member = self._registry.get(instance.id)
        computing = self._computing(member, instance, hints, is_there=True)
        if member is None:
            return computing
        step_s = self._step_s(self._speeds.for_member(member), self._likely(_DECODE), self._clock())
        # its first token comes out of the step that computes the end of the prompt
        return ExpectedTime(
            tokens=computing.tokens,
            queue_s=computing.queue_s,
            prefill_s=computing.prefill_s,
            pause_s=step_s + computing.pause_s,
            burden_s=computing.burden_s + step_s * self._weight,
            decode_hit=computing.prefill_hit,
        )

    def spares(self, alone: ExpectedTime) -> bool:
        """Tell whether the pause in a decode engine's streams is short enough."""
        most = self._itl_most_s
        return most is not None and alone.pause_s <= most

    def spares_alone(self, instance: Instance, hints: RoutingHints) -> bool:
        """Tell whether a decode engine may compute this prompt alone, by `spares`."""
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
        return 0.0 if member is None else self._speeds.for_member(member).recent(self._clock())

    def _computing(
        self, member: Member | None, instance: Instance, hints: RoutingHints, *, is_there: bool
    ) -> ExpectedTime:
        tokens, hit = self._counts(instance, hints, is_there=is_there)
        if member is None:
            return ExpectedTime(tokens=tokens, prefill_hit=hit)
        speed = self._speeds.for_member(member)
        now = self._clock()
        line = speed.prefill.among(self._likely(instance.role).prefill, now)
        ahead = (
            speed.computing.remaining(line.slope_s, now)
            + _elsewhere(member, now) * speed.tokens_mean
        )
        # Computing a prompt delays the requests behind it, the more the busier the engine is.
        # Without this burden conversations would leave their engine for any shorter queue, and at
        # high load engines would recompute what others have cached.
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
        """Return the priors of a role: the medians over its engines."""
        now = self._clock()
        if now >= self._priors_at + _PRIORS_S or not self._priors:
            self._priors_at = now
            self._speeds.keep(self._registry.members())
            for serving_role in (Role.PREFILL, _DECODE):
                members = [
                    member
                    for member in self._registry.members()
                    if member.as_role(serving_role) is not None
                ]
                speeds = [self._speeds.for_member(member) for member in members]
                before = (
                    self._priors.get(Role.PREFILL, UNKNOWN) if serving_role is _DECODE else UNKNOWN
                )
                self._priors[serving_role] = Priors(
                    _median([speed.prefill for speed in speeds], before.prefill),
                    _median([speed.transfer for speed in speeds], before.transfer),
                    _median([speed.step for speed in speeds], before.step),
                )
        return self._priors[role]

    # ---- measurements

    def slot_held(self, decode: Instance, request: RequestId, /) -> None:
        """Count a request that the engine will get."""
        if (member := self._registry.get(decode.id)) is not None:
            self._speeds.for_member(member).reserve(request)

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
        """Begin to measure how long the engine takes for the uncached part of the prompt."""
        member = self._registry.get(engine.id)
        if member is None:
            return
        tokens, hit = self._counts(engine, hints, is_there=computes and engine.role is _DECODE)
        if tokens and not is_timed:
            self._speeds.for_member(member).reserve(request)
            self._caches.sent(engine, hints)
        elif tokens:  # else it has none that are known
            priors = self._likely(engine.role)
            self._speeds.for_member(member).send(
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
        """Learn how fast the engine computes, or loads KV of another one."""
        self._done(decode, request)

    def left(self, engine: Instance, request: RequestId, /) -> None:
        """Stop to count the request at this engine."""
        if (member := self._registry.get(engine.id)) is not None:
            self._speeds.for_member(member).leave(request, self._clock())

    def _done(self, engine: Instance, request: RequestId) -> None:
        if (member := self._registry.get(engine.id)) is not None:
            self._speeds.for_member(member).answered(
                request, self._likely(engine.role), self._clock()
            )

    @property
    def times_streams(self) -> bool:
        """Whether ``stepped`` is called."""
        return True

    def stepped(self, instance: InstanceId, gaps: list[float], /) -> None:
        """Learn the ITL of a decode engine from the gaps of its streams in the last moment."""
        if gaps and (member := self._registry.get(instance)) is not None:
            self._speeds.for_member(member).stepped(
                sum(gaps) / len(gaps), self._likely(_DECODE), self._clock()
            )


def _elsewhere(member: Member, now: float) -> int:
    """Return how many requests of other routers an engine has, as far as known."""
    load = member.load
    return max(load.at_other_routers, load.waiting(now=now) - load.in_flight)


def _median(fits: list[LineFit], otherwise: Line) -> Line:
    lines = [fit.line for fit in fits if fit.line is not None and fit.count >= _SURE]
    if not lines:
        return otherwise
    return Line(median([line.base_s for line in lines]), median([line.slope_s for line in lines]))
