"""What a request may be over, what a refusal says, and the bucket that measures a rate."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_EPSILON: Final = 1e-9  # seconds; a float that should be 0 may be this far off


class Limit(StrEnum):
    """What a request was over, by the name of the setting."""

    CONCURRENCY = "max_concurrency"  # it waited for a place as long as it may
    QUEUE = "max_queue"
    BYTES = "max_inflight_bytes"
    RATE = "max_rate"
    KEY_CONCURRENCY = "max_key_concurrency"
    KEY_RATE = "max_key_rate"
    KEY_TOKENS = "max_key_tokens_per_minute"

    @property
    def is_the_keys(self) -> bool:
        """Tell a key's own limit, which its owner can respect, from those of the whole router."""
        return self in (Limit.KEY_CONCURRENCY, Limit.KEY_RATE, Limit.KEY_TOKENS)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not let in, and when it is worth another try."""

    limit: Limit
    retry_after_s: int  # 1 or more


class TokenBucket:
    """Fills with so many tokens a second, up to a second's worth of them and at least one."""

    def __init__(self) -> None:
        self._full_at = 0.0

    def is_full(self, *, now: float) -> bool:
        """Tell a bucket that might as well be a new one."""
        return self._full_at <= now

    def wait(self, rate: float, *, now: float) -> float:
        """Return in how many seconds there is a token; 0: there is one."""
        missing = max(0.0, self._full_at - now) * rate
        seconds = (missing + 1 - max(1.0, rate)) / rate
        return seconds if seconds > _EPSILON else 0.0

    def take(self, rate: float, *, now: float, count: int = 1) -> None:
        """Take a token that is there; or several that another router has taken, which may not
        be.
        """
        self._full_at = max(self._full_at, now) + count / rate


class TokenQuota:
    """Tokens of prompts and answers, of which so many a minute are free: what is above drains at
    that rate.

    A request is let in while there is less than a minute's worth, and is charged when it has cost
    something: so a key may go over by what its requests under way cost, and waits for that
    afterwards.
    """

    def __init__(self) -> None:
        self._used = 0.0
        self._at = 0.0
        self._per_s = 0.0

    def is_full(self, *, now: float) -> bool:
        """Tell a quota that might as well be a new one."""
        return self._left(now) <= 0.0

    def wait(self, per_minute: float, *, now: float) -> float:
        """Return in how many seconds a request may come; 0: now."""
        seconds = (self._left(now) - per_minute) * 60 / per_minute
        return max(seconds, _EPSILON) if seconds >= 0 else 0.0

    def take(self, per_minute: float, tokens: float, *, now: float) -> None:
        """Charge tokens; fewer than 0: give back what was charged too much."""
        self._used = max(0.0, self._left(now) + tokens)
        self._at = now
        self._per_s = per_minute / 60

    def _left(self, now: float) -> float:
        return max(0.0, self._used - (now - self._at) * self._per_s)
