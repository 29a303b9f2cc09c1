"""Where decisions on roles are shown: a line of the log, metrics, and the status page."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.roles.role_controller import RoleDecision, Verdict
from pdrelay_proxy.core.roles.work_meter import DecodeWork, PrefillWork
from pdrelay_proxy.core.schemas.roles import RolesPart
from pdrelay_proxy.io.logs import note
from pdrelay_proxy.settings import RolesMode

LOG: Final = logging.getLogger("pdrelay.roles")


class RoleBoard:
    """Takes in what was decided."""

    def __init__(self, mode: RolesMode, counters: Counters, turns_most: int, clock: Callable[[], float]) -> None:
        self._mode = mode
        self._counters = counters
        self._turns_most = turns_most
        self._clock = clock  # seconds; only differences count
        self._latest: tuple[float, RoleDecision] | None = None
        self._noted: tuple[object, ...] = ()
        self._last_turn: tuple[float, str] | None = None

    def decided(self, decision: RoleDecision) -> None:
        """Show a decision. One that is as the one before, in other numbers, has no line of its own."""
        now = self._clock()
        self._latest = now, decision
        wanted, counters = decision.wanted, self._counters
        counters.wanted_engines.clear()
        if wanted is not None:
            counters.wanted_engines.update({(role.value,): wanted.of(role) for role in Role})
        if decision.turn is not None:
            would = "" if self._mode is not RolesMode.DRY_RUN else ", in a dry run"
            self._last_turn = now, f"{decision.turn.instance} to {decision.turn.role}{would}"
        kind = decision.verdict, decision.lacks, decision.turn
        if decision.verdict is not Verdict.TURN and kind == self._noted:
            return
        self._noted = kind
        counters.role_decisions[decision.verdict.value, str(decision.lacks or "none")] += 1
        note(LOG, facts(decision, self._mode), dict, _text)

    def part(self) -> RolesPart | None:
        """Return what the status page shows; None: nothing was decided yet."""
        if self._latest is None:
            return None
        at, found = self._latest
        last, now = self._last_turn, self._clock()
        return RolesPart(
            mode=self._mode,
            verdict=found.verdict,
            why=found.why,
            ago_s=now - at,
            prefill=found.engines.prefill,
            decode=found.engines.decode,
            prefill_busy=None if found.prefill is None else found.prefill.busy,
            decode_busy=None if found.decode is None else found.decode.busy,
            wanted_prefill=None if found.wanted is None else found.wanted.prefill,
            wanted_decode=None if found.wanted is None else found.wanted.decode,
            turns=found.turns,
            turns_most=self._turns_most,
            last_turn="" if last is None else last[1],
            last_turn_ago_s=None if last is None else now - last[0],
        )


def facts(decision: RoleDecision, mode: RolesMode) -> Mapping[str, object]:
    """Return the fields of the line of a decision."""
    found: dict[str, object] = {"mode": mode.value, "verdict": decision.verdict.value}
    if decision.turn is not None:
        found |= {"instance": decision.turn.instance, "to": decision.turn.role.value}
    if decision.lacks is not None:
        found["lacks"] = decision.lacks.value
    found |= {"prefill": decision.engines.prefill, "decode": decision.engines.decode, "turns": decision.turns}
    if decision.wanted is not None:
        found |= {"wanted_prefill": decision.wanted.prefill, "wanted_decode": decision.wanted.decode}
    found |= {} if decision.prefill is None else _prefill_facts(decision.prefill)
    found |= {} if decision.decode is None else _decode_facts(decision.decode)
    return found | {"why": decision.why}


def _prefill_facts(work: PrefillWork) -> Mapping[str, object]:
    return {
        "prefill_busy": round(work.busy, 2),
        "prefill_tokens_per_s": round(work.tokens_per_s),
        "arriving_tokens_per_s": round(work.arriving_per_s),
        "queued_tokens": round(work.queued_tokens),
        "prefill_rate": round(work.rate),
    }


def _decode_facts(work: DecodeWork) -> Mapping[str, object]:
    return {
        "decode_busy": round(work.busy, 2),
        "decode_tokens_per_s": round(work.tokens_per_s),
        "decode_batch": round(work.batch, 1),
        "decode_waiting": round(work.waiting, 1),
        "itl_ms": round(work.itl_s * 1e3, 1),
        "decode_rate": round(work.rate),
        "full_kv_caches": round(work.kv_engines, 2),
    }


def _text(found: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value!r}" if name == "why" else f"{name}={value}" for name, value in found.items())
