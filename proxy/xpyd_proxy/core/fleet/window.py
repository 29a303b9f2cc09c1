"""How many of an engine's last legs failed: counts over a sliding window, in constant memory."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Counts:
    legs: int = 0
    failed: int = 0


@dataclass(slots=True)
class Window:
    """Counts over the last ``seconds``, or up to half of it less: two halves, of which the older one is dropped."""

    seconds: float
    _begun: float = 0.0
    _older: _Counts = field(default_factory=_Counts)
    _newer: _Counts = field(default_factory=_Counts)

    def count(self, *, failed: bool, now: float) -> None:
        """Take in how one leg ended."""
        self._turn(now)
        self._newer.legs += 1
        self._newer.failed += failed

    def totals(self, *, now: float) -> tuple[int, int]:
        """Return how many legs ended, and how many of them failed."""
        self._turn(now)
        return self._older.legs + self._newer.legs, self._older.failed + self._newer.failed

    def clear(self) -> None:
        """Forget all of it."""
        self._older, self._newer = _Counts(), _Counts()

    def _turn(self, now: float) -> None:
        half = self.seconds / 2
        steps = (now - self._begun) // half
        if steps >= 1:
            self._older, self._newer = self._newer if steps == 1 else _Counts(), _Counts()
            self._begun += steps * half
