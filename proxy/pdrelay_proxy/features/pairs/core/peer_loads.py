"""What decode engines show of their loads by prefill engine (``vllm:pdrelay_peer_loads_total``),
from look to look.

Our connector shows them from the first failure of a prefill engine's loads on. No answer tells: a
decode engine that did not get the KV computes the prompt (``kv_load_failure_policy: recompute``),
and the text is right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.core.fleet.peer_metrics import FAILURES_BY_NAME, PairFailure, Totals
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.pairs.core.pair_health import OF_THE_PAIR

_LOADED: Final = "loaded"


@dataclass(frozen=True, slots=True)
class PeerNews:
    """What became of the loads from one prefill engine since the look before."""

    peer: str  # its engine id, with ``_dp`` and a number of a data-parallel rank
    loaded: int
    failed: Mapping[PairFailure, int]

    @property
    def worst(self) -> PairFailure | None:
        """The pair's own reason that most of the failures have, or wrong KV if any has; None: there
        is none.
        """
        if self.has_wrong_kv:
            return PairFailure.WRONG_KV
        own = {reason: count for reason, count in self.failed.items() if reason in OF_THE_PAIR}
        return max(own, key=lambda reason: own[reason]) if own else None

    @property
    def has_wrong_kv(self) -> bool:
        """Whether blocks have arrived that the prefill engine did not have."""
        return PairFailure.WRONG_KV in self.failed

    @property
    def count(self) -> int:
        """The failures that are the pair's own."""
        return sum([count for reason, count in self.failed.items() if reason in OF_THE_PAIR])


class PeerLoads:
    """Compares the looks at each decode engine."""

    def __init__(self) -> None:
        self._last: dict[InstanceId, Totals] = {}

    def news_of(self, decode: InstanceId, totals: Totals) -> tuple[list[PeerNews], bool]:
        """Return what is new since the last look, of each prefill engine, and whether the engine
        was restarted.

        The first look tells nothing: it may have failed long ago.
        """
        last = self._last.get(decode)
        self._last[decode] = totals
        if last is None:
            return [], False
        if any(totals.get(key, 0) < count for key, count in last.items()):
            return [], True
        news = dict[str, dict[str, int]]()
        for (peer, outcome), count in totals.items():
            more = count - last.get((peer, outcome), 0)
            if more:
                news.setdefault(peer, {})[outcome] = more
        return [_news(peer, outcomes) for peer, outcomes in news.items()], False

    def keep(self, decodes: frozenset[InstanceId]) -> None:
        """Forget the engines that are no longer known."""
        for gone in self._last.keys() - decodes:
            del self._last[gone]


def _news(peer: str, outcomes: Mapping[str, int]) -> PeerNews:
    failed = {
        FAILURES_BY_NAME[name]: count
        for name, count in outcomes.items()
        if name in FAILURES_BY_NAME
    }
    return PeerNews(peer, outcomes.get(_LOADED, 0), failed)
