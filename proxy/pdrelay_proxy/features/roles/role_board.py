"""Shows decisions on roles: in the log, in metrics, and on the status page."""

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
    """Records decisions, and shows them."""

    def __init__(self, mode: RolesMode, most_changes: int, clock: Callable[[], float]) -> None:
        # by verdict, and by the role that lacks an engine, or none
        self.decisions = Counter[tuple[str, str]]()
        self._mode = mode
        self._most_changes = most_changes
        self._clock = clock  # seconds; only differences count
        self._latest: tuple[float, RoleDecision] | None = None
        self._noted: tuple[object, ...] = ()
        self._last_change: tuple[float, str] | None = None

    def decided(self, decision: RoleDecision) -> None:
        """Record a decision; log it unless only its numbers differ from the one before."""
        now = self._clock()
        self._latest = now, decision
        if decision.role_change is not None:
            would = "" if self._mode is not RolesMode.DRY_RUN else ", in a dry run"
            self._last_change = (
                now,
                f"{decision.role_change.instance} to {decision.role_change.role}{would}",
            )
        kind = decision.verdict, decision.lacks, decision.role_change
        if decision.verdict is not Verdict.TURN and kind == self._noted:
            return
        self._noted = kind
        self.decisions[decision.verdict.value, str(decision.lacks or "none")] += 1
        note(LOG, facts(decision, self._mode), dict, _text)

    @property
    def latest(self) -> RoleDecision | None:
        """The latest decision, if there is one."""
        return None if self._latest is None else self._latest[1]

    def status(self) -> FeatureStatus | None:
        """Return the section of the status page; None: no decision yet."""
        if self._latest is None:
            return None
        at, decision = self._latest
        now = self._clock()
        needed = decision.wanted
        last = ""
        if self._last_change is not None:
            changed_at, words = self._last_change
            last = f"; the last one: {words}, {_span(now - changed_at)} ago"
        return FeatureStatus(
            title="Roles",
            state=f"{self._mode}, {decision.verdict}, {_span(now - at)} ago",
            columns=("Role", "Engines", "Busy", "Wanted"),
            rows=(
                _row(Role.PREFILL, decision.engines.prefill, decision.prefill, needed),
                _row(Role.DECODE, decision.engines.decode, decision.decode, needed),
            ),
            sentences=(
                decision.why,
                f"{decision.changes_in_hour} of {self._most_changes} turns in the last hour{last}",
            ),
        )

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        needed = None if self.latest is None else self.latest.wanted
        text = "Engines that a role needs for its traffic (roles); nothing while that is not known."
        values = (
            []
            if needed is None
            else [((role.value,), float(needed.for_role(role))) for role in Role]
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
    role: Role, engines: int, work: PrefillWork | DecodeWork | None, needed: Split | None
) -> tuple[str, str, str, str]:
    busy = "–" if work is None else f"{work.busy:.1f}"
    return role.value, str(engines), busy, "–" if needed is None else str(needed.for_role(role))


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < _MINUTE_S else f"{seconds / _MINUTE_S:.0f} min"


def facts(decision: RoleDecision, mode: RolesMode) -> Mapping[str, object]:
    """Return the fields of a decision's log line."""
    fields: dict[str, object] = {"mode": mode.value, "verdict": decision.verdict.value}
    if decision.role_change is not None:
        fields |= {"instance": decision.role_change.instance, "to": decision.role_change.role.value}
    if decision.lacks is not None:
        fields["lacks"] = decision.lacks.value
    fields |= {
        "prefill": decision.engines.prefill,
        "decode": decision.engines.decode,
        "turns": decision.changes_in_hour,
    }
    if decision.wanted is not None:
        fields |= {
            "wanted_prefill": decision.wanted.prefill,
            "wanted_decode": decision.wanted.decode,
        }
    fields |= {} if decision.prefill is None else _prefill_facts(decision.prefill)
    fields |= {} if decision.decode is None else _decode_facts(decision.decode)
    return fields | {"why": decision.why}


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


def _text(fields: Mapping[str, object]) -> str:
    return " ".join(
        f"{name}={value!r}" if name == "why" else f"{name}={value}"
        for name, value in fields.items()
    )
