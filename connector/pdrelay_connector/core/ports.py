"""What the core needs from I/O: a link to other engines, NIXL, and copies between device and host.

``io`` implements these protocols; tests use the in-memory ones. No call blocks, and no call fails
because of the network: the outcome comes back from ``poll`` as an event, once and in order.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol, TypeAlias

from pdrelay_connector.core.ids import Address, BlockId, ConnId, CopyId, EngineId, XferId
from pdrelay_connector.core.layout.transfer_plan import Spans
from pdrelay_connector.core.messages import Message, RankInfo, Welcome


class PeerConnected(NamedTuple):
    """A connection we opened is authenticated, and the peer has sent its Welcome."""

    conn: ConnId
    welcome: Welcome
    is_elsewhere: bool = False  # on another machine: a network that may be cut is between us


class ConnectFailed(NamedTuple):
    """A connection could not be opened. Its id is no longer valid."""

    conn: ConnId
    reason: str
    is_incompatible: bool = False  # the peer was reached, and one of us refused the other
    # The engine we expect, if we have met it before, has ended: its port is closed, or another
    # engine listens there.
    has_ended: bool = False
    # why we were refused, if that is known, as vllm:pdrelay_peer_loads names it (core/counters.py)
    cause: str = ""


class MessageReceived(NamedTuple):
    """A message arrived."""

    conn: ConnId
    message: Message


class ConnectionLost(NamedTuple):
    """An open connection closed. Its id is no longer valid.

    ``silent``: the peer did not close it. The network is cut or we gave up; the peer may still run.
    ``reset``: silent, but its kernel has answered that there is no such connection.
    """

    conn: ConnId
    reason: str
    silent: bool = False
    reset: bool = False


LinkEvent: TypeAlias = PeerConnected | ConnectFailed | MessageReceived | ConnectionLost


class Link(Protocol):
    """Control connections to other engines."""

    def connect(self, peer: Address, engine: EngineId) -> ConnId:
        """Begin to connect to an engine; PeerConnected or ConnectFailed follows."""
        ...

    def are_of_one_engine(self, first: ConnId, second: ConnId) -> bool:
        """Whether processes of one engine opened these two connections, which we accepted.

        A closed connection counts until its :class:`ConnectionLost` has been handled: ``poll`` may
        return its last messages together with its end.
        """
        ...

    def engine_of(self, conn: ConnId) -> EngineId | None:
        """Return the engine that opened a connection, by its Hello; None: ours, or forgotten."""
        ...

    def send(self, conn: ConnId, message: Message) -> None:
        """Send a message; if the connection is gone, :class:`ConnectionLost` follows."""
        ...

    def close(self, conn: ConnId) -> None:
        """Close a connection, or stop opening it; no event follows."""
        ...

    def close_all(self, reason: str) -> None:
        """Close every connection, also half-open ones, and refuse new ones; no event follows."""
        ...


class XferOutcome(Enum):
    """How a NIXL transfer ended."""

    DONE = auto()
    FAILED = auto()


class XferEnded(NamedTuple):
    """A NIXL transfer is over, and NIXL no longer uses its memory.

    ``seconds`` is from its start to its end, ``posting`` the part of it that starting the transfer
    took.
    """

    xfer: XferId
    outcome: XferOutcome
    bytes: int
    descriptors: int
    seconds: float
    reason: str
    posting: float = 0.0


class TransferAgent(Protocol):
    """Moves bytes between the memory of two engines, as NIXL's agent does. One thread owns it."""

    def attach(self, peer: RankInfo) -> str:
        """Make a remote rank's memory reachable; return its handle. Raises ``TransferError``."""
        ...

    def detach(self, handle: str) -> None:
        """Forget a remote rank, after its transfers have ended as :meth:`cancel` describes."""
        ...

    def read(self, handle: str, spans: Spans) -> XferId:
        """Start to copy from remote to local memory; :class:`XferEnded` follows.

        Raises ``TransferError``.
        """
        ...

    def write(self, handle: str, spans: Spans) -> XferId:
        """Start to copy from local to remote memory; :class:`XferEnded` follows.

        Raises ``TransferError``.

        When a write ends as ``DONE``, the bytes are in the peer's memory.
        """
        ...

    def cancel(self, xfer: XferId) -> None:
        """Cancel a transfer.

        :class:`XferEnded` follows when the transfer can no longer change local or remote memory; a
        hung peer may delay that for long.
        """
        ...

    def poll(self) -> Sequence[XferEnded]:
        """Return the transfers that have ended since the last call."""
        ...


class CopyResult(NamedTuple):
    """A copy between device and host has ended; ``reason`` is empty if it succeeded."""

    copy: CopyId
    reason: str
    bytes: int


class CacheReader(Protocol):
    """Reads what this rank's cache holds, wherever it is.

    Its calls take as long as a copy of a block to the host.
    """

    @property
    def shape(self) -> str:
        """A digest of a block's bytes and rank: only blocks of equal shape are compared."""
        ...

    def block_size(self, group: int) -> int:
        """Return the tokens of a block of a group: 1 for a state; 0: no layer on this rank."""
        ...

    def checksum(self, group: int, block: BlockId, start: int, stop: int) -> int | None:
        """Return the CRC-32 of a block's rows with the tokens from ``start`` to ``stop``.

        None: the block cannot be read now, for example because the device lacks memory for a copy.
        """
        ...


class Copier(Protocol):
    """Copies between cache blocks and slots of a host buffer, in the order of the calls.

    Arguments hold one sequence for each KV cache group, with as many blocks as slots.
    """

    def out(
        self, blocks: Sequence[Sequence[BlockId]], slots: Sequence[Sequence[BlockId]]
    ) -> CopyId:
        """Start to copy complete blocks from the device; :class:`CopyResult` follows."""
        ...

    def into(
        self, slots: Sequence[Sequence[BlockId]], blocks: Sequence[Sequence[BlockId]]
    ) -> CopyId:
        """Start to copy to the device; :class:`CopyResult` follows."""
        ...

    def poll(self) -> Sequence[CopyResult]:
        """Return the copies that have ended since the last call.

        The owning thread is woken for each.
        """
        ...
