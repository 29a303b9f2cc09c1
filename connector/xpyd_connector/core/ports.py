"""What the cores need from the world. ``io`` implements it, tests use the in-memory one.

A port never blocks and never fails because of the network: whatever happens comes back,
once and in order, from ``poll`` as an event.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol, TypeAlias

from xpyd_connector.core.ids import Address, BlockId, ConnId, CopyId, EngineId, TransferId
from xpyd_connector.core.layout.transfer_plan import Spans
from xpyd_connector.core.messages import Message, RankInfo, Welcome


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

    def meet(self, peer: Address, engine: EngineId) -> ConnId:
        """Start connecting to an engine that should be at that address; answered by :class:`Met` or :class:`Failed`."""
        ...

    def are_of_one_engine(self, one: ConnId, other: ConnId) -> bool:
        """Whether two connections that we have accepted were opened by processes of one engine.

        One that has ended counts until its :class:`Lost` has been taken in: its last words may come out of ``poll``
        together with its end.
        """
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
    """A transfer is over and NIXL has let go of its memory. Durations in seconds; ``posting`` is our own part of it."""

    transfer: TransferId
    outcome: Outcome
    bytes: int
    descriptors: int
    seconds: float
    reason: str
    posting: float = 0.0


class Mover(Protocol):
    """Moves blocks between the memory of two engines. One thread owns it."""

    def attach(self, peer: RankInfo) -> str:
        """Make a remote rank's memory reachable and return its handle; raises ``TransferError``."""
        ...

    def detach(self, handle: str) -> None:
        """Forget a remote rank. Transfers in flight with it end first, as :meth:`cancel` promises."""
        ...

    def read(self, handle: str, spans: Spans) -> TransferId:
        """Start copying their memory into ours; answered by :class:`Ended`. Raises ``TransferError``."""
        ...

    def write(self, handle: str, spans: Spans) -> TransferId:
        """Start copying our memory into theirs; answered by :class:`Ended`. Raises ``TransferError``.

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


class Copied(NamedTuple):
    """A copy between the device and host memory is over; ``reason`` is empty when all of it is where it belongs.

    ``seconds`` it took, without the time it waited for others.
    """

    copy: CopyId
    reason: str
    bytes: int
    seconds: float


class Copier(Protocol):
    """Copies between the blocks of a cache and the slots of a host buffer, in the order asked for, each to its end.

    Every call takes one sequence for each KV cache group, and blocks and slots of a group are equally many.
    """

    def out(self, blocks: Sequence[Sequence[BlockId]], slots: Sequence[Sequence[BlockId]]) -> CopyId:
        """Start copying from the device; answered by :class:`Copied`. What is in the blocks must be complete."""
        ...

    def into(self, slots: Sequence[Sequence[BlockId]], blocks: Sequence[Sequence[BlockId]]) -> CopyId:
        """Start copying to the device; answered by :class:`Copied`."""
        ...

    def poll(self) -> Sequence[Copied]:
        """Report the copies that ended since the last call; whoever asks is woken when there are some."""
        ...
