"""What this process knows of its machine: versions, network, namespaces."""

import ctypes
import importlib.metadata
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from pdrelay_connector.core.addresses import plain_ip
from pdrelay_connector.core.doctor.examination import EndFacts
from pdrelay_connector.io.network_interfaces import RDMA, interfaces, rdma_ports

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES: Final = Path("/proc/self/ns")
MAPS: Final = Path("/proc/self/maps")
SHARED_MEMORY: Final = Path("/dev/shm")
MOST_VARIABLES: Final = 64


def read_machine(address: str, environment: Mapping[str, str]) -> EndFacts:
    """Return the facts known before NIXL is loaded; ``address``: ours, to the other end."""
    interface = next(
        (name for name, addresses in interfaces().items() if plain_ip(address) in addresses), ""
    )
    stats = psutil.net_if_stats().get(interface)
    return EndFacts(
        host=socket.gethostname()[:255],
        pdrelay=package_version("pdrelay"),
        nixl=package_version("nixl"),
        vllm=package_version("vllm"),
        address=address,
        interface=interface,
        mtu=stats.mtu if stats is not None else 0,
        rdma=tuple(rdma_ports(RDMA))[:64],
        machine=_text(BOOT_ID),
        ipc_namespace=_link(NAMESPACES / "ipc"),
        pid_namespace=_link(NAMESPACES / "pid"),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        environment=_variables(environment),
    )


def ucx_version() -> str:
    """Return the version of the UCX library that NIXL has loaded into this process; "" if none
    is.
    """
    path = next((line.split()[-1] for line in _text(MAPS).splitlines() if "/libucp" in line), None)
    if path is None:
        return ""
    try:
        version = ctypes.CDLL(path).ucp_get_version_string
    except (OSError, AttributeError):
        return ""
    version.restype = ctypes.c_char_p
    return bytes(version() or b"").decode(errors="replace")[:255]


def _variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables of UCX and NIXL, without those that the doctor itself sets."""
    ours = ("UCX_PROTO_INFO", "UCX_LOG_FILE")
    variables = sorted(
        f"{name}={value}"
        for name, value in environment.items()
        if name.startswith(("UCX_", "NIXL_")) and name not in ours
    )
    return tuple(variable[:255] for variable in variables[:MOST_VARIABLES])


def package_version(package: str) -> str:
    """Return the version of an installed package; "" if it is not."""
    try:
        return importlib.metadata.version(package)[:255]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 (it is no path)
    except OSError:
        return ""
