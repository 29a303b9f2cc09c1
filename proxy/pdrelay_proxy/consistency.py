"""Checks settings for contradictions and wrong files: the router's own, and its features'."""

from collections.abc import Callable, Sequence
from typing import Final

from pdrelay_proxy.core.http.origins import check_open
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features import features, has_other_routers
from pdrelay_proxy.io.files import (
    admin_tls,
    client_keys,
    engine_keys,
    engine_tls,
    join_key,
    operator_key,
    server_tls,
)
from pdrelay_proxy.io.worker_place import check_workers
from pdrelay_proxy.live import addresses_of
from pdrelay_proxy.settings import QueueOrder, Settings


def check(settings: Settings) -> None:
    """Raise ConfigError if the router would be open to others, or settings contradict others."""
    for check_settings in _checks():
        check_settings(settings)


def faults(settings: Settings) -> Sequence[str]:
    """Return all that ``check`` would raise, and the faults of the settings' files, each once."""
    sentences = dict[str, None]()
    for check_settings in (*_checks(), *_FILES):
        try:
            check_settings(settings)
        except ConfigError as exc:
            sentences[str(exc)] = None
    return [*sentences]


def _check_limits(settings: Settings) -> None:
    if settings.max_inflight_bytes < settings.max_body_bytes:
        raise ConfigError(
            f"max_inflight_bytes is {settings.max_inflight_bytes}, and one body may have "
            f"{settings.max_body_bytes} "
            "(max_body_bytes): write at least that"
        )


def _check_key_limits(settings: Settings) -> None:
    key_limits = (
        settings.max_key_concurrency,
        settings.max_key_rate,
        settings.max_key_tokens_per_minute,
    )
    if settings.api_keys_file is None and any(key_limits):
        raise ConfigError(
            "max_key_concurrency, max_key_rate and max_key_tokens_per_minute need api_keys_file: "
            "without keys all clients are one"
        )


def _check_queue_order(settings: Settings) -> None:
    if settings.api_keys_file is None and settings.queue_order is QueueOrder.FAIR:
        raise ConfigError("queue_order fair needs api_keys_file: without keys all clients are one")


def _check_workers_meet(settings: Settings) -> None:
    if settings.workers > 1 and not has_other_routers(settings):
        raise ConfigError(
            f"workers is {settings.workers}, and this router has no feature by which workers tell "
            f"each other of their "
            "requests: write workers = 1"
        )


def check_admin_port(settings: Settings) -> None:
    """Raise ConfigError if the admin port's settings contradict the main port's, or lack a port."""
    if settings.admin_port is None:
        if settings.admin_host:
            raise ConfigError(
                "admin_host is set, and admin_port is not: write the port, or leave admin_host out"
            )
        return
    hosts = {settings.host, settings.admin_host or settings.host}
    if len(hosts) > 1 and not hosts & {"0.0.0.0", "::"}:
        return
    if settings.admin_port == settings.port != 0:
        raise ConfigError(f"port and admin_port are both {settings.port}: write two")
    last = settings.admin_port + settings.workers - 1
    if settings.admin_port and settings.admin_port < settings.port <= last:
        raise ConfigError(
            f"port is {settings.port}, and the admin ports of {settings.workers} workers are "
            f"{settings.admin_port} to "
            f"{last}: write an admin_port that leaves it out"
        )


def _checks() -> Sequence[Callable[[Settings], object]]:
    return (*_CHECKS, *[feature.check for feature in features()])


# Each raises ConfigError.
_CHECKS: Final[Sequence[Callable[[Settings], object]]] = (
    check_open,
    check_workers,
    _check_workers_meet,
    check_admin_port,
    _check_limits,
    _check_key_limits,
    _check_queue_order,
)
_FILES: Final[Sequence[Callable[[Settings], object]]] = (
    addresses_of,
    client_keys,
    engine_keys,
    operator_key,
    join_key,
    server_tls,
    admin_tls,
    engine_tls,
)
