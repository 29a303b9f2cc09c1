"""How many retries the engines can bear: a share of the requests, and a few more for quiet times."""

from dataclasses import dataclass, field
from typing import Final

MOST_RETRIES: Final = 20.0  # so many may come at once after a calm


@dataclass(slots=True)
class RetryBudget:
    """A bucket of tokens: requests fill it, time fills it a little, every retry takes one out.

    When all engines fail, retries multiply the load by at most 1 + ``share``, and not by the retries of each request.
    """

    share: float = 0.2  # retries for each request
    floor: float = 1.0  # retries a second that are granted however few requests there are
    most: float = MOST_RETRIES  # tokens it holds
    _tokens: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._tokens = self.most

    def came(self, *, now: float) -> None:
        """A request has come."""
        self._trickle(now)
        self._tokens = min(self.most, self._tokens + self.share)

    def grants(self, *, now: float) -> bool:
        """Tell whether there may be one more retry, and count it."""
        self._trickle(now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _trickle(self, now: float) -> None:
        passed, self._at = max(now - self._at, 0.0), now
        self._tokens = min(self.most, self._tokens + passed * self.floor)
