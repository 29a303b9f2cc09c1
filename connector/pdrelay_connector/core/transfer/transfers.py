"""Reads, writes and copies in flight, by their owners: the common part of pull and push.

NIXL and the copier report the end of a step by a number of their own. While any step of an owner is
in flight, its memory must not be given to another, even after :meth:`Transfers.cancel`: NIXL
decides when a transfer is over (``io/nixl.py``).
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from pdrelay_connector.core.counters import Counters, TransferSample
from pdrelay_connector.core.ids import CopyId, XferId
from pdrelay_connector.core.layout.transfer_plan import Spans
from pdrelay_connector.core.ports import Copier, TransferAgent, XferOutcome

StepOwnerT = TypeVar("StepOwnerT", bound=Hashable)

POLL_INTERVAL: Final = 0.0004  # s between polls of NIXL while something is read or written
# s between polls while only cancelled transfers are in flight
QUARANTINE_POLL_INTERVAL: Final = 0.02


class StepEnded(NamedTuple, Generic[StepOwnerT]):
    """A read, a write or a copy has ended; ``failure`` is empty if it succeeded."""

    owner: StepOwnerT
    failure: str
    is_copy: bool = False
    copied_bytes: int = 0


@dataclass(slots=True)
class _Steps:
    """The steps in flight of one owner."""

    xfers: set[XferId] = field(default_factory=set[XferId])
    copies: int = 0

    def __bool__(self) -> bool:
        return bool(self.xfers or self.copies)


class Transfers(Generic[StepOwnerT]):
    """Runs on a worker's transfer thread, which makes every call of NIXL."""

    def __init__(
        self, transfer_agent: TransferAgent, copier: Copier | None, counters: Counters
    ) -> None:
        self._transfer_agent = transfer_agent
        self._copier = copier  # absent unless KV goes through host memory
        self._counters = counters
        self._steps: dict[StepOwnerT, _Steps] = {}
        # with the id of the engine at the other end
        self._xfers: dict[XferId, tuple[StepOwnerT, str]] = {}
        self._copies: dict[CopyId, StepOwnerT] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def is_active(self, owner: StepOwnerT) -> bool:
        """Whether a step of this owner is in flight, cancelled or not."""
        return owner in self._steps

    def read(
        self, owner: StepOwnerT, spans_by_handle: Iterable[tuple[str, Spans]], *, peer: str = ""
    ) -> None:
        """Begin to read from ranks of ``peer``.

        If it raises a ``ConnectorError``, some reads may be in flight.
        """
        for handle, spans in spans_by_handle:
            self._add_xfer(owner, self._transfer_agent.read(handle, spans), peer)

    def write(
        self, owner: StepOwnerT, spans_by_handle: Iterable[tuple[str, Spans]], *, peer: str = ""
    ) -> None:
        """Begin to write to ranks of ``peer``.

        If it raises a ``ConnectorError``, some writes may be in flight.
        """
        for handle, spans in spans_by_handle:
            self._add_xfer(owner, self._transfer_agent.write(handle, spans), peer)

    def add_copy(self, owner: StepOwnerT, copy: CopyId) -> None:
        """Wait for a copy that the copier has been given."""
        self._steps.setdefault(owner, _Steps()).copies += 1
        self._copies[copy] = owner

    def cancel(self, owner: StepOwnerT) -> None:
        """Cancel an owner's reads and writes.

        Each still ends with :class:`StepEnded`; a copy cannot be cancelled.
        """
        if (steps := self._steps.get(owner)) is not None:
            for xfer in steps.xfers:
                self._transfer_agent.cancel(xfer)

    def poll(self) -> Iterator[StepEnded[StepOwnerT]]:
        """Yield the steps that have ended since the last call: NIXL's first, then copies."""
        for ended in self._transfer_agent.poll():
            owner, peer = self._xfers.pop(ended.xfer)
            self._steps[owner].xfers.remove(ended.xfer)
            self._forget_if_over(owner)
            if ended.outcome is XferOutcome.DONE:
                self._counters.observe(
                    TransferSample(
                        ended.seconds, ended.bytes, ended.descriptors, ended.posting, peer
                    )
                )
                yield StepEnded(owner, "")
            else:
                yield StepEnded(owner, f"NIXL: {ended.reason}")
        for copied in self._copier.poll() if self._copier is not None else ():
            owner = self._copies.pop(copied.copy)
            self._steps[owner].copies -= 1
            self._forget_if_over(owner)
            yield StepEnded(owner, copied.reason, is_copy=True, copied_bytes=copied.bytes)

    def _add_xfer(self, owner: StepOwnerT, xfer: XferId, peer: str) -> None:
        self._steps.setdefault(owner, _Steps()).xfers.add(xfer)
        self._xfers[xfer] = owner, peer

    def _forget_if_over(self, owner: StepOwnerT) -> None:
        if not self._steps[owner]:
            del self._steps[owner]
