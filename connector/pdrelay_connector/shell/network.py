"""The network of this process: NIXL's devices, and the side channel."""

import os

from vllm.logger import init_logger

from pdrelay_connector.core.addresses import is_loopback, is_wildcard
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.session.data_plane import DEVICES_VARIABLE, choose_devices
from pdrelay_connector.core.session.handshake import HandshakeClient, ProcessRole, Secrets
from pdrelay_connector.errors import SettingsError
from pdrelay_connector.io.link import SocketLink
from pdrelay_connector.io.network_interfaces import own_address, read_network_interfaces
from pdrelay_connector.io.secrets import secrets_in_force
from pdrelay_connector.io.tls import Tls
from pdrelay_connector.settings import Settings

logger = init_logger("vllm.pdrelay")

LOOPBACK = "lo"  # Linux's name of the loopback interface


def bind_data_plane(settings: Settings, side_channel: Address) -> None:
    """Set which devices UCX uses; call it before NIXL starts a backend.

    Raises :exc:`~pdrelay_connector.errors.SettingsError` if NIXL would listen beyond the side
    channel's interface.
    """
    devices = choose_devices(
        side_channel.host,
        lambda: read_network_interfaces(side_channel.host, side_channel.port),
        os.environ.get(DEVICES_VARIABLE),
        [backend.name for backend in settings.backends],
        allow_open=settings.allow_open_data_plane,
    )
    if devices is not None:
        os.environ[DEVICES_VARIABLE] = devices
    logger.info(
        "pdrelay: NIXL uses the network devices %s",
        os.environ.get(DEVICES_VARIABLE, "that UCX chooses"),
    )


def check_side_channel(settings: Settings) -> None:
    """Raise :exc:`~pdrelay_connector.errors.SettingsError`: an open side channel is reachable."""
    has_proof = settings.secrets or settings.secret_file or settings.tls_ca
    if has_proof or settings.allow_open_side_channel or _is_local(settings.host, settings.port):
        return
    raise SettingsError(
        f"VLLM_NIXL_SIDE_CHANNEL_HOST is {settings.host!r}, which other machines may reach, and "
        "there is no secret; set PDRELAY_CONNECTOR_SECRET, the same on all engines ('openssl rand "
        "-hex 32' prints one), or allow_open_side_channel to true"
    )


def reach_remarks(settings: Settings) -> list[str]:
    """Return a sentence if this engine can never load KV from another machine.

    Other limits show at the handshake.
    """
    if not _moves_kv_here_only(settings):
        return []
    reason = f"VLLM_NIXL_SIDE_CHANNEL_HOST is {settings.host!r}"
    # otherwise we may have chosen the devices ourselves, for that host
    if not _is_local(settings.host, settings.port):
        reason = f"{DEVICES_VARIABLE} is {LOOPBACK!r}"
    return [
        f"KV is loaded from engines of this machine only, because {reason} and NIXL listens on "
        "loopback; prefill engines elsewhere will be refused"
    ]


def open_link(
    settings: Settings,
    engine: EngineId,
    counters: Counters,
    *,
    role: ProcessRole,
    secrets: Secrets | None = None,
    badge: bytes = b"",
    workers: tuple[bytes, ...] = (),
) -> SocketLink:
    """Return a link for one of this engine's processes."""
    client = HandshakeClient(engine, secrets or secrets_in_force(settings), role, badge, workers)
    return SocketLink(
        client,
        Tls(settings),
        counters,
        timeout=settings.handshake_timeout,
        threads=settings.handshake_threads,
        local_only=_moves_kv_here_only(settings),
    )


def _moves_kv_here_only(settings: Settings) -> bool:
    """Whether NIXL listens on loopback only, now or after it has started."""
    chosen = os.environ.get(DEVICES_VARIABLE)
    if chosen is not None or settings.allow_open_data_plane:
        return chosen == LOOPBACK
    return _is_local(settings.host, settings.port)


def _is_local(host: str, port: int) -> bool:
    """Whether only this machine reaches the side channel's host."""
    if is_wildcard(host):
        return False
    try:
        return is_loopback(own_address(host, port))
    except SettingsError:
        return False
