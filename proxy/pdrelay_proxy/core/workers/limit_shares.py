"""What of the router's limits is one worker's: the shares of all workers add up to the limit, and never to more.

A share is known without asking anybody, so no burst that comes to two workers at once gets past the limit. The price: a
worker that gets more than its part of the connections is at its share while another one still has room.
"""

from dataclasses import replace
from typing import Any, Final

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.settings import Settings

_AT_LEAST_ONE: Final = (
    "max_concurrency",
    "max_key_concurrency",
    "max_connections",
    "max_connections_per_address",
)  # a worker without a place would serve nobody


def share_of(settings: Settings, number: int, of: int) -> Settings:
    """Return the settings of one worker of several; raises ConfigError: a limit is too small for so many."""
    for name in _AT_LEAST_ONE:
        total: int | None = getattr(settings, name)
        if total is not None and total < of:
            raise ConfigError(f"{name} is {total}, and there are {of} workers: write at least {of}, or fewer workers")
    if settings.max_inflight_bytes // of < settings.max_body_bytes:
        raise ConfigError(
            f"max_inflight_bytes is {settings.max_inflight_bytes} for {of} workers, and one body may have "
            f"{settings.max_body_bytes} (max_body_bytes): write at least {of * settings.max_body_bytes}"
        )
    shares: dict[str, Any] = {"max_inflight_bytes": settings.max_inflight_bytes // of}
    for name in (*_AT_LEAST_ONE, "max_queue"):
        total = getattr(settings, name)
        shares[name] = None if total is None else total // of + (number < total % of)  # the first get what is left over
    if (quota := settings.max_key_tokens_per_minute) is not None:
        shares["max_key_tokens_per_minute"] = max(1, quota // of)
    for name in ("max_rate", "max_key_rate", "retry_budget_min_rate"):
        rate: float | None = getattr(settings, name)
        shares[name] = None if rate is None else rate / of
    return replace(settings, **shares)
