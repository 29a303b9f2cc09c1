"""What was seen of the pairs of engines that were used lately: a prefill engine, and the decode engine it handed to.

With thousands of engines most pairs are never used, and those that were not for longest are forgotten first.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from xpyd_proxy.core.fleet.pair_health import Pair
from xpyd_proxy.core.model import InstanceId

_NEWEST: Final = 0.125  # weight of the latest time in a mean


class PairFacts:
    """One pair, since it was first used or last forgotten. Times are seconds."""

    __slots__ = ("failed", "good_at", "handovers", "last_at", "ttft_s")

    def __init__(self) -> None:
        self.handovers = 0  # requests that both engines have served
        self.failed: dict[str, int] | None = None  # decode legs, by how they failed (Failure)
        self.ttft_s: float | None = None  # from handing over to the first event of a stream: a moving mean
        self.last_at = 0.0  # of the router's clock: the end of a request, or a failure
        self.good_at = 0.0  # the same of the requests that were served


class PairMatrix:
    """The facts of at most ``most`` pairs, of this process; 0: none are kept."""

    __slots__ = ("_facts", "_most", "counts")

    def __init__(self, most: int) -> None:
        self._most = most
        self._facts: dict[Pair, PairFacts] = {}  # the pair that was used last is the last
        self.counts = Counter[tuple[str, ...]]({(): 0})  # pairs that were forgotten to make room

    def __len__(self) -> int:
        return len(self._facts)

    @property
    def dropped(self) -> int:
        """How many pairs were forgotten to make room."""
        return self.counts[()]

    def used(self, pair: Pair, ttft_s: float | None, now: float) -> None:
        """A pair has served a request; ``ttft_s``: from handing over to the first event, None: it is no stream."""
        facts = self._touch(pair, now)
        if facts is None:
            return
        facts.handovers += 1
        facts.good_at = now
        if ttft_s is not None:
            before = facts.ttft_s
            facts.ttft_s = ttft_s if before is None else before + _NEWEST * (ttft_s - before)

    def failed(self, pair: Pair, how: str, now: float) -> None:
        """A decode leg of a pair has failed."""
        facts = self._touch(pair, now)
        if facts is None:
            return
        if facts.failed is None:
            facts.failed = {}
        facts.failed[how] = facts.failed.get(how, 0) + 1

    def get(self, pair: Pair) -> PairFacts | None:
        """Return what was seen of a pair; None: it was not used, or not lately."""
        return self._facts.get(pair)

    def latest(self) -> Sequence[tuple[Pair, PairFacts]]:
        """List the pairs, the one that was used last first."""
        return tuple(reversed(self._facts.items()))

    def works_elsewhere(self, pair: Pair, since: float) -> bool:
        """Tell whether both engines of a pair have served a request with others since then."""
        prefill, decode = pair
        found = [each for each, facts in self._facts.items() if facts.good_at >= since and each != pair]
        return prefill in {each[0] for each in found} and decode in {each[1] for each in found}

    def keep(self, engines: frozenset[InstanceId]) -> None:
        """Forget the pairs of engines that are no longer known."""
        for gone in [pair for pair in self._facts if not engines.issuperset(pair)]:
            del self._facts[gone]

    def _touch(self, pair: Pair, now: float) -> PairFacts | None:
        facts = self._facts.pop(pair, None)
        if facts is None:
            if not self._most:
                return None
            if len(self._facts) >= self._most:
                del self._facts[next(iter(self._facts))]
                self.counts[()] += 1
            facts = PairFacts()
        self._facts[pair] = facts
        facts.last_at = now
        return facts
