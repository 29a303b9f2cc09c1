"""How many of an engine's latest legs have failed."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FailureRatio:
    """How many of the latest requests may fail, not in a row, before an engine is ejected."""

    share: float = 0.5
    window_s: float = 30.0
    min_requests: int = 20  # of fewer in the window no share counts


@dataclass(slots=True)
class _Counts:
    legs: int = 0
    failed: int = 0


@dataclass(slots=True)
class FailureWindow:
    """Counts over the last ``seconds``, or up to half of it less: two halves, of which the older
    one is dropped.
    """

    seconds: float
    _begun: float = 0.0
    _older: _Counts = field(default_factory=_Counts)
    _newer: _Counts = field(default_factory=_Counts)

    def count(self, *, failed: bool, now: float, legs: int = 1, is_new: bool = True) -> None:
        """Count legs that ended alike; not ``is_new``: they were counted as good ones before."""
        if now - self._begun >= self.seconds / 2:
            self._shift(now)
        newer = self._newer
        if is_new:
            newer.legs += legs
        newer.failed += failed * legs

    def totals(self, *, now: float) -> tuple[int, int]:
        """Return how many legs ended, and how many of them failed."""
        self._shift(now)
        return self._older.legs + self._newer.legs, self._older.failed + self._newer.failed

    def clear(self) -> None:
        """Forget all of it."""
        self._older = _Counts()
        self._newer = _Counts()

    def _shift(self, now: float) -> None:
        half = self.seconds / 2
        steps = (now - self._begun) // half
        if steps >= 1:
            self._older = self._newer if steps == 1 else _Counts()
            self._newer = _Counts()
            self._begun += steps * half
