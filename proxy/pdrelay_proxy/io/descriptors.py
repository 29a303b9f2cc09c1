"""The descriptors of this process, and who may have how many of them."""

import resource
from typing import Final

OWN_DESCRIPTORS: Final = 64  # files, listeners and probes


def engine_connections() -> int | None:
    """Return how many connections to engines there may be beside as many of clients; None: as many
    as are wanted.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        None
        if descriptors == resource.RLIM_INFINITY
        else max(1, (descriptors - OWN_DESCRIPTORS) // 2)
    )
