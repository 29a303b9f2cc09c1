"""D's scheduler: leases blocks of its prefix cache to prefill engines that ask for a prompt.

No block is reserved in advance. D looks a prompt up when P asks, pins the cached blocks, and leases
exactly these to P's connection. The engine thread owns the prefix cache, so each question goes
there and comes back.

Hashing a long prompt takes a tenth of a second. It is done in pieces, so that heartbeats are
answered in between.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId, ConnId, RequestId
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import MAX_FOUND, FindPrefix, PrefixFound, Reachable
from pdrelay_connector.core.ports import Link

MAX_OPEN: Final = 256  # unanswered questions; more are refused
# Hashes each full block, in this engine's own way, a few with each step.
HashBlocks: TypeAlias = Callable[[FindPrefix], Iterator[Sequence[bytes]]]


class Question(NamedTuple):
    """A prefill engine's question: its connection, and its id of the prompt."""

    conn: ConnId
    request: RequestId


class PrefixLookup(NamedTuple):
    """For the engine thread: which blocks of its prefix cache have these hashes?"""

    question: Question
    hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class _Hashing:
    """A question whose prompt is being hashed."""

    question: Question
    pieces: Iterator[Sequence[bytes]]
    hashes: list[bytes] = field(default_factory=list[bytes])


class PrefixLender:
    """Runs on the control thread, and takes one step of ``hash_blocks`` in each iteration."""

    def __init__(
        self,
        link: Link,
        lease_manager: LeaseManager,
        counters: Counters,
        own: Reachable,
        hash_blocks: HashBlocks,
    ) -> None:
        self._link = link
        self._lease_manager = lease_manager
        self._counters = counters
        self._own = own
        self._hash_blocks = hash_blocks
        self._open: dict[Question, None] = {}
        self._hashing: deque[_Hashing] = deque()  # in order of arrival
        self._lookups: list[PrefixLookup] = []

    def __len__(self) -> int:
        return len(self._open)

    def introduce(self, conn: ConnId) -> None:
        """Send our listening address to a prefill engine that we have connected to."""
        self._link.send(conn, self._own)

    def receive_question(self, conn: ConnId, message: FindPrefix) -> None:
        """Begin to hash the prompt of a question; then it goes to the engine thread."""
        question = Question(conn, message.request)
        if question in self._open:
            self._counters.count("unknown_transfer_messages")
        elif len(self._open) >= MAX_OPEN:
            self._counters.count("prefixes_refused")
            self._link.send(conn, PrefixFound(message.request))
        else:
            self._open[question] = None
            self._hashing.append(_Hashing(question, self._hash_blocks(message)))

    def advance(self, *, now: float) -> float | None:
        """Hash a piece; return when to be called again: now if there is more, None if not."""
        while self._hashing and self._hashing[0].question not in self._open:
            self._hashing.popleft()  # its connection has closed
        if self._hashing:
            first = self._hashing[0]
            if (piece := next(first.pieces, None)) is not None:
                first.hashes.extend(piece)
            else:
                self._hashing.popleft()
                self._lookups.append(PrefixLookup(first.question, first.hashes[:MAX_FOUND]))
        return now if self._hashing else None

    def lend(self, question: Question, lease: RequestId, *, now: float) -> None:
        """Lease pinned blocks to the connection of the question, unless it has closed.

        The lease begins before the answer, so that it belongs to this connection, and ends with it.
        """
        self._lease_manager.grant(lease, now=now)
        if question in self._open:
            self._lease_manager.renew(question.conn, (lease,), now=now)
        else:
            self._lease_manager.drop((lease,))

    def answer(
        self, question: Question, lease: RequestId, block_size: int, blocks: Sequence[BlockId]
    ) -> None:
        """Answer with the blocks of the lease, now that they are computed, if it still holds."""
        if question not in self._open:
            return
        del self._open[question]
        if blocks and self._lease_manager.holds(lease):
            self._counters.count("prefixes_leased")
            self._link.send(
                question.conn, PrefixFound(question.request, lease, block_size, tuple(blocks))
            )
        else:
            self._link.send(question.conn, PrefixFound(question.request))

    def lost(self, conn: ConnId) -> None:
        """Drop the questions of a closed connection."""
        for question in [question for question in self._open if question.conn == conn]:
            del self._open[question]

    def take_lookups(self) -> list[PrefixLookup]:
        """Return the questions for the engine thread since the last call."""
        lookups = self._lookups
        self._lookups = []
        return lookups
