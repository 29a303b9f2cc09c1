"""What decode engines show of their loads by prefill engine (``vllm:pdrelay_peer_loads_total``),
from look to look.

Our connector shows them from the first failure of a prefill engine's loads on. No answer tells: a
decode engine that did not get the KV computes the prompt (``kv_load_failure_policy: recompute``),
and the text is right.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet.engine_metrics import labelled_lines
from pdrelay_proxy.core.fleet.pair_history import PairTrouble
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.pairs.core.pair_health import LASTING, OF_THE_PAIR, PairFailure

_NAME: Final = b"vllm:pdrelay_peer_loads_total{"
_LINE: Final = re.compile(
    rb"vllm:pdrelay_peer_loads_total\{(?P<labels>[^\n]{0,2000})\} "
    rb"(?P<value>[0-9]{1,18}(?:\.[0-9]{1,6})?(?:[eE]\+?[0-9]{1,2})?)"
)
_LABEL: Final = re.compile(rb'(?:^|,)(engine|peer|outcome)="([0-9A-Za-z_.:-]{1,160})"(?=,|$)')
_FAILURE: Final = b"vllm:pdrelay_peer_failure{"
# The reason is the connector's sentence, without what the text format escapes. It stands behind any
# other label.
_FAILURE_LABEL: Final = re.compile(
    rb'(?:^|,)(engine|peer|outcome|reason)="((?:(?<=reason=")[ '
    rb'!#-\[\]-~]{1,400})|(?:[0-9A-Za-z_.:-]{1,160}))"(?=,|$)'
)
_TRUE: Final = (b"1", b"1.0")
_MOST: Final = 512  # lines of one engine
_LOADED: Final = "loaded"
_REASONS: Final = {reason.value: reason for reason in PairFailure}

# by the prefill engine's id and the outcome; since the engine began
Totals: TypeAlias = Mapping[tuple[str, str], int]


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


def read_totals(text: bytes, rank: int | None = None) -> Totals:
    """Read the loads that an engine shows, or one of its data-parallel ranks; a label of another
    form is left out.
    """
    totals = dict[tuple[str, str], int]()
    for line in labelled_lines(text, _NAME, _LINE, _MOST):
        labels = {name: value.decode() for name, value in _LABEL.findall(line["labels"])}
        peer = labels.get(b"peer")
        outcome = labels.get(b"outcome")
        engine = labels.get(b"engine")
        is_own = rank is None or engine is None or engine == str(rank)
        if peer is not None and outcome is not None and is_own:
            key = peer, outcome
            totals[key] = totals.get(key, 0) + int(float(line["value"]))
    return totals


def read_failures(text: bytes, rank: int | None = None) -> Mapping[str, PairTrouble]:
    """Read why loads fail now, as an engine shows it by the prefill engine's id, or one of its
    data-parallel ranks.
    """
    troubles = dict[str, PairTrouble]()
    for line in labelled_lines(text, _FAILURE, most=_MOST):
        if line["value"] not in _TRUE:
            continue
        labels = {name: value.decode() for name, value in _FAILURE_LABEL.findall(line["labels"])}
        peer, outcome, why, engine = (
            labels.get(name) for name in (b"peer", b"outcome", b"reason", b"engine")
        )
        reason = _REASONS.get(outcome or "")
        is_own = rank is None or engine is None or engine == str(rank)
        if peer is not None and reason is not None and is_own:
            troubles[peer] = PairTrouble(reason.value, why or "", reason in LASTING)
    return troubles


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
        return [_news(peer, each) for peer, each in news.items()], False

    def keep(self, decodes: frozenset[InstanceId]) -> None:
        """Forget the engines that are no longer known."""
        for gone in self._last.keys() - decodes:
            del self._last[gone]


def _news(peer: str, outcomes: Mapping[str, int]) -> PeerNews:
    failed = {_REASONS[name]: count for name, count in outcomes.items() if name in _REASONS}
    return PeerNews(peer, outcomes.get(_LOADED, 0), failed)
