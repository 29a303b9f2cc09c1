"""What parts of the router need from others."""

from typing import Protocol

from xpyd_proxy.core.model import Instance


class Releases(Protocol):
    """Is told when a prefill engine was asked to free blocks nobody will read; never waits and never raises."""

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """``freed``: it has freed them. Else they stay pinned until their lease runs out."""
        ...
