"""What of the router's limits is one worker's: the shares of all workers add up to the limit, and never to more.

A share is known without asking anybody, so no burst that comes to two workers at once gets past the limit. The price: a
worker that gets more than its part of the connections is at its share while another one still has room.
"""

from dataclasses import replace
from typing import Final

from xpyd_proxy.errors import ConfigError
from xpyd_proxy.settings import Settings

_AT_LEAST_ONE: Final = (
    "max_concurrency",
    "max_key_concurrency",
    "max_connections",
    "max_connections_per_address",
)  # a worker without a place would serve nobody


def share_of(settings: Settings, number: int, of: int) -> Settings:
    """Return the settings for one of several workers.

    Raises:
        ConfigError: a limit is too small to be shared by so many.
    """
    for name in _AT_LEAST_ONE:
        total: int | None = getattr(settings, name)
        if total is not None and total < of:
            raise ConfigError(f"{name} is {total}, and there are {of} workers: write at least {of}, or fewer workers")
    if settings.max_held_bytes // of < settings.max_body_bytes:
        raise ConfigError(
            f"max_held_bytes is {settings.max_held_bytes} for {of} workers, and one body may have "
            f"{settings.max_body_bytes} (max_body_bytes): write at least {of * settings.max_body_bytes}"
        )
    return replace(
        settings,
        max_concurrency=_whole(settings.max_concurrency, number, of),
        max_queue=_whole(settings.max_queue, number, of),
        max_held_bytes=settings.max_held_bytes // of,
        max_rate=None if settings.max_rate is None else settings.max_rate / of,
        max_key_concurrency=(
            None if settings.max_key_concurrency is None else _whole(settings.max_key_concurrency, number, of)
        ),
        max_connections=_whole(settings.max_connections, number, of),
        max_connections_per_address=(
            None
            if settings.max_connections_per_address is None
            else _whole(settings.max_connections_per_address, number, of)
        ),
        max_key_rate=None if settings.max_key_rate is None else settings.max_key_rate / of,
        retry_floor=settings.retry_floor / of,
    )


def _whole(total: int, number: int, of: int) -> int:
    """The first ones get what is left over."""
    return total // of + (number < total % of)
