"""The response to one HTTP request, as far as it came."""

from dataclasses import dataclass
from typing import Final

_SHOWN: Final = 120  # characters of an error


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to one request; times are seconds of a monotonic clock."""

    status: int | None  # None: no response, see `reason`
    body: bytes
    reason: str  # there is no response, or an incomplete one; empty: it is complete
    is_late: bool  # ... because it took too long
    sent_at: float
    seconds: float
    event_times: tuple[float, ...] = ()  # when each event of a stream came

    @property
    def is_refusal(self) -> bool:
        """Whether the server refused the request: no timeout, and no 5xx but 501."""
        return (
            self.status is not None
            and not self.is_late
            and (self.status < 500 or self.status == 501)
        )

    def failure(self) -> str:
        """Describe the failure; empty: it is a success."""
        if self.reason:
            return self.reason
        if self.status == 200:
            return ""
        return f"HTTP {self.status}: {self.body[:_SHOWN].decode(errors='replace')}"
