"""Checks what torch and vLLM support on a device, before the engine starts."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from pdrelay_connector.core.layout.buffer_device import HOST
from pdrelay_connector.errors import UnsupportedCache

Ready: TypeAlias = Callable[[], bool]
_COPIES = (
    "insert_blocks_to_device",
    "swap_out_blocks_to_host",
)  # vLLM's copy_kv_blocks calls them (kv_connector/utils.py, 0.32)


def check_copies(device: str, platform: Any) -> None:
    """Raise :exc:`~pdrelay_connector.errors.UnsupportedCache` unless vLLM can copy KV to the host.

    ``platform`` is vLLM's. KV on the CPU needs no support: we copy it ourselves.
    """
    if device == HOST:
        return
    lacking = [
        name for name in _COPIES if not callable(getattr(platform, name, None))
    ]  # a Platform returns None for unknown names
    if not hasattr(_module(device), "Stream"):
        lacking.append("streams")
    if lacking:
        raise UnsupportedCache(
            f"KV on {device!r} cannot go through host memory: there is no "
            f"{' and no '.join(lacking)} for that device"
        )


def check_events(device: str) -> None:
    """Raise :exc:`~pdrelay_connector.errors.UnsupportedCache` unless torch has events for it."""
    if device != HOST and not hasattr(_module(device), "Event"):
        raise UnsupportedCache(
            f"the mode pushes, and torch has no events for {device!r} that tell when a part of a "
            f"prompt is computed; "
            'mode must be "pull" there'
        )


def computed(device: torch.device) -> Ready | None:
    """Return a check whether the device has run all kernels so far; None: no need to wait.

    A device without events needs :func:`check_events` before.
    """
    event_type = getattr(_module(device.type), "Event", None)
    if device.type == HOST or event_type is None:
        return None
    event = event_type()
    event.record()  # behind the kernels of the steps before this one
    ready: Ready = event.query
    return ready


def binding(device: torch.device) -> Callable[[], None]:
    """Return what makes a device current on the thread that calls it.

    A new thread has no context of it, in which UCX's calls of the device's driver would fail.
    """

    def bind() -> None:
        torch.get_device_module(device.type).set_device(device)
        # Where the device is current already, set_device makes no context. The platform of vLLM
        # for CUDA does the same.
        torch.zeros(1, device=device)

    return bind


def _module(device: str) -> Any | None:
    try:
        return torch.get_device_module(device)
    except RuntimeError:  # torch does not know such a device
        return None
