"""The pairs of engines in rows, for those who look at them."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.pair_history import Pair, PairTrouble
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.pairs.core.pair_health import FailingPair, PairHealth, PairState
from pdrelay_proxy.features.pairs.core.pair_matrix import PairFacts, PairMatrix
from pdrelay_proxy.features.pairs.core.pair_modes import PairMode, PairModes
from pdrelay_proxy.features.pairs.pair_row import PairRow

WELL: Final = "well"
BOTH: Final = "both"  # ways of moving KV are tried
_WORST_FIRST: Final = {
    PairState.RESTING.value: 0,
    PairState.TRYING.value: 0,
    PairState.FAILING.value: 1,
    WELL: 2,
}
_ENGINE_AWAY: Final = 1  # the state is that of an engine
_WELL_STATES: Final = frozenset({HealthState.STARTING, HealthState.HEALTHY, HealthState.HALF_OPEN})


def pair_rows(
    matrix: PairMatrix,
    health: PairHealth,
    modes: PairModes,
    find: Callable[[InstanceId], Member | None],
    *,
    now: float,
) -> Iterator[PairRow]:
    """Describe the pairs that fail, and then those that were used lately, the latest first;
    ``find``: an engine.
    """
    known = set[Pair]()
    for pair, failing in health.pairs():
        known.add(pair)
        trouble = health.troubles.get(pair)
        yield _row(pair, matrix.get(pair), failing, modes.get(pair), now, trouble=trouble)
    for pair, trouble in list(health.troubles.items()):
        if pair not in known:
            known.add(pair)
            yield _row(pair, matrix.get(pair), None, modes.get(pair), now, trouble=trouble)
    for pair, facts in matrix.latest():
        if pair not in known:
            yield _as_its_engines(_row(pair, facts, None, modes.get(pair), now), find)


def worst_rows(
    matrix: PairMatrix,
    health: PairHealth,
    modes: PairModes,
    find: Callable[[InstanceId], Member | None],
    most: int,
    *,
    now: float,
) -> list[PairRow]:
    """Describe so many pairs: those that rest, that fail, whose legs failed, and then those that
    were used last.
    """
    return heapq.nsmallest(most, pair_rows(matrix, health, modes, find, now=now), key=_rank)


def _rank(row: PairRow) -> tuple[int, int]:
    return _WORST_FIRST.get(row.state, _ENGINE_AWAY), -row.failed


def _row(
    pair: Pair,
    facts: PairFacts | None,
    failing: FailingPair | None,
    mode: PairMode | None,
    now: float,
    *,
    trouble: PairTrouble | None = None,
) -> PairRow:
    reason = None if trouble is None else trouble.reason
    state = WELL if trouble is None else PairState.FAILING.value
    if failing is not None:
        reason = failing.reason.value
        state = failing.state.value
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
        state=state,
        reason=reason,
        why=None if trouble is None else trouble.why,
        failed_in_a_row=0 if failing is None else failing.in_a_row,
        mode=None if mode is None else BOTH if mode.chosen is None else mode.chosen.value,
        pull_s=None if mode is None else mode.pull.mean_s,
        push_s=None if mode is None else mode.push.mean_s,
        rest_s=None
        if failing is None or failing.state is not PairState.RESTING
        else max(0.0, failing.due - now),
    )


def _as_its_engines(row: PairRow, find: Callable[[InstanceId], Member | None]) -> PairRow:
    """Have a pair that does not fail be as well as its engines are."""
    for name in (row.prefill, row.decode):
        member = find(InstanceId(name))
        life = None if member is None else member.life
        if life is not None and (life.state not in _WELL_STATES or life.is_away):
            return replace(row, state=life.state.value, reason=f"{name}: {life.why}")
    return row
