"""D's scheduler in staged push: lends slots, and has them copied into the cache."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId, PartId, RequestId
from pdrelay_connector.core.messages import MAX_PART, CopyEnded, CopyIn, WorkerHello
from pdrelay_connector.core.ports import ConnectionLost, Link, LinkEvent, MessageReceived
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.slots import Slots

BlocksByGroup = Sequence[Sequence[BlockId]]  # of each KV cache group


@dataclass(slots=True)
class _PendingCopies:
    """One request's copies into the cache; ``unfinished``: with the ranks that must report them."""

    unfinished: dict[PartId, tuple[CopyIn, set[int]]] = field(
        default_factory=dict[PartId, tuple[CopyIn, set[int]]]
    )
    failure: str = ""


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
        self._pending_copies: dict[RequestId, _PendingCopies] = {}
        self._copied_in: list[tuple[RequestId, str]] = []

    def __len__(self) -> int:
        return len(self._pending_copies) + len(self.slots)

    def copy_in(self, request: RequestId, slots: BlocksByGroup, blocks: BlocksByGroup) -> None:
        """Have every rank copy these slots into these blocks; answered by :meth:`take_copied`."""
        copies = self._pending_copies[request] = _PendingCopies()
        for some_slots, some_blocks in zip(_cut(slots), _cut(blocks), strict=True):
            order = CopyIn(next(self._numbers), some_slots, some_blocks)
            copies.unfinished[order.number] = order, set(self._workers.ranks)
            self._workers.send_all(order)
        self._finish_if_copied(request)

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
        for copies in self._pending_copies.values():
            for order, owing in copies.unfinished.values():
                if rank in owing:
                    self._workers.send(rank, order)

    def _copied(self, number: PartId, rank: int, reason: str) -> None:
        for request, copies in list(self._pending_copies.items()):
            if number not in copies.unfinished or rank not in copies.unfinished[number][1]:
                continue
            copies.unfinished[number][1].discard(rank)
            copies.failure = copies.failure or reason
            if not copies.unfinished[number][1]:
                del copies.unfinished[number]
            self._finish_if_copied(request)
            return
        self._counters.count("unknown_transfer_messages")

    def _finish_if_copied(self, request: RequestId) -> None:
        copies = self._pending_copies[request]
        if not copies.unfinished:
            del self._pending_copies[request]
            self._copied_in.append((request, copies.failure))


def _cut(groups: BlocksByGroup) -> Iterator[tuple[tuple[BlockId, ...], ...]]:
    """Cut a request's blocks into as many as one message may name."""
    for start in range(0, max(map(len, groups)), MAX_PART):
        yield tuple(tuple(blocks[start : start + MAX_PART]) for blocks in groups)
