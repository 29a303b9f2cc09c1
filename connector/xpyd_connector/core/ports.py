"""What the cores need from the world. ``io`` implements it, tests use the in-memory one.

A port never blocks and never fails because of the network: whatever happens comes back,
once and in order, from ``poll`` as an event.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from xpyd_connector.core.ids import Address, ConnId, TransferId
from xpyd_connector.core.messages import Message, RankInfo, Welcome

Indices: TypeAlias = npt.NDArray[np.int32]


class Met(NamedTuple):
    """A connection we asked for is open and the peer has said Welcome."""

    conn: ConnId
    welcome: Welcome


class Failed(NamedTuple):
    """A connection we asked for could not be opened. It is gone."""

    conn: ConnId
    reason: str


class Received(NamedTuple):
    """A message arrived."""

    conn: ConnId
    message: Message


class Lost(NamedTuple):
    """An open connection closed. It is gone.

    If it was ``silent``, nobody at the other end closed it: the network is cut, or we gave up; the peer may well live.
    """

    conn: ConnId
    reason: str
    silent: bool = False


LinkEvent: TypeAlias = Met | Failed | Received | Lost


class Link(Protocol):
    """Control connections to other engines."""

    def meet(self, peer: Address) -> ConnId:
        """Start connecting; answered by :class:`Met` or :class:`Failed`."""
        ...

    def send(self, conn: ConnId, message: Message) -> None:
        """Send a message; if the connection is gone, :class:`Lost` tells."""
        ...

    def close(self, conn: ConnId) -> None:
        """Close a connection, or give up opening it; no event follows."""
        ...


class Outcome(Enum):
    """How a transfer ended."""

    MOVED = auto()
    FAILED = auto()


class Ended(NamedTuple):
    """A transfer is over and NIXL has let go of its memory. Durations in seconds."""

    transfer: TransferId
    outcome: Outcome
    bytes: int
    descriptors: int
    seconds: float
    reason: str


class Mover(Protocol):
    """Moves blocks between the memory of two engines. One thread owns it."""

    def attach(self, peer: RankInfo) -> str:
        """Make a remote rank's memory reachable and return its handle; raises ``TransferError``."""
        ...

    def detach(self, handle: str) -> None:
        """Forget a remote rank. Transfers in flight with it end first, as :meth:`cancel` promises."""
        ...

    def read(self, handle: str, remote: Indices, local: Indices) -> TransferId:
        """Start copying remote descriptors into local ones (equal lengths); answered by :class:`Ended`."""
        ...

    def write(self, handle: str, remote: Indices, local: Indices) -> TransferId:
        """Start copying local descriptors into remote ones (equal lengths); answered by :class:`Ended`.

        A write that ended as moved is complete in the peer's memory, not merely sent.
        """
        ...

    def cancel(self, transfer: TransferId) -> None:
        """Give a transfer up.

        :class:`Ended` follows once nothing of it can reach local or remote memory any more, however long a hung peer
        takes.
        """
        ...

    def poll(self) -> Sequence[Ended]:
        """Report the transfers that ended since the last call."""
        ...
