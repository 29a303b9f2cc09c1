"""The limits of requests, their refusals, and the buckets that measure rates."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_EPSILON: Final = 1e-9  # seconds; a float that should be 0 may be this far off


class Limit(StrEnum):
    """The limit that a request exceeded, by the name of its setting."""

    CONCURRENCY = "max_concurrency"  # it waited for a place for too long
    QUEUE = "max_queue"
    BYTES = "max_inflight_bytes"
    RATE = "max_rate"
    KEY_CONCURRENCY = "max_key_concurrency"
    KEY_RATE = "max_key_rate"
    KEY_TOKENS = "max_key_tokens_per_minute"

    @property
    def is_the_keys(self) -> bool:
        """Whether it is a limit of the key, which its owner can respect, not of the router."""
        return self in (Limit.KEY_CONCURRENCY, Limit.KEY_RATE, Limit.KEY_TOKENS)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was refused, and when to try again."""

    limit: Limit
    retry_after_s: int  # 1 or more


class TokenBucket:
    """Refills with so many tokens a second, up to one second's worth and at least one."""

    def __init__(self) -> None:
        self._full_at = 0.0

    def is_full(self, *, now: float) -> bool:
        """Return whether a new bucket would be the same."""
        return self._full_at <= now

    def wait(self, rate: float, *, now: float) -> float:
        """Return in how many seconds there will be a token; 0: there is one."""
        missing = max(0.0, self._full_at - now) * rate
        seconds = (missing + 1 - max(1.0, rate)) / rate
        return seconds if seconds > _EPSILON else 0.0

    def charge(self, rate: float, *, now: float, count: int = 1) -> None:
        """Take a token that is there, or several for another router, which may not be."""
        self._full_at = max(self._full_at, now) + count / rate


class TokenQuota:
    """Tokens of prompts and answers: a rate per minute drains the charged ones.

    A request is admitted while less than a minute's worth is charged, and is charged its cost: a
    key may exceed the quota by the cost of its requests under way, and waits for that afterwards.
    """

    def __init__(self) -> None:
        self._used = 0.0
        self._at = 0.0
        self._per_s = 0.0

    def is_full(self, *, now: float) -> bool:
        """Return whether a new quota would be the same."""
        return self._charged_now(now) <= 0.0

    def wait(self, per_minute: float, *, now: float) -> float:
        """Return in how many seconds a request may come; 0: now."""
        seconds = (self._charged_now(now) - per_minute) * 60 / per_minute
        return max(seconds, _EPSILON) if seconds >= 0 else 0.0

    def charge(self, per_minute: float, tokens: float, *, now: float) -> None:
        """Charge tokens; negative: give back an excess charge."""
        self._used = max(0.0, self._charged_now(now) + tokens)
        self._at = now
        self._per_s = per_minute / 60

    def _charged_now(self, now: float) -> float:
        return max(0.0, self._used - (now - self._at) * self._per_s)
