"""What torch and vLLM can do on a device, checked before the engine starts: an error names what is missing."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from xpyd_connector.core.layout.buffer_device import HOST
from xpyd_connector.errors import UnsupportedCache

Ready: TypeAlias = Callable[[], bool]
_COPIES = ("insert_blocks_to_device", "swap_out_blocks_to_host")  # what vLLM's copy_kv_blocks calls


def check_copies(device: str, platform: Any) -> None:
    """Raise :exc:`~xpyd_connector.errors.UnsupportedCache` unless KV on that device can be copied to and from the host.

    ``platform`` is vLLM's. Where the device is the host, we copy ourselves.
    """
    if device == HOST:
        return
    lacking = [name for name in _COPIES if not callable(getattr(platform, name, None))]  # it answers None to any name
    if not hasattr(_module(device), "Stream"):
        lacking.append("streams")
    if lacking:
        raise UnsupportedCache(
            f"KV on {device!r} cannot go through host memory: there is no {' and no '.join(lacking)} for that device"
        )


def check_events(device: str) -> None:
    """Raise :exc:`~xpyd_connector.errors.UnsupportedCache` unless it can be known when a step has been computed."""
    if device != HOST and not hasattr(_module(device), "Event"):
        raise UnsupportedCache(
            f"push_granularity is 'chunk', and torch has no events for {device!r} that tell when a chunk is computed; "
            "it must be 'request' there"
        )


def computed(device: torch.device) -> Ready | None:
    """Return what tells whether the device has done all it was given so far; None where there is nothing to wait for.

    Without events, only what is known to be computed may be asked for: :func:`check_events`.
    """
    event_type = getattr(_module(device.type), "Event", None)
    if device.type == HOST or event_type is None:
        return None
    event = event_type()
    event.record()  # behind the kernels of the steps before this one
    ready: Ready = event.query
    return ready


def _module(device: str) -> Any | None:
    try:
        return torch.get_device_module(device)
    except RuntimeError:  # torch does not know such a device
        return None
