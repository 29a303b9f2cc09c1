"""What learns from the metrics of engines, which the router reads in rounds anyway."""

from collections.abc import Sequence
from typing import Protocol

from pdrelay_proxy.core.model import Instance


class MetricsListener(Protocol):
    """Is told what engines show. No call may wait or raise."""

    def decode_shown(self, decode: Instance, exposition: bytes, now: float, /) -> None:
        """A decode engine shows this; each does so once in a round."""
        ...

    def prefills_to_read(self, now: float, /) -> Sequence[Instance]:
        """List the prefill engines that are read, too, once all decode engines have been read."""
        ...

    def prefill_shown(self, prefill: Instance, exposition: bytes, /) -> None:
        """One of these shows this."""
        ...

    def round_over(self) -> Sequence[Instance]:
        """All have been read; return prefill engines that may have restarted under new ids."""
        ...
