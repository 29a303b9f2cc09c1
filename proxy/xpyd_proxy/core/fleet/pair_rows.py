"""The pairs of engines in rows, for those who look at them."""

import heapq
from collections.abc import Iterator
from typing import Final

from xpyd_proxy.core.fleet.pair_health import FailingPair, Pair, PairHealth, PairState
from xpyd_proxy.core.fleet.pair_matrix import PairFacts, PairMatrix
from xpyd_proxy.core.fleet.pair_modes import PairMode, PairModes
from xpyd_proxy.core.schemas.pairs import PairRow

WELL: Final = "well"
BOTH: Final = "both"  # ways of moving KV are tried
_WORST_FIRST: Final = {PairState.RESTING.value: 0, PairState.TRYING.value: 0, PairState.FAILING.value: 1, WELL: 2}


def pair_rows(matrix: PairMatrix, health: PairHealth, modes: PairModes, *, now: float) -> Iterator[PairRow]:
    """Describe the pairs that fail, and then those that were used lately, the latest first."""
    failing = health.pairs()
    for pair, each in failing:
        yield _row(pair, matrix.get(pair), each, modes.get(pair), now)
    known = {pair for pair, _ in failing}
    for pair, facts in matrix.latest():
        if pair not in known:
            yield _row(pair, facts, None, modes.get(pair), now)


def worst_rows(matrix: PairMatrix, health: PairHealth, modes: PairModes, most: int, *, now: float) -> list[PairRow]:
    """Describe so many pairs: those that rest, that fail, whose legs failed, and then those that were used last."""
    return heapq.nsmallest(most, pair_rows(matrix, health, modes, now=now), key=_rank)


def _rank(row: PairRow) -> tuple[int, int]:
    return _WORST_FIRST[row.state], -row.failed


def _row(
    pair: Pair, facts: PairFacts | None, failing: FailingPair | None, mode: PairMode | None, now: float
) -> PairRow:
    failures = {} if facts is None or facts.failed is None else facts.failed
    return PairRow(
        prefill=pair[0],
        decode=pair[1],
        handovers=0 if facts is None else facts.handovers,
        failed=sum(failures.values()),
        failures=dict(failures),
        ttft_s=None if facts is None else facts.ttft_s,
        bytes_per_s=None if facts is None else facts.bytes_per_s,
        last_s=None if facts is None else max(0.0, now - facts.last_at),
        state=WELL if failing is None else failing.state.value,
        reason=None if failing is None else failing.reason.value,
        failed_in_a_row=0 if failing is None else failing.in_a_row,
        mode=None if mode is None else BOTH if mode.chosen is None else mode.chosen.value,
        pull_s=None if mode is None else mode.pull.mean_s,
        push_s=None if mode is None else mode.push.mean_s,
        rest_s=None if failing is None or failing.state is not PairState.RESTING else max(0.0, failing.due - now),
    )
