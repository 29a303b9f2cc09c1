"""What was seen of the pairs of engines that were used lately: a prefill engine, and the decode
engine it handed to.

With thousands of engines most pairs are never used, and those that were not for longest are
forgotten first.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.fleet.pair_history import Pair
from pdrelay_proxy.core.model import InstanceId

PAIRS_KEPT: Final = 1024  # those that were used last
_NEWEST: Final = 0.125  # weight of the latest time in a mean


class PairFacts:
    """One pair, since it was first used or last forgotten. Times are seconds."""

    __slots__ = ("bytes_per_s", "failed", "good_since", "handovers", "last_at", "ttft_s")

    def __init__(self) -> None:
        self.handovers = 0  # requests that both engines have served
        self.failed: dict[str, int] | None = None  # decode legs, by how they failed (Failure)
        # from handing over to the first event of a stream: a moving mean
        self.ttft_s: float | None = None
        # of its latest transfers of KV, as one of the engines shows
        self.bytes_per_s: float | None = None
        self.last_at = 0.0  # of the router's clock: the end of a request, or a failure
        self.good_since = 0.0  # when the request began that began last of those it served


class PairMatrix:
    """The facts of at most ``most`` pairs, of this process; 0: none are kept, and ``used`` must not
    be called.
    """

    __slots__ = ("_facts", "counts", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._facts: dict[Pair, PairFacts] = {}
        self.counts = Counter[tuple[str, ...]]({(): 0})  # pairs that were forgotten to make room

    def __len__(self) -> int:
        return len(self._facts)

    @property
    def dropped(self) -> int:
        """How many pairs were forgotten to make room."""
        return self.counts[()]

    def used(self, pair: Pair, ttft_s: float | None, now: float, began_at: float) -> None:
        """A pair has served a request; ``ttft_s``: from handing over to the first event, None: it
        is no stream.
        """
        facts = self._facts.get(pair)
        if facts is None:
            facts = self._new(pair)
        facts.handovers += 1
        facts.last_at = now
        facts.good_since = max(facts.good_since, began_at)
        if ttft_s is not None:
            before = facts.ttft_s
            facts.ttft_s = ttft_s if before is None else before + _NEWEST * (ttft_s - before)

    def failed(self, pair: Pair, how: str, now: float) -> None:
        """A decode leg of a pair has failed."""
        if not self.most:
            return
        facts = self._facts.get(pair) or self._new(pair)
        if facts.failed is None:
            facts.failed = {}
        facts.failed[how] = facts.failed.get(how, 0) + 1
        facts.last_at = now

    def moved(self, pair: Pair, bytes_per_s: float) -> None:
        """KV has moved between the engines of a pair, at this rate; it counts only if the pair was
        used lately.
        """
        if (facts := self._facts.get(pair)) is not None:
            facts.bytes_per_s = bytes_per_s

    def used_since(self, at: float) -> frozenset[InstanceId]:
        """Return the prefill engines of the pairs that were used since then."""
        return frozenset(
            [prefill for (prefill, _), facts in self._facts.items() if facts.last_at >= at]
        )

    def get(self, pair: Pair) -> PairFacts | None:
        """Return what was seen of a pair; None: it was not used, or not lately."""
        return self._facts.get(pair)

    def latest(self) -> Sequence[tuple[Pair, PairFacts]]:
        """List the pairs, the one that was used last first."""
        return sorted(self._facts.items(), key=lambda item: -item[1].last_at)

    def works_elsewhere(self, pair: Pair, since: float) -> bool:
        """Tell whether both engines of a pair have served a request with others that began since
        then.
        """
        prefill, decode = pair
        good = [
            other
            for other, facts in self._facts.items()
            if facts.good_since >= since and other != pair
        ]
        return prefill in {other[0] for other in good} and decode in {other[1] for other in good}

    def keep(self, engines: frozenset[InstanceId]) -> None:
        """Forget the pairs of engines that are no longer known."""
        for gone in [pair for pair in self._facts if not engines.issuperset(pair)]:
            del self._facts[gone]

    def _new(self, pair: Pair) -> PairFacts:
        """Begin to remember a pair.

        If there are too many, an eighth goes: one by one would cost each request.
        """
        if len(self._facts) >= self.most:
            oldest = heapq.nsmallest(
                max(1, self.most // 8), self._facts, key=lambda old: self._facts[old].last_at
            )
            for old in oldest:
                del self._facts[old]
            self.counts[()] += len(oldest)
        facts = self._facts[pair] = PairFacts()
        return facts
