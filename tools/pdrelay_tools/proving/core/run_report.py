"""The results of a run, and its exit code."""

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
        """0: all passed; 1: findings; 2: no check passed, or one was aborted."""
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
        finding_count = sum(len(check.findings) for check in self.checks)
        parts = [f"{count} {state}" for state, count in counts if count]
        checks = _counted(len(self.checks), "check")
        return f"{checks}: {', '.join(parts)}; {_counted(finding_count, 'finding')}."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def sign(state: CheckState) -> str:
    """Return the word for a state in tables."""
    return _SIGNS[state]


def line(check: CheckReport) -> str:
    """Write how a check ended, in one line, and a line for each finding."""
    idle = "" if check.idle_s is None else f", idle after {check.idle_s:.1f} s"
    outcome = check.reason or f"{check.requests} requests in {check.seconds:.1f} s{idle}"
    lines = [f"{sign(check.state):8} {check.name}: {outcome}"]
    lines += [f"         {finding.name}: {finding.evidence}" for finding in check.findings]
    return "\n".join(plain(row) for row in lines)


def plain(text: str) -> str:
    """Replace control characters of an engine's text: they would move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
