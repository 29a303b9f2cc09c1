"""Which failures of a leg are worth another try, where, and how many retries the engines can bear.

Nothing has been shown to the client yet. What counts is whether the KV parameters are still good: a decode engine that
has answered with an error may have told the prefill engine to free the blocks, and the same parameters would then lead
to another request's KV cache. So only a decode engine that got nothing of the request may be replaced alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import auto
from typing import Final

from xpyd_proxy.core.fast_enum import FastStrEnum
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.core.protocol.engine_errors import Failure, failure_of
from xpyd_proxy.errors import EngineError, Refused

MOST_RETRIES: Final = 20.0  # so many may come at once after a calm


class RetryScope(FastStrEnum):
    """What is sent again."""

    NOTHING = auto()
    DECODE = auto()  # the same decode leg to another engine; the prefill leg goes on
    PAIR = auto()  # both legs, under a new id


class RetryTarget(FastStrEnum):
    """Which engine may take the place of the one that failed."""

    ANY = auto()
    OTHER = auto()  # another one; if there is none, the same
    ELSEWHERE = auto()  # another one; if there is none, nobody


@dataclass(frozen=True, slots=True)
class RetryRule:
    """What follows from a failure."""

    again: RetryScope
    where: RetryTarget = RetryTarget.OTHER


RULES: Final[Mapping[tuple[Role, Failure], RetryRule]] = {
    (Role.PREFILL, Failure.UNREACHABLE): RetryRule(RetryScope.PAIR),
    (Role.PREFILL, Failure.BAD_RESPONSE): RetryRule(RetryScope.PAIR),
    (Role.PREFILL, Failure.HTTP_5XX): RetryRule(RetryScope.PAIR),
    (Role.PREFILL, Failure.TIMEOUT): RetryRule(RetryScope.PAIR, RetryTarget.ELSEWHERE),
    (Role.PREFILL, Failure.ENGINE_RESTARTED): RetryRule(RetryScope.PAIR, RetryTarget.ANY),
    (Role.PREFILL, Failure.BUSY): RetryRule(RetryScope.PAIR, RetryTarget.ELSEWHERE),
    (Role.PREFILL, Failure.REFUSED): RetryRule(RetryScope.NOTHING),
    (Role.DECODE, Failure.UNREACHABLE): RetryRule(RetryScope.DECODE),
    (Role.DECODE, Failure.BAD_RESPONSE): RetryRule(RetryScope.PAIR),
    (Role.DECODE, Failure.HTTP_5XX): RetryRule(RetryScope.PAIR),
    (Role.DECODE, Failure.TIMEOUT): RetryRule(RetryScope.PAIR, RetryTarget.ELSEWHERE),
    (Role.DECODE, Failure.BUSY): RetryRule(RetryScope.PAIR, RetryTarget.ELSEWHERE),
    (Role.DECODE, Failure.REFUSED): RetryRule(RetryScope.NOTHING),
}


class LegFailed(Exception):
    """One leg of a request failed; ``error`` is what the client is told if it was the last try."""

    def __init__(self, instance: Instance, error: EngineError | Refused) -> None:
        super().__init__(f"{instance.id}: {error}")
        self.instance = instance
        self.error = error
        self.failure = failure_of(error)

    @property
    def rule(self) -> RetryRule:
        """What follows from it."""
        return RULES[self.instance.role, self.failure]


class RetryAttempts:
    """How often one request may still be sent again, and which engines it should avoid."""

    __slots__ = ("accused", "avoided", "left")

    def __init__(self, left: int, avoided: set[InstanceId] | None = None) -> None:
        self.left = left
        self.accused: list[Instance] = []  # answered with 5xx: its fault, or that of the request
        self.avoided: set[InstanceId] = set() if avoided is None else avoided

    def among(self, known: Sequence[Instance]) -> Sequence[Instance]:
        """Return the engines that have not failed this request; all of them if each has."""
        return (self._unspoiled(known) or known) if self.avoided else known

    def first(self, known: Sequence[Instance]) -> Sequence[Instance]:
        """Return all engines, those first that have not failed this request."""
        return sorted(known, key=lambda instance: instance.id in self.avoided)

    def take(self, failed: LegFailed, known: Sequence[Instance], *, needs_other: bool = False) -> bool:
        """Tell whether there is another try, with so many engines of that role known, and count it.

        ``needs_other``: only another engine can take it, whatever the rule.
        """
        rule = failed.rule
        if rule.where is not RetryTarget.ANY:
            self.avoided.add(failed.instance.id)
        if failed.failure is Failure.HTTP_5XX:
            self.accused.append(failed.instance)
        lost = (needs_other or rule.where is RetryTarget.ELSEWHERE) and not self._unspoiled(known)
        if rule.again is RetryScope.NOTHING or lost or self.left <= 0:
            return False
        self.left -= 1
        return True

    def guilty(self, witness: Instance) -> Sequence[Instance]:
        """Return the engines of its role that failed where ``witness`` answers well: the request was good."""
        if not self.accused:
            return ()
        guilty = [one for one in self.accused if one.role is witness.role and one.id != witness.id]
        self.accused = [one for one in self.accused if one.role is not witness.role]
        return guilty

    def _unspoiled(self, known: Sequence[Instance]) -> Sequence[Instance]:
        return [instance for instance in known if instance.id not in self.avoided]


@dataclass(slots=True)
class RetryBudget:
    """A bucket of tokens: requests fill it, time fills it a little, every retry takes one out.

    When all engines fail, retries multiply the load by at most 1 + ``share``, and not by the retries of each request.
    """

    share: float = 0.2  # retries for each request
    floor: float = 1.0  # retries a second that are granted however few requests there are
    most: float = MOST_RETRIES  # tokens it holds
    _tokens: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._tokens = self.most

    def came(self, now: float) -> None:
        """A request has come."""
        if self._tokens >= self.most:
            self._at = now
            return
        self._trickle(now)
        self._tokens = min(self.most, self._tokens + self.share)

    def grants(self, *, now: float) -> bool:
        """Tell whether there may be one more retry, and count it."""
        self._trickle(now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _trickle(self, now: float) -> None:
        passed, self._at = max(now - self._at, 0.0), now
        self._tokens = min(self.most, self._tokens + passed * self.floor)
