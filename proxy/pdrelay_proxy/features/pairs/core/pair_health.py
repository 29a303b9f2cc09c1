"""Pairs of a prefill and a decode engine that cannot meet, though each is well for all others.

A firewall between two racks, or another secret: each request of such a pair is computed twice, or
fails. After some failures in a row that are the pair's, it rests: other pairs get its requests,
until one request shows that it works.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import auto
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.fleet.pair_history import Pair, PairTrouble
from pdrelay_proxy.core.fleet.peer_metrics import LASTING, PairFailure
from pdrelay_proxy.core.model import InstanceId

MOST: Final = 4096  # pairs that are remembered for their failures
# Decode engines that avoid the same prefill engines are of one group
# (routing/compatible_groups.py), whose lists have all prefill engines: so many groups may come of
# it.
MOST_SETS: Final = 64
# for which a trial may stay without a sign; a decode engine's counters are read every 15 s
TRIAL_S: Final = 90.0
# in a row until a pair rests: fewer befall pairs that are well, as when an engine restarts
LEAST_FAILURES: Final = 3
# of a pair at first; a trial costs a client the time in which its decode engine gives up
REST_S: Final = 30.0
# of a pair, however often its trials fail; of one that got wrong KV at once
_MAX_REST_S: Final = 600.0
_LATER_S: Final = 5.0  # until a trial is thought of again whose engines cannot take it


# Reasons that may be the pair's own; the others concern one engine, with any partner.
OF_THE_PAIR: Final = LASTING | {
    PairFailure.TRANSFER,
    PairFailure.TIMEOUT,
    PairFailure.ENGINE_ERROR,
    PairFailure.WRONG_KV,
}
_WRONG_KV: Final = PairFailure.WRONG_KV


class PairState(FastStrEnum):
    """What becomes of a pair that has failed."""

    FAILING = auto()  # too seldom to rest
    RESTING = auto()  # it gets no requests
    TRYING = auto()  # it has got one


class PairEvent(FastStrEnum):
    """What happens to such a pair; one that works is forgotten."""

    FAILED = auto()  # and may be tried on
    GIVEN_UP = auto()  # it has failed so often in a row that it rests
    TRIED = auto()
    SILENT = auto()  # its trial has shown nothing


TRANSITIONS: Final[Mapping[PairState, Mapping[PairEvent, PairState]]] = {
    PairState.FAILING: {PairEvent.FAILED: PairState.FAILING, PairEvent.GIVEN_UP: PairState.RESTING},
    # What was under way as it began to rest may still fail, and so may the trial of another router.
    PairState.RESTING: {PairEvent.FAILED: PairState.RESTING, PairEvent.TRIED: PairState.TRYING},
    PairState.TRYING: {PairEvent.GIVEN_UP: PairState.RESTING, PairEvent.SILENT: PairState.RESTING},
}


class FailingPair:
    """A pair that has failed since it last worked. Times are seconds of the registry's clock."""

    __slots__ = ("due", "in_a_row", "reason", "rest_s", "since", "state")

    def __init__(self, reason: PairFailure, since: float) -> None:
        self.state = PairState.FAILING
        self.reason = reason  # of its latest failure
        self.since = since  # when it came into its state
        self.in_a_row = 0
        self.rest_s = 0.0  # how long it rests this time
        self.due = math.inf  # when it is to be tried, or its trial is over

    def on(self, event: PairEvent, now: float) -> None:
        """Go to the next state; raises KeyError: that cannot happen in this one."""
        state = TRANSITIONS[self.state][event]
        if state is not self.state:
            self.state = state
            self.since = now


class PairHealth:
    """The pairs that fail.

    While there are none, a request costs a look at ``has_any``, when it is over.

    With several routers each has its own, and all read the same counters of decode engines.
    """

    def __init__(
        self,
        troubles: dict[Pair, PairTrouble] | None = None,
        *,
        most: int = MOST,
        max_rest_s: float = _MAX_REST_S,
    ) -> None:
        """``troubles``: where those are kept that decode engines show now."""
        self._most = most
        self._rest_most_s = max_rest_s
        self.next_at = math.inf  # when a pair is to be tried, or a trial is over
        self.failures = Counter[tuple[str, ...]]()  # by PairFailure
        self.has_any = False  # pairs that fail
        self.unkept = 0  # pairs that should rest, and did not because too many do
        self._pairs: dict[Pair, FailingPair] = {}
        self.troubles: Final = {} if troubles is None else troubles
        # prefill engines, by the decode engine
        self._avoided: dict[InstanceId, set[InstanceId]] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def get(self, pair: Pair) -> FailingPair | None:
        """Return what is known of a pair that fails; None: it does not."""
        return self._pairs.get(pair)

    def pairs(self) -> Sequence[tuple[Pair, FailingPair]]:
        """List the pairs that fail, those first that have failed first."""
        return tuple(self._pairs.items())

    def avoided(self, decode: InstanceId) -> frozenset[InstanceId]:
        """Return the prefill engines with which a decode engine rests."""
        return frozenset(self._avoided.get(decode, ()))

    @property
    def resting(self) -> int:
        """How many pairs get no requests, or one."""
        return sum([len(prefills) for prefills in self._avoided.values()])

    def failed(
        self, pair: Pair, reason: PairFailure, count: int, *, now: float
    ) -> FailingPair | None:
        """Take in failures without a success between; return the pair if it begins to rest by them.

        One wrong block is enough, and the pair rests for as long as any may: most loads show
        nothing of their content.
        """
        if reason not in OF_THE_PAIR:
            return None
        failing = self._pairs.get(pair)
        if failing is None:
            if len(self._pairs) >= self._most and not self._make_room():
                self.unkept += 1
                return None
            failing = self._pairs[pair] = FailingPair(reason, now)
            self.has_any = True
        is_wrong = reason is _WRONG_KV
        if failing.reason is not _WRONG_KV:
            failing.reason = reason
        failing.in_a_row += count
        if failing.state is PairState.RESTING or (
            failing.in_a_row < LEAST_FAILURES and not is_wrong
        ):
            failing.on(PairEvent.FAILED, now)
            return None
        if failing.state is PairState.FAILING and not self._may_rest(pair):
            self.unkept += 1
            failing.on(PairEvent.FAILED, now)
            return None
        is_new = failing.state is PairState.FAILING
        failing.rest_s = min(self._rest_most_s, 2 * failing.rest_s) if failing.rest_s else REST_S
        if is_wrong:
            failing.rest_s = self._rest_most_s
        failing.on(PairEvent.GIVEN_UP, now)
        self._wait(failing, now + failing.rest_s)
        self._avoided.setdefault(pair[1], set()).add(pair[0])
        return failing if is_new else None

    def shown(self, decode: InstanceId, troubles: Mapping[Pair, PairTrouble]) -> list[Pair]:
        """Take in all troubles that a decode engine shows; return the pairs of which it did not
        show that before.
        """
        news = [pair for pair, trouble in troubles.items() if self.troubles.get(pair) != trouble]
        for gone in [pair for pair in self.troubles if pair[1] == decode and pair not in troubles]:
            del self.troubles[gone]
        room = self._most - len(self.troubles)
        for pair, trouble in troubles.items():
            if pair in self.troubles or room > 0:
                room -= pair not in self.troubles
                self.troubles[pair] = trouble
        return news

    def worked(self, pair: Pair, *, only: PairFailure | None = None) -> FailingPair | None:
        """Forget the failures of a pair; return it if it was resting.

        ``only``: unless it fails for another reason.
        """
        failing = self._pairs.get(pair)
        if failing is None or (only is not None and failing.reason is not only):
            return None
        if failing.reason is _WRONG_KV and failing.state is PairState.RESTING:
            return None  # a load that was under way as the pair began to rest
        self._drop(pair)
        return None if failing.state is PairState.FAILING else failing

    def forget(self, engine: InstanceId) -> Sequence[Pair]:
        """Forget all pairs of an engine, which is gone or another one by now; return them."""
        for pair in [pair for pair in self.troubles if engine in pair]:
            del self.troubles[pair]
        gone = [pair for pair in self._pairs if engine in pair]
        for pair in gone:
            self._drop(pair)
        return gone

    def keep(self, engines: frozenset[InstanceId]) -> None:
        """Forget the pairs of engines that are no longer known."""
        for pair in [pair for pair in self.troubles if not engines.issuperset(pair)]:
            del self.troubles[pair]
        for pair in [pair for pair in self._pairs if not engines.issuperset(pair)]:
            self._drop(pair)

    def due(self, *, now: float) -> Sequence[Pair]:
        """List the pairs that are to be tried now.

        One whose trial has shown nothing is tried again.
        """
        return [pair for pair, failing in self._pairs.items() if failing.due <= now]

    def has_rested(self, pair: Pair, *, now: float) -> bool:
        """Tell whether a pair rests that has rested for long enough, also if its trial was
        postponed.
        """
        failing = self._pairs.get(pair)
        return (
            failing is not None
            and failing.state is PairState.RESTING
            and now >= failing.since + failing.rest_s
        )

    def tried(self, pair: Pair, *, now: float) -> None:
        """A pair that has rested for long enough has got a request."""
        failing = self._pairs[pair]
        _end_silent_trial(failing, now)
        failing.on(PairEvent.TRIED, now)
        self._wait(failing, now + TRIAL_S)

    def postpone(self, pairs: Iterable[Pair], *, now: float) -> None:
        """Pairs that are due cannot be tried yet: one of their engines takes no requests, or serves
        another model.
        """
        for pair in pairs:
            failing = self._pairs[pair]
            _end_silent_trial(failing, now)
            failing.due = now + _LATER_S
        self._look_again()

    def _may_rest(self, pair: Pair) -> bool:
        """Tell whether the sets of avoided engines stay few if this pair rests."""
        sets = {decode: frozenset(prefills) for decode, prefills in self._avoided.items()}
        sets[pair[1]] = sets.get(pair[1], frozenset[InstanceId]()) | {pair[0]}
        return len(set(sets.values())) <= MOST_SETS

    def _make_room(self) -> bool:
        """Forget the pair that has failed first of those that do not rest; False: all do."""
        for pair, failing in self._pairs.items():
            if failing.state is PairState.FAILING:
                self._drop(pair)
                return True
        return False

    def _drop(self, pair: Pair) -> None:
        del self._pairs[pair]
        self.has_any = len(self._pairs) > 0
        avoided = self._avoided.get(pair[1])
        if avoided is not None:
            avoided.discard(pair[0])
            if not avoided:
                del self._avoided[pair[1]]
        self._look_again()

    def _wait(self, pair: FailingPair, until: float) -> None:
        pair.due = until
        self._look_again()

    def _look_again(self) -> None:
        self.next_at = min([failing.due for failing in self._pairs.values()], default=math.inf)


def _end_silent_trial(pair: FailingPair, now: float) -> None:
    """Have a pair rest whose trial has shown nothing."""
    if pair.state is PairState.TRYING and pair.due <= now:
        pair.on(PairEvent.SILENT, now)
