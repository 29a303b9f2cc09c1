"""When an engine that is being drained has nothing left: its own requests first, then what decode engines may read."""

from dataclasses import dataclass
from typing import Final

from xpyd_proxy.core.model import Role

_SURE: Final = 2  # readings in a row: vLLM's numbers are those of its step before


@dataclass(slots=True)
class Drain:
    """What is seen of one engine while it is drained. Times are seconds of a clock that only rises."""

    since: float  # when it got its last request, or was told to drain
    kept: float | None = None  # as it said last; None: it does not say
    zeros: int = 0  # readings in a row that said that nothing is kept

    def reading(self, kept: float | None) -> None:
        """Take in what it said of the blocks it keeps."""
        self.kept = kept
        self.zeros = self.zeros + 1 if kept == 0 else 0

    def verdict(self, role: Role, in_flight: int, *, patience_s: float, now: float) -> str | None:
        """Say why it is empty; None: it is not.

        A prefill engine that does not say what it keeps, or seems to keep it for ever, is believed to be empty after
        ``patience_s`` seconds without a request: by then its leases have run out.
        """
        if in_flight:
            self.since, self.zeros = now, 0
            return None
        if role is Role.DECODE:
            return "has no request left"
        if self.zeros >= _SURE:
            return "has no request left and keeps nothing for decode engines"
        if now < self.since + patience_s:
            return None
        said = "does not say what it keeps" if self.kept is None else f"still shows {self.kept:g} of what it keeps"
        return f"has had no request for {patience_s:g} s, but {said}"
