"""The file descriptors of this process, and how many of them connections to engines may take."""

import resource
from typing import Final

OWN_DESCRIPTORS: Final = 64  # files, listeners and probes


def engine_connections() -> int | None:
    """Return the most connections to engines, beside as many of clients; None: no limit."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        None
        if descriptors == resource.RLIM_INFINITY
        else max(1, (descriptors - OWN_DESCRIPTORS) // 2)
    )
