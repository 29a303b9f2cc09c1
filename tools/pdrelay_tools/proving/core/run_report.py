"""Everything that a run has shown, and its exit code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_tools.proving.core.finding import CheckReport, CheckState
from pdrelay_tools.proving.core.latencies import Latencies

GREEN = 0
FINDINGS = 1
COULD_NOT_RUN = 2
_SIGNS: Final[Mapping[CheckState, str]] = {
    CheckState.PASSED: "ok",
    CheckState.FAILED: "FINDINGS",
    CheckState.SKIPPED: "skipped",
    CheckState.ABORTED: "ABORTED",
}


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run."""

    subject: str  # what was under test
    reference: str  # what it was compared with
    version: str  # of pdrelay
    when: str  # UTC
    seed: int
    seconds: float
    tolerance: float
    notes: Sequence[str]
    checks: Sequence[CheckReport]
    loads: Sequence[Latencies]
    usage: Mapping[str, Sequence[tuple[float, float]]]  # of each engine's cache: seconds, share

    @property
    def exit_code(self) -> int:
        """0: all green; 1: findings; 2: nothing was checked, or a check could not be done."""
        states = {check.state for check in self.checks}
        if CheckState.FAILED in states:
            return FINDINGS
        return (
            COULD_NOT_RUN
            if CheckState.ABORTED in states or CheckState.PASSED not in states
            else GREEN
        )

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        counts = [
            (state, sum(check.state is state for check in self.checks)) for state in CheckState
        ]
        found = sum(len(check.findings) for check in self.checks)
        parts = [f"{count} {state}" for state, count in counts if count]
        return f"{len(self.checks)} checks: {', '.join(parts)}; {found} finding{'' if found == 1 else 's'}."


def sign(state: CheckState) -> str:
    """Return the word for a state in tables."""
    return _SIGNS[state]


def line(check: CheckReport) -> str:
    """Write how a check ended, in one line, and a line for each finding."""
    idle = "" if check.idle_s is None else f", idle after {check.idle_s:.1f} s"
    said = check.reason or f"{check.requests} requests in {check.seconds:.1f} s{idle}"
    lines = [f"{sign(check.state):8} {check.name}: {said}"]
    lines += [f"         {finding.name}: {finding.seen}" for finding in check.findings]
    return "\n".join(plain(each) for each in lines)


def plain(text: str) -> str:
    """Leave out what would move a terminal's cursor, or is in no text: engines' words are in it."""
    return "".join(each if each.isprintable() else " " for each in text)
