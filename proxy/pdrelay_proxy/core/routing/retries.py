"""How often a request is sent again, where (core/protocol/fault_table.py says what), and how many
the engines can bear.

Nothing has been shown to the client yet. What counts is whether the KV parameters are still good: a
decode engine that has answered with an error may have told the prefill engine to free the blocks,
and the same parameters would then lead to another request's KV cache. So only a decode engine that
got nothing of the request may be replaced alone.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.core.protocol.fault_table import (
    VERDICTS,
    Failure,
    Held,
    RetryRule,
    RetryScope,
    RetryTarget,
    failure_of,
    retry_rule,
)
from pdrelay_proxy.errors import ConnectionStale, EngineError, Refused

_NOBODY: Final = frozenset[InstanceId]()
_FREE: Final = 1  # for one request: an engine that closes each connection is not asked for ever
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


@dataclass(frozen=True, slots=True)
class BrokenAnswer:
    """An engine's part of an answer that it has not brought to its end, and that was not sent again
    from the start.
    """

    instance: Instance
    failure: Failure
    # it broke off behind its beginning: the engine has not said itself that it failed
    is_break: bool
    is_stream: bool  # its first event has come, and was counted as a good answer


def held_to_account(
    broken: Sequence[BrokenAnswer], served_by: InstanceId | None
) -> Sequence[BrokenAnswer]:
    """Return what is held against its engine of a request that is over; ``served_by``: the engine
    that has ended it.

    Where another engine has served the rest, the request was good. Where none has, the last engine
    is held to account if its answer broke off behind its beginning: it had taken the request, and
    made tokens.
    """
    if served_by is None:
        return [answer for answer in broken[-1:] if answer.is_break]
    return [answer for answer in broken if answer.is_break or answer.instance.id != served_by]


class RetryAttempts:
    """How often one request may still be sent again, and which engines it should avoid."""

    __slots__ = (
        "_is_sent_once",
        "accused",
        "avoided",
        "free",
        "is_alone",
        "is_charged",
        "is_suspect",
        "left",
        "prefills_failed",
    )

    def __init__(self, left: int, avoided: Set[InstanceId] = _NOBODY) -> None:
        self.left = left
        self._is_sent_once = left == 0  # an operator wants nothing to be computed twice
        self.free = _FREE  # retries that are not counted
        self.is_charged = False  # the latest one takes from what the engines can bear
        self.is_alone = False  # from now on a decode engine serves the request alone
        self.is_suspect = False  # it has failed in a way that may be its own fault
        self.prefills_failed = 0
        # They failed: it is their fault, or that of the request.
        self.accused: Sequence[tuple[Instance, Failure]] = ()
        self.avoided = avoided

    def among(self, known: Sequence[Instance]) -> Sequence[Instance]:
        """Return the engines that have not failed this request; all of them if each has."""
        return (self._unspoiled(known) or known) if self.avoided else known

    def first(self, known: Sequence[Instance]) -> Sequence[Instance]:
        """Return all engines, those first that have not failed this request."""
        return sorted(known, key=lambda instance: instance.id in self.avoided)

    def take(
        self,
        failed: LegFailed,
        known: Sequence[Instance],
        *,
        needs_other: bool = False,
        may_be_alone: bool = False,
    ) -> bool:
        """Tell whether there is another try, with so many engines of that role known, and count it.

        ``needs_other``: only another engine can take it, whatever the rule; ``may_be_alone``: a
        decode engine may serve the request alone where prefill engines fail.
        """
        rule = failed.rule
        if rule.where is not RetryTarget.ANY:
            self.avoided = self.avoided | {failed.instance.id}
        if VERDICTS[failed.failure].held is Held.IF_SERVED_ELSEWHERE:
            self.accused = (*self.accused, (failed.instance, failed.failure))
            self.is_suspect = True
        self.is_charged = True
        if rule.is_free and self.free > 0 and not needs_other and self._may_be_free(failed.error):
            self.free -= 1
            self.is_charged = False
            return True
        self.prefills_failed += failed.instance.role is Role.PREFILL
        if rule.again is RetryScope.NOTHING or self.left <= 0:
            return False
        others = self._unspoiled(known)
        if may_be_alone and rule.may_be_alone and self._is_last(others):
            self.is_alone = True
            self.is_charged = False  # no decode engine has had any of it
        elif (needs_other or rule.where is RetryTarget.ELSEWHERE) and not others:
            return False
        self.left -= 1
        return True

    def _may_be_free(self, error: EngineError | Refused) -> bool:
        """Tell whether a request may be sent again that its engine may have read: it cannot be
        known (RFC 9110 9.2.2).

        Without retries only what cannot have been computed is sent again.
        """
        return not (self._is_sent_once and isinstance(error, ConnectionStale) and error.was_sent)

    def _is_last(self, others: Sequence[Instance]) -> bool:
        """Tell whether no prefill engine shall have another try: none is left, or the last retry
        shall not be lost.
        """
        return not others or (self.left == 1 and self.prefills_failed > 1)

    def guilty(self, witness: Instance) -> Sequence[tuple[Instance, Failure]]:
        """Return the engines of its role that failed where ``witness`` answers well, and how: the
        request was good.

        One that serves it alone speaks for both roles.
        """
        if not self.accused:
            return ()
        judged = [
            accused for accused in self.accused if accused[0].role is witness.role or self.is_alone
        ]
        self.accused = [accused for accused in self.accused if accused not in judged]
        return [accused for accused in judged if accused[0].id != witness.id]

    def _unspoiled(self, known: Sequence[Instance]) -> Sequence[Instance]:
        return [instance for instance in known if instance.id not in self.avoided]


@dataclass(slots=True)
class RetryBudget:
    """A bucket of tokens: requests fill it, time fills it a little, every retry takes one out.

    When all engines fail, retries multiply the load by at most 1 + ``share``, and not by the
    retries of each request.
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
        passed = max(now - self._at, 0.0)
        self._at = now
        self._tokens = min(self.most, self._tokens + passed * self.floor)
