"""How fast one engine is, learned from its own legs, and what it still has to do for this router.

Tokens are estimates: those of a prompt that an engine has not cached. Times are seconds of a clock
that only rises.
"""

from collections.abc import Sequence
from math import log
from typing import Final

from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.model import InstanceId, RequestId

_KEPT: Final = 0.97  # of the weight of what was measured before, with each measurement
_HALF_LIFE_S: Final = 60.0  # an engine that gets nothing is believed to be like the others again
_RECENT_S: Final = 30.0  # half-life of what was sent lately
_PER_S: Final = 0.6931 / _RECENT_S  # of that, what was sent in a second
# engines of a role are taken to differ by about this part: what is noisier does not tell them apart
_ALIKE: Final = 0.4
_USUAL: Final = 0.02  # mean square of relative errors, before there are enough of them
# a measurement counts as at most so many times what was expected, and at least that part of it
_FAR: Final = 4.0
_SURE: Final = 3.0  # measurements from which on one is called far off
_SMALL: Final = 200.0  # tokens, or streams, that take about as long as a step without any
_PRIOR: Final = 0.2  # measurements that the prior stands for, at either end
_LEAST_S: Final = 1e-4  # shortest time that is told from none
_DONE_MOST: Final = 0.9  # of a queue that can have been worked off without an answer
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
    """The line through what was measured: least squares of errors for a token, so no long prompt
    outweighs the rest.

    Earlier measurements fade. One that is far off counts as less far, so that one outlier cannot
    turn the line, and a lasting change does within a few.
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
        self._error = 0.0  # mean of the logarithm of what was measured over what was expected
        self._errors = _USUAL  # mean square of that
        self._sum = self._sum_x = self._sum_y = self._squares = self._sum_xy = 0.0

    def add(self, number: float, seconds: float, prior: Line, now: float) -> None:
        """Take in a measurement; ``prior``: what is likely of such an engine."""
        before = self.among(prior, now)
        expected = max(before.at(number), _LEAST_S)
        if self.count >= _SURE:
            seconds = min(max(seconds, expected / _FAR), expected * _FAR)
            error = log(max(seconds, _LEAST_S) / expected)
            self._error += (1.0 - _KEPT) * (error - self._error)
            self._errors += (1.0 - _KEPT) * (error * error - self._errors)
        kept = _KEPT * self._fading(now)
        weight = 1.0 / ((_SMALL + number) * (_SMALL + number))
        self.count = self.count * kept + 1.0
        self._at = now
        self._sum = self._sum * kept + weight
        self._sum_x = self._sum_x * kept + weight * number
        self._sum_y = self._sum_y * kept + weight * seconds
        self._squares = self._squares * kept + weight * number * number
        self._sum_xy = self._sum_xy * kept + weight * number * seconds
        self.line = self._solved(prior)

    def among(self, prior: Line, now: float) -> Line:
        """Return the line as it is believed now: like the prior, if measurements are old, few or
        noisy.

        Else a conversation would follow chance from engine to engine: the mean of n measurements
        whose errors are of size r is off by r / sqrt(n), which says little if equal engines differ
        less than that.
        """
        own = self.line
        if own is None:
            return prior
        share = self.count * self._fading(now)
        # errors of one sign tell of a lasting change
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

        The prior, drawn out so far that it meets what was measured, counts as a part of a
        measurement at zero, and of one at twice the mean: what was measured tells how fast an
        engine is before it tells base and slope apart.
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
    """Tokens that an engine works off one after the other."""

    __slots__ = ("_by_request", "_since", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # of all requests, as they came
        self._by_request: dict[RequestId, int] = {}
        self._since = 0.0  # from when on nothing has left

    def __len__(self) -> int:
        return len(self._by_request)

    def enter(self, request: RequestId, tokens: int, now: float) -> None:
        """Add a request; one that is there is replaced."""
        self.leave(request, now)
        if not self._by_request:
            self._since = now
        self._by_request[request] = tokens
        self.tokens += tokens

    def leave(self, request: RequestId, now: float) -> None:
        """Take a request out, if it is there."""
        tokens = self._by_request.pop(request, None)
        if tokens is not None:
            self.tokens -= tokens
            self._since = now

    def left(self, token_s: float, now: float) -> float:
        """Return how many tokens are left at this pace: what is under way is partly done."""
        if not self.tokens:
            return 0.0
        done = min((now - self._since) / max(token_s, _FLAT), self.tokens * _DONE_MOST)
        return self.tokens - max(0.0, done)


class _Leg:
    """What one leg was expected to cost its engine."""

    __slots__ = ("ahead", "computes", "sent_at", "tokens")

    def __init__(self, tokens: int, sent_at: float, ahead: float, *, computes: bool) -> None:
        self.tokens = tokens  # that the engine computes, or gets from another one
        self.sent_at = sent_at
        self.ahead = ahead  # tokens that were before it
        self.computes = computes


class Priors:
    """What is likely of an engine of which nothing is known: most often what the others are
    like.
    """

    __slots__ = ("prefill", "step", "transfer")

    def __init__(self, prefill: Line, transfer: Line, step: Line) -> None:
        self.prefill = prefill  # by tokens
        self.transfer = transfer  # by tokens
        self.step = step  # by running streams


# Before anything is measured all engines are equal, so only tokens and streams decide. The numbers
# are those of a model of 8e9 parameters on one GPU, and do not matter then.
UNKNOWN: Final = Priors(Line(0.01, 5e-5), Line(0.005, 1e-5), Line(0.01, 5e-5))


class EngineSpeed:
    """What was measured of one engine, and its legs under way."""

    __slots__ = (
        *(
            "_legs",
            "_recent",
            "_recent_at",
            "computing",
            "entered",
            "loading",
            "prefill",
            "running",
            "step",
        ),
        *("tokens_mean", "transfer"),
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
        """Return the tokens of the legs that it was sent lately, which fade: of equals, the one
        with fewer is next.
        """
        faded: float = self._recent * 0.5 ** (max(0.0, now - self._recent_at) / _RECENT_S)
        return faded

    def busy(self, token_s: float, now: float) -> float:
        """Return the share of its time in which it has computed prompts lately, at this pace; 1 at
        most.
        """
        return min(1.0, self.recent(now) * token_s * _PER_S)

    def reserve(self, request: RequestId) -> None:
        """Count a request that it will get once its prompt is computed elsewhere."""
        self.entered.add(request)

    def send(
        self, request: RequestId, tokens: int, priors: Priors, now: float, *, computes: bool
    ) -> None:
        """A leg is sent, for which it computes so many tokens, or gets them from another engine."""
        self.entered.add(request)
        queue, other = (
            (self.computing, self.loading) if computes else (self.loading, self.computing)
        )
        other.leave(request, now)
        line = (
            self.prefill.among(priors.prefill, now)
            if computes
            else self.transfer.among(priors.transfer, now)
        )
        self._legs[request] = _Leg(tokens, now, queue.left(line.slope_s, now), computes=computes)
        queue.enter(request, tokens, now)
        self._recent = self.recent(now) + tokens
        self._recent_at = now
        if computes:
            self.tokens_mean += 0.1 * (tokens - self.tokens_mean)

    def answered(self, request: RequestId, priors: Priors, now: float) -> None:
        """A leg has its answer, or the first token of one: learn from the time that took."""
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
        """A request is over here, however."""
        self.entered.discard(request)
        self.running.discard(request)
        self._legs.pop(request, None)
        self.computing.leave(request, now)
        self.loading.leave(request, now)

    def stepped(self, gap_s: float, priors: Priors, now: float) -> None:
        """Its streams got their tokens so many seconds apart, on the mean of the last moment."""
        self.step.add(len(self.running), gap_s, priors.step, now)


class _Stint:
    """What was measured of one engine since it serves what it serves now."""

    __slots__ = ("member", "number", "speed")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.number = member.stint
        self.speed = EngineSpeed()


class EngineSpeeds:
    """What was measured of all engines.

    One that is removed, or turns to another role, begins anew.
    """

    def __init__(self) -> None:
        self._stints: dict[InstanceId, _Stint] = {}

    def of(self, member: Member) -> EngineSpeed:
        """Return what was measured of an engine; of a new one it is nothing."""
        name = member.instance.id
        stint = self._stints.get(name)
        if stint is None or stint.member is not member or stint.number != member.stint:
            stint = self._stints[name] = _Stint(member)
        return stint.speed

    def known(self, member: Member) -> EngineSpeed | None:
        """Return the same without a trace; None: nothing was measured."""
        stint = self._stints.get(member.instance.id)
        is_current = stint is not None and stint.member is member and stint.number == member.stint
        return stint.speed if stint is not None and is_current else None

    def keep(self, members: Sequence[Member]) -> None:
        """Forget engines that are not among these: a fleet that changes must not grow what is
        remembered.
        """
        names = {member.instance.id for member in members}
        for name in [name for name in self._stints if name not in names]:
            del self._stints[name]
