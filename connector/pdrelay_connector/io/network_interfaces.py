"""The network interfaces of this machine."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from pdrelay_connector.core.addresses import plain_ip
from pdrelay_connector.core.session.data_plane import NetworkInterfaces
from pdrelay_connector.errors import SettingsError

RDMA = Path("/sys/class/infiniband")


def read_network_interfaces(host: str, port: int) -> NetworkInterfaces:
    """Return the interfaces towards ``host``; raises SettingsError."""
    return NetworkInterfaces(own_address(host, port), interfaces(), rdma_ports(RDMA))


def interfaces() -> Mapping[str, frozenset[str]]:
    """Return the IP addresses of each network interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: frozenset(
            plain_ip(address.address) for address in addresses if address.family in families
        )
        for name, addresses in psutil.net_if_addrs().items()
    }


def rdma_ports(folder: Path) -> Sequence[str]:
    """Return the active ports of RDMA devices by UCX's names; ``folder``: of Linux's devices."""
    ports = sorted(folder.glob("*/ports/*/state"))
    return [f"{path.parts[-4]}:{path.parts[-2]}" for path in ports if "ACTIVE" in _text(path)]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the device is gone, or its driver starts anew: it cannot be used
        return ""


def own_address(host: str, port: int) -> str:
    """Return our IP address on the way to a host (the host itself if it is ours).

    Raises :exc:`~pdrelay_connector.errors.SettingsError`: no route.
    """
    try:
        results = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, _, _, _, address = results[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)  # sends nothing
            return plain_ip(str(sock.getsockname()[0]))
    except (OSError, ValueError) as exc:
        raise SettingsError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is {host!r}, which leads nowhere: {exc}; set it to an "
            f"address of this machine"
        ) from exc
