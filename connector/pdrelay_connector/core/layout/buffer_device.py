"""Which memory NIXL may transfer KV from: the device's, if it can register it, or the host's."""

from collections.abc import Mapping, Sequence
from typing import Final

from pdrelay_connector.errors import UnsupportedCache

HOST: Final = "cpu"
# Device type -> where its KV may be registered. Fewer than in vLLM 0.32
# (kv_connector/v1/nixl/utils.py): of Intel's GPUs, NIXL would have to register memory that we have
# never seen it register.
BUFFERS: Final[Mapping[str, Sequence[str]]] = {
    "cuda": ("cuda", "cpu"),
    "xpu": ("cpu",),
    "cpu": ("cpu",),
}


def check_buffer(device: str, buffer: str, buffers: Mapping[str, Sequence[str]] = BUFFERS) -> None:
    """Raise :exc:`~pdrelay_connector.errors.UnsupportedCache` unless device and buffer fit."""
    if buffer not in buffers.get(device, ()):
        allowed = " or ".join(repr(name) for name in buffers.get(device, ()))
        what = (
            f"it must be {allowed}"
            if allowed
            else f"known devices are {', '.join(sorted(buffers))}"
        )
        raise UnsupportedCache(
            f"kv_buffer_device {buffer!r} does not go with a KV cache on {device!r}; {what}"
        )


def with_platform(theirs: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Return :data:`BUFFERS`, with the device of a platform outside vLLM.

    Such a device can only use host memory: a platform does not name NIXL's memory type for its own.
    """
    return {**{device: (HOST,) for device, buffers in theirs.items() if HOST in buffers}, **BUFFERS}


def is_staged(
    device: str,
    buffer: str,
    *,
    host_staging: bool | None,
    buffers: Mapping[str, Sequence[str]] = BUFFERS,
) -> bool:
    """Return whether KV goes through a host buffer.

    ``host_staging`` decides (true even where the device is the host); None means: if ``buffer``
    (vLLM's kv_buffer_device) says so. Raises :exc:`~pdrelay_connector.errors.UnsupportedCache` for
    what the device cannot do.
    """
    check_buffer(device, buffer, buffers)
    staged = (buffer == HOST != device) if host_staging is None else host_staging
    check_buffer(device, HOST if staged else device, buffers)
    return staged
