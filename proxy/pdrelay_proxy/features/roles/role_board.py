"""Where decisions on roles are shown: a line of the log, metrics, and the status page."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.schemas.feature_status import FeatureStatus
from pdrelay_proxy.features.roles.role_controller import RoleDecision, Verdict
from pdrelay_proxy.features.roles.role_split import Split
from pdrelay_proxy.features.roles.settings import RolesMode
from pdrelay_proxy.features.roles.work_meter import DecodeWork, PrefillWork
from pdrelay_proxy.io.logs import note
from pdrelay_proxy.io.metric_families import Family, counter_family, gauge_family

LOG: Final = logging.getLogger("pdrelay.roles")
_MINUTE_S: Final = 60


class RoleBoard:
    """Takes in what was decided."""

    def __init__(self, mode: RolesMode, turns_most: int, clock: Callable[[], float]) -> None:
        # by verdict, and by the role that lacks an engine, or none
        self.decisions = Counter[tuple[str, str]]()
        self._mode = mode
        self._turns_most = turns_most
        self._clock = clock  # seconds; only differences count
        self._latest: tuple[float, RoleDecision] | None = None
        self._noted: tuple[object, ...] = ()
        self._last_turn: tuple[float, str] | None = None

    def decided(self, decision: RoleDecision) -> None:
        """Show a decision.

        One that is as the one before, in other numbers, has no line of its own.
        """
        now = self._clock()
        self._latest = now, decision
        if decision.turn is not None:
            would = "" if self._mode is not RolesMode.DRY_RUN else ", in a dry run"
            self._last_turn = now, f"{decision.turn.instance} to {decision.turn.role}{would}"
        kind = decision.verdict, decision.lacks, decision.turn
        if decision.verdict is not Verdict.TURN and kind == self._noted:
            return
        self._noted = kind
        self.decisions[decision.verdict.value, str(decision.lacks or "none")] += 1
        note(LOG, facts(decision, self._mode), dict, _text)

    @property
    def latest(self) -> RoleDecision | None:
        """The latest decision."""
        return None if self._latest is None else self._latest[1]

    def status(self) -> FeatureStatus | None:
        """Return what the status page shows; None: nothing was decided yet."""
        if self._latest is None:
            return None
        at, found = self._latest
        now = self._clock()
        wanted = found.wanted
        last = ""
        if self._last_turn is not None:
            turned_at, words = self._last_turn
            last = f"; the last one: {words}, {_span(now - turned_at)} ago"
        return FeatureStatus(
            title="Roles",
            state=f"{self._mode}, {found.verdict}, {_span(now - at)} ago",
            columns=("Role", "Engines", "Busy", "Wanted"),
            rows=(
                _row(Role.PREFILL, found.engines.prefill, found.prefill, wanted),
                _row(Role.DECODE, found.engines.decode, found.decode, wanted),
            ),
            sentences=(
                found.why,
                f"{found.turns} of {self._turns_most} turns in the last hour{last}",
            ),
        )

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        wanted = None if self.latest is None else self.latest.wanted
        text = "Engines that a role needs for its traffic (roles); nothing while that is not known."
        values = (
            [] if wanted is None else [((role.value,), float(wanted.of(role))) for role in Role]
        )
        yield gauge_family("pdrelay_wanted_engines", text, ("role",), values)
        text = (
            "Decisions on the roles of engines, each of which is a line of the log: by verdict, "
            "and by who lacks one."
        )
        yield from counter_family(
            "pdrelay_role_decisions", text, ("verdict", "lacks"), [*self.decisions.items()]
        )


def _row(
    role: Role, engines: int, work: PrefillWork | DecodeWork | None, wanted: Split | None
) -> tuple[str, str, str, str]:
    busy = "–" if work is None else f"{work.busy:.1f}"
    return role.value, str(engines), busy, "–" if wanted is None else str(wanted.of(role))


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < _MINUTE_S else f"{seconds / _MINUTE_S:.0f} min"


def facts(decision: RoleDecision, mode: RolesMode) -> Mapping[str, object]:
    """Return the fields of the line of a decision."""
    found: dict[str, object] = {"mode": mode.value, "verdict": decision.verdict.value}
    if decision.turn is not None:
        found |= {"instance": decision.turn.instance, "to": decision.turn.role.value}
    if decision.lacks is not None:
        found["lacks"] = decision.lacks.value
    found |= {
        "prefill": decision.engines.prefill,
        "decode": decision.engines.decode,
        "turns": decision.turns,
    }
    if decision.wanted is not None:
        found |= {
            "wanted_prefill": decision.wanted.prefill,
            "wanted_decode": decision.wanted.decode,
        }
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
    return " ".join(
        f"{name}={value!r}" if name == "why" else f"{name}={value}" for name, value in found.items()
    )
