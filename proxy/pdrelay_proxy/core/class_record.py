"""What became of one request by the targets of its class."""

from enum import auto
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum


class ClassOutcome(FastStrEnum):
    """How a request ended, by its class."""

    MET = auto()  # within its targets
    MISSED = auto()  # served, and not within them
    UNMEASURED = auto()  # served; there is no target, or no stream that would show the times
    REFUSED = auto()  # at once, or for lack of time or room while it waited
    EXPIRED = auto()  # it waited as long as it may
    FAILED = auto()  # an error that has nothing to do with the queue
    DISCONNECTED = auto()  # its client has gone


_MET: Final = ClassOutcome.MET  # looking a member up takes as long as a call
_MISSED: Final = ClassOutcome.MISSED


class ClassRecord:
    """The class of one request, what was expected of it when it came, and what became of that."""

    __slots__ = ("expected_s", "itl_s", "itl_target_s", "name", "outcome", "ttft_target_s")

    def __init__(
        self, name: str, ttft_target_s: float | None, itl_target_s: float | None, expected_s: float | None
    ) -> None:
        self.name = name
        self.ttft_target_s = ttft_target_s
        self.itl_target_s = itl_target_s
        self.expected_s = expected_s  # to its first token; None: nothing was measured
        self.itl_s: float | None = None  # mean time between two tokens; None: there were no two, or they were not seen
        self.outcome: ClassOutcome | None = None  # None: it is not over

    def served(self, ttft_s: float | None, itl_s: float | None) -> None:
        """It was served; None: no stream has shown the time."""
        self.itl_s = itl_s
        found: ClassOutcome | None = None
        for target_s, seconds in ((self.ttft_target_s, ttft_s), (self.itl_target_s, itl_s)):
            if target_s is not None and seconds is not None:
                found = _MISSED if seconds > target_s or found is _MISSED else _MET
        self.outcome = ClassOutcome.UNMEASURED if found is None else found

    def __str__(self) -> str:
        """Write the outcome, and what was expected, for the log."""
        expected = "" if self.expected_s is None else f", first token expected in {self.expected_s * 1e3:.0f} ms"
        itl = "" if self.itl_s is None else f", {self.itl_s * 1e3:.1f} ms between tokens"
        return f"{self.name} {self.outcome or '-'}{expected}{itl}"
