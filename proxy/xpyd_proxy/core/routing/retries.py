"""How often a request is sent again, where (core/protocol/fault_table.py says what), and how many the engines can bear.

Nothing has been shown to the client yet. What counts is whether the KV parameters are still good: a decode engine that
has answered with an error may have told the prefill engine to free the blocks, and the same parameters would then lead
to another request's KV cache. So only a decode engine that got nothing of the request may be replaced alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from xpyd_proxy.core.model import Instance, InstanceId
from xpyd_proxy.core.protocol.fault_table import (
    VERDICTS,
    Held,
    RetryRule,
    RetryScope,
    RetryTarget,
    failure_of,
    retry_rule,
)
from xpyd_proxy.errors import EngineError, Refused

MOST_RETRIES: Final = 20.0  # so many may come at once after a calm


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
        return retry_rule(self.instance.role, self.failure)


class RetryAttempts:
    """How often one request may still be sent again, and which engines it should avoid."""

    __slots__ = ("accused", "avoided", "left")

    def __init__(self, left: int, avoided: set[InstanceId] | None = None) -> None:
        self.left = left
        self.accused: list[Instance] = []  # they failed: it is their fault, or that of the request
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
        if VERDICTS[failed.failure].held is Held.IF_SERVED_ELSEWHERE:
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
