"""Which network devices NIXL may use: where peers read and write this process's memory.

Over TCP, UCX listens on each device that it may use. A program that reaches such a port reads and
writes any memory of the process: no secret protects it. So UCX gets the side channel's interface,
and RDMA devices, whose NICs check keys.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pdrelay_connector.core.addresses import is_loopback, is_wildcard
from pdrelay_connector.errors import SettingsError

DEVICES_VARIABLE = "UCX_NET_DEVICES"
# whether UCX reads GPUs by it without NVLink; "on" by our default
CUDA_IPC_READS = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
ALLOW = "allow_open_data_plane"


class NetworkInterfaces(NamedTuple):
    """What this machine has."""

    # IP address it uses towards the side channel's host: its own, if the side channel is here
    address: str
    interfaces: Mapping[str, frozenset[str]]  # name -> IP addresses
    rdma: Sequence[str] = ()  # active ports, as UCX names them: "mlx5_0:1"


def choose_devices(
    host: str,
    read_interfaces: Callable[[], NetworkInterfaces],
    chosen: str | None,
    backends: Sequence[str],
    *,
    allow_open: bool,
) -> str | None:
    """Return what ``UCX_NET_DEVICES`` is to be set to, None to leave it as it is.

    ``host``: of the side channel; ``chosen``: what the operator has set the variable to, None if
    not. Raises :exc:`~pdrelay_connector.errors.SettingsError` if NIXL would listen on more than
    that host's interface.
    """
    other_backends = [name for name in backends if name != "UCX"]
    if other_backends and not allow_open:
        raise SettingsError(
            f"NIXL's backend {other_backends[0]} chooses by itself on which interfaces it listens, and "
            f"whoever reaches it may "
            f"read this engine's memory; set {ALLOW} to true if its network is closed"
        )
    if "UCX" not in backends:
        return None
    if chosen is not None:
        if not allow_open and (wide := _wide(chosen)) is not None:
            raise SettingsError(
                f"{DEVICES_VARIABLE} is {chosen!r}: with {wide!r} NIXL would listen on all "
                "interfaces, and whoever reaches it reads and writes this engine's memory; name "
                f"the devices, or set {ALLOW} to true"
            )
        return None
    if allow_open:
        return None
    if is_wildcard(host):
        raise SettingsError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is {host!r}: NIXL would listen on all interfaces, and "
            "whoever reaches it reads and writes this engine's memory; set it to one address of "
            f"this machine, or {ALLOW} to true"
        )
    return ",".join(_devices(host, read_interfaces()))


def _wide(chosen: str) -> str | None:
    """Return the part of a UCX device list that means unnamed devices: "all" or "^but,these"."""
    parts = [part.strip() for part in chosen.split(",")]
    return next(
        (
            part
            for part in parts
            if part in ("", "all") or part[:1] == "^" or set("*?[") & set(part)
        ),
        None,
    )


def _devices(host: str, machine: NetworkInterfaces) -> list[str]:
    own = [name for name, addresses in machine.interfaces.items() if machine.address in addresses]
    if not own:
        raise SettingsError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is {host!r}, and no interface of this machine has the "
            f"address {machine.address!r} that leads there; set it to an address of this machine"
        )
    if is_loopback(machine.address):
        return own  # the network cards have no business with it
    return [own[0], *machine.rdma]
