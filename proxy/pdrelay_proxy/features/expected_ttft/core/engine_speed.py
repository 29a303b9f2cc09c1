"""The speed of one engine, learned from its legs, and its work for this router that is not done.

Tokens are estimates of a prompt's uncached tokens. Times are seconds of a monotonic clock.
"""

from collections.abc import Sequence
from math import log
from typing import Final

from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.model import InstanceId, RequestId

_KEPT: Final = 0.97  # of the weight of earlier measurements, with each new one
_HALF_LIFE_S: Final = 60.0  # after which an idle engine is believed to be like the others again
_RECENT_S: Final = 30.0  # half-life of the tokens sent lately
_PER_S: Final = 0.6931 / _RECENT_S  # of these tokens, the share sent in a second
# the relative difference between engines of a role that is expected: smaller ones are noise
_ALIKE: Final = 0.4
_USUAL: Final = 0.02  # mean square of relative errors, before enough of them are measured
# a measurement is cut to this factor of the expected time, above and below
_FAR: Final = 4.0
_SURE: Final = 3.0  # measurements before which none is cut
_SMALL: Final = 200.0  # tokens, or streams, that take about as long as an empty step
_PRIOR: Final = 0.2  # weight of the prior at either end, in measurements
_LEAST_S: Final = 1e-4  # the shortest time that counts as more than zero
_DONE_MOST: Final = 0.9  # share of a queue that may be done without an answer
_FLAT: Final = 1e-9  # seconds for a token, at least


class Line:
    """A time that grows with a number: ``base_s + slope_s * number``. It does not change."""

    __slots__ = ("base_s", "slope_s")

    def __init__(self, base_s: float, slope_s: float) -> None:
        self.base_s = base_s
        self.slope_s = slope_s

    def at(self, number: float) -> float:
        """Return the seconds."""
        return self.base_s + self.slope_s * number


class LineFit:
    """The line through the measurements: least squares of relative errors, so that no long prompt
    outweighs the rest.

    Earlier measurements fade. Outliers are cut, so that a single one does not turn the line, but a
    few of a lasting change do.
    """

    __slots__ = (
        "_at",
        "_error",
        "_errors",
        "_squares",
        "_sum",
        "_sum_x",
        "_sum_xy",
        "_sum_y",
        "count",
        "line",
    )

    def __init__(self) -> None:
        self.line: Line | None = None  # None: nothing was measured
        self.count = 0.0  # measurements, faded
        self._at = 0.0
        self._error = 0.0  # mean of log(measured / expected)
        self._errors = _USUAL  # mean square of that
        self._sum = self._sum_x = self._sum_y = self._squares = self._sum_xy = 0.0

    def add(self, number: float, seconds: float, prior: Line, now: float) -> None:
        """Add a measurement; ``prior``: the line of a usual engine."""
        before = self.among(prior, now)
        expected = max(before.at(number), _LEAST_S)
        if self.count >= _SURE:
            seconds = min(max(seconds, expected / _FAR), expected * _FAR)
            error = log(max(seconds, _LEAST_S) / expected)
            self._error += (1.0 - _KEPT) * (error - self._error)
            self._errors += (1.0 - _KEPT) * (error * error - self._errors)
        fading = _KEPT * self._fading(now)
        weight = 1.0 / ((_SMALL + number) * (_SMALL + number))
        self.count = self.count * fading + 1.0
        self._at = now
        self._sum = self._sum * fading + weight
        self._sum_x = self._sum_x * fading + weight * number
        self._sum_y = self._sum_y * fading + weight * seconds
        self._squares = self._squares * fading + weight * number * number
        self._sum_xy = self._sum_xy * fading + weight * number * seconds
        self.line = self._solved(prior)

    def among(self, prior: Line, now: float) -> Line:
        """Return the line mixed with the prior: the more, the older, fewer or noisier its
        measurements are.

        Otherwise noise would move conversations from engine to engine: the mean of n measurements
        with errors of size r is off by r / sqrt(n), which may be more than equal engines differ by.
        """
        own = self.line
        if own is None:
            return prior
        share = self.count * self._fading(now)
        # errors of one sign are a lasting change, not noise
        noise = max(0.0, self._errors - self._error * self._error)
        share = share / (share + noise / (_ALIKE * _ALIKE))
        return Line(
            share * own.base_s + (1.0 - share) * prior.base_s,
            share * own.slope_s + (1.0 - share) * prior.slope_s,
        )

    def _fading(self, now: float) -> float:
        fading: float = 0.5 ** (max(0.0, now - self._at) / _HALF_LIFE_S)
        return fading

    def _solved(self, prior: Line) -> Line:
        """Solve for the line.

        The prior is scaled to meet the mean of the measurements, and counts as _PRIOR measurements
        at zero and at twice the mean. A few measurements show how fast an engine is long before
        they separate base and slope.
        """
        stretched = self._sum_y / max(
            prior.base_s * self._sum + prior.slope_s * self._sum_x, _FLAT * self._sum
        )
        prior = Line(stretched * prior.base_s, stretched * prior.slope_s)
        weight = _PRIOR * self._sum / self.count
        far = 2.0 * self._sum_x / self._sum
        total = self._sum + 2.0 * weight
        sum_x = self._sum_x + weight * far
        sum_y = self._sum_y + weight * (prior.base_s + prior.at(far))
        squares = self._squares + weight * far * far
        sum_xy = self._sum_xy + weight * far * prior.at(far)
        spread = total * squares - sum_x * sum_x
        if spread <= 0.0:  # all numbers were zero
            return Line(sum_y / total, prior.slope_s)
        slope = (total * sum_xy - sum_x * sum_y) / spread
        if slope < _FLAT:
            return Line(sum_y / total, _FLAT)
        base = (sum_y - slope * sum_x) / total
        return Line(base, slope) if base >= 0.0 else Line(0.0, sum_xy / squares)


class TokenQueue:
    """Tokens that an engine processes in order."""

    __slots__ = ("_by_request", "_since", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # of all requests, without what is done of them
        self._by_request: dict[RequestId, int] = {}
        self._since = 0.0  # when a request left last, or the first one came

    def __len__(self) -> int:
        return len(self._by_request)

    def enter(self, request: RequestId, tokens: int, now: float) -> None:
        """Add a request, or replace its tokens."""
        self.leave(request, now)
        if not self._by_request:
            self._since = now
        self._by_request[request] = tokens
        self.tokens += tokens

    def leave(self, request: RequestId, now: float) -> None:
        """Remove a request, if it is there."""
        tokens = self._by_request.pop(request, None)
        if tokens is not None:
            self.tokens -= tokens
            self._since = now

    def remaining(self, token_s: float, now: float) -> float:
        """Return how many tokens remain at this pace: the present request is partly done."""
        if not self.tokens:
            return 0.0
        done = min((now - self._since) / max(token_s, _FLAT), self.tokens * _DONE_MOST)
        return self.tokens - max(0.0, done)


class _Leg:
    """One leg that was sent, with the tokens before it."""

    __slots__ = ("ahead", "computes", "sent_at", "tokens")

    def __init__(self, tokens: int, sent_at: float, ahead: float, *, computes: bool) -> None:
        self.tokens = tokens  # that the engine computes, or gets from another one
        self.sent_at = sent_at
        self.ahead = ahead  # tokens that were before it
        self.computes = computes


class Priors:
    """The lines of a usual engine: the medians of its role, or UNKNOWN."""

    __slots__ = ("prefill", "step", "transfer")

    def __init__(self, prefill: Line, transfer: Line, step: Line) -> None:
        self.prefill = prefill  # by tokens
        self.transfer = transfer  # by tokens
        self.step = step  # by running streams


# Before the first measurement all engines are equal, so only tokens and streams decide, and these
# numbers do not matter. They are those of a model of 8e9 parameters on one GPU.
UNKNOWN: Final = Priors(Line(0.01, 5e-5), Line(0.005, 1e-5), Line(0.01, 5e-5))


class EngineSpeed:
    """The measured speed of one engine, and its legs under way."""

    __slots__ = (
        "_legs",
        "_recent",
        "_recent_at",
        "computing",
        "entered",
        "loading",
        "prefill",
        "running",
        "step",
        "tokens_mean",
        "transfer",
    )

    def __init__(self) -> None:
        # seconds by the tokens that it computes, those of its queue included
        self.prefill = LineFit()
        self.transfer = LineFit()  # seconds by the tokens that it gets from a prefill engine
        self.step = LineFit()  # seconds from token to token by running streams
        self.computing = TokenQueue()
        self.loading = TokenQueue()
        self.entered: set[RequestId] = set()  # requests that it has, or has a slot for
        self.running: set[RequestId] = set()  # those of them that have their first token
        self.tokens_mean = 0.0  # that a leg has it compute
        self._legs: dict[RequestId, _Leg] = {}  # that were sent, and have not answered
        self._recent = self._recent_at = 0.0

    def recent(self, now: float) -> float:
        """Return the tokens of the legs sent lately, which fade: among equal engines fewer win."""
        faded: float = self._recent * 0.5 ** (max(0.0, now - self._recent_at) / _RECENT_S)
        return faded

    def busy(self, token_s: float, now: float) -> float:
        """Return the share of the recent time that it computed prompts, at this pace; at most 1."""
        return min(1.0, self.recent(now) * token_s * _PER_S)

    def reserve(self, request: RequestId) -> None:
        """Count a request whose prompt another engine computes first."""
        self.entered.add(request)

    def send(
        self, request: RequestId, tokens: int, priors: Priors, now: float, *, computes: bool
    ) -> None:
        """Note a leg that is sent, for which it computes, or loads, so many tokens."""
        self.entered.add(request)
        queue, other_queue = (
            (self.computing, self.loading) if computes else (self.loading, self.computing)
        )
        other_queue.leave(request, now)
        line = (
            self.prefill.among(priors.prefill, now)
            if computes
            else self.transfer.among(priors.transfer, now)
        )
        self._legs[request] = _Leg(
            tokens, now, queue.remaining(line.slope_s, now), computes=computes
        )
        queue.enter(request, tokens, now)
        self._recent = self.recent(now) + tokens
        self._recent_at = now
        if computes:
            self.tokens_mean += 0.1 * (tokens - self.tokens_mean)

    def answered(self, request: RequestId, priors: Priors, now: float) -> None:
        """Learn from the time of a leg, at its answer or its first token."""
        if request in self.entered:
            self.running.add(request)
        leg = self._legs.pop(request, None)
        if leg is None:
            return
        self.computing.leave(request, now)
        self.loading.leave(request, now)
        seconds = now - leg.sent_at
        tokens = leg.ahead + leg.tokens
        if leg.computes:
            self.prefill.add(tokens, seconds, priors.prefill, now)
        else:
            step = self.step.among(priors.step, now).at(len(self.running))
            self.transfer.add(tokens, max(seconds - step, _LEAST_S), priors.transfer, now)

    def leave(self, request: RequestId, now: float) -> None:
        """Remove a request that is over here, in whatever way."""
        self.entered.discard(request)
        self.running.discard(request)
        self._legs.pop(request, None)
        self.computing.leave(request, now)
        self.loading.leave(request, now)

    def stepped(self, gap_s: float, priors: Priors, now: float) -> None:
        """Learn from the mean gap between tokens of its streams."""
        self.step.add(len(self.running), gap_s, priors.step, now)


class _Stint:
    """The measurements of one engine in its present role (``Member.stint``)."""

    __slots__ = ("member", "number", "speed")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.number = member.stint
        self.speed = EngineSpeed()


class EngineSpeeds:
    """The measurements of all engines; a new role, or a new engine of the name, begins anew."""

    def __init__(self) -> None:
        self._stints: dict[InstanceId, _Stint] = {}

    def for_member(self, member: Member) -> EngineSpeed:
        """Return the speed of an engine; of a new one, without measurements."""
        name = member.instance.id
        stint = self._stints.get(name)
        if stint is None or stint.member is not member or stint.number != member.stint:
            stint = self._stints[name] = _Stint(member)
        return stint.speed

    def find(self, member: Member) -> EngineSpeed | None:
        """Return the speed of an engine, without adding one; None: no measurements."""
        stint = self._stints.get(member.instance.id)
        is_current = stint is not None and stint.member is member and stint.number == member.stint
        return stint.speed if stint is not None and is_current else None

    def keep(self, members: Sequence[Member]) -> None:
        """Forget all other engines, so that a changing fleet does not grow the memory."""
        names = {member.instance.id for member in members}
        for name in [name for name in self._stints if name not in names]:
            del self._stints[name]
