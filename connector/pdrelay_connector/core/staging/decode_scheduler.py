"""D's scheduler in staged push: lends slots, and has them copied into the cache."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId, PartId, RequestId
from pdrelay_connector.core.messages import MAX_PART, CopyEnded, CopyIn, WorkerHello
from pdrelay_connector.core.ports import ConnectionLost, Link, LinkEvent, MessageReceived
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.slots import Slots

BlocksByGroup = Sequence[Sequence[BlockId]]  # of each KV cache group


@dataclass(slots=True)
class _PendingRequest:
    """A request whose slots are copied into the cache."""

    request: RequestId
    copies: int = 0  # that have not ended
    failure: str = ""


@dataclass(slots=True)
class _Copy:
    """A copy that has not ended on the ranks ``owing``."""

    pending: _PendingRequest
    order: CopyIn
    owing: set[int]


class StagingReceiver:
    """Runs on the control thread; connections of our own workers end here."""

    def __init__(
        self, link: Link, counters: Counters, workers: WorkerLinks, slots: Slots[RequestId]
    ) -> None:
        self.slots = slots
        self._link = link
        self._counters = counters
        self._workers = workers
        self._numbers = map(PartId, itertools.count(1))
        self._copies: dict[PartId, _Copy] = {}
        self._copied_in: list[tuple[RequestId, str]] = []

    def __len__(self) -> int:
        return len(self._copies) + len(self.slots)

    def copy_in(self, request: RequestId, slots: BlocksByGroup, blocks: BlocksByGroup) -> None:
        """Have every rank copy these slots into these blocks; answered by :meth:`take_copied`."""
        pending = _PendingRequest(request)
        for some_slots, some_blocks in zip(_cut(slots), _cut(blocks), strict=True):
            order = CopyIn(next(self._numbers), some_slots, some_blocks)
            self._copies[order.number] = _Copy(pending, order, set(self._workers.ranks))
            pending.copies += 1
            self._workers.send_all(order)
        self._finish_if_copied(pending)

    def take_copied(self) -> list[tuple[RequestId, str]]:
        """Return the requests whose copies have all ended, each with a failure or ''."""
        copied = self._copied_in
        self._copied_in = []
        return copied

    def on(self, event: LinkEvent) -> None:
        """Handle a message of our workers."""
        match event:
            case MessageReceived(conn, WorkerHello() as hello) if (
                hello.receives_pushes and self._workers.add(conn, hello)
            ):
                self._resend_copies(hello.rank)
            case MessageReceived(conn, CopyEnded(number, reason)) if (
                rank := self._workers.rank_of(conn)
            ) is not None:
                self._copied(number, rank, reason)
            case MessageReceived(conn, _):
                self._link.close(conn)
                self._workers.remove(conn)
            case ConnectionLost(conn):
                self._workers.remove(conn)  # it comes back, or this engine is at its end
            case _:
                pass

    def is_from_worker(self, event: LinkEvent) -> bool:
        """Whether the connection is of one of our workers, or of one that registers to copy.

        Who only claims that is left to the push coordinator, which may know it as an engine.
        """
        match event:
            case MessageReceived(_, WorkerHello(receives_pushes=True) as hello):
                return self._workers.is_worker(hello)
            case _:
                return self._workers.rank_of(event.conn) is not None

    def _resend_copies(self, rank: int) -> None:
        for copy in self._copies.values():
            if rank in copy.owing:
                self._workers.send(rank, copy.order)

    def _copied(self, number: PartId, rank: int, reason: str) -> None:
        copy = self._copies.get(number)
        if copy is None or rank not in copy.owing:
            self._counters.count("unknown_transfer_messages")
            return
        copy.owing.remove(rank)
        copy.pending.failure = copy.pending.failure or reason
        if not copy.owing:
            del self._copies[number]
            copy.pending.copies -= 1
            self._finish_if_copied(copy.pending)

    def _finish_if_copied(self, pending: _PendingRequest) -> None:
        if not pending.copies:
            self._copied_in.append((pending.request, pending.failure))


def _cut(groups: BlocksByGroup) -> Iterator[tuple[tuple[BlockId, ...], ...]]:
    """Cut a request's blocks into as many as one message may name."""
    for start in range(0, max(map(len, groups)), MAX_PART):
        yield tuple(tuple(blocks[start : start + MAX_PART]) for blocks in groups)
