"""Push into host memory: which slots a decode engine lends, and how what landed in them gets into its cache."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.ids import BlockId, ConnId, PartId, RequestId
from xpyd_connector.core.messages import MAX_PART, Attend, CopyEnded, CopyIn
from xpyd_connector.core.ports import Link, LinkEvent, Lost, Received
from xpyd_connector.core.session.worker_links import Crew
from xpyd_connector.core.staging.slots import Slots

Groups = Sequence[Sequence[BlockId]]  # of each KV cache group


@dataclass(slots=True)
class _Copying:
    """One request's way into the cache; ``left`` are the copies that are not made, and the ranks that owe them."""

    left: dict[PartId, tuple[CopyIn, set[int]]] = field(default_factory=dict[PartId, tuple[CopyIn, set[int]]])
    failure: str = ""


class Unpacking:
    """Runs on the control thread; connections of our own workers end here."""

    def __init__(self, link: Link, tally: Tally, crew: Crew, slots: Slots[RequestId]) -> None:
        self.slots = slots
        self._link = link
        self._tally = tally
        self._crew = crew
        self._numbers = map(PartId, itertools.count(1))
        self._copyings: dict[RequestId, _Copying] = {}
        self._unpacked: list[tuple[RequestId, str]] = []

    def __len__(self) -> int:
        return len(self._copyings) + len(self.slots)

    def unpack(self, request: RequestId, slots: Groups, blocks: Groups) -> None:
        """Have every rank copy these slots into these blocks; answered by :meth:`take_unpacked`."""
        copying = self._copyings[request] = _Copying()
        for some_slots, some_blocks in zip(_cut(slots), _cut(blocks), strict=True):
            order = CopyIn(next(self._numbers), some_slots, some_blocks)
            copying.left[order.number] = order, set(self._crew.ranks)
            for rank in self._crew.ranks:
                self._crew.tell(rank, order)

    def take_unpacked(self) -> list[tuple[RequestId, str]]:
        """Return the requests whose copies have all ended since the last call, and why one of them failed, or ''."""
        unpacked, self._unpacked = self._unpacked, []
        return unpacked

    def on(self, event: LinkEvent) -> None:
        """Take in what our workers say."""
        match event:
            case Received(conn, Attend() as attend) if attend.unpacks and self._crew.admit(conn, attend):
                self._catch_up(attend.rank)
            case Received(conn, CopyEnded(number, reason)) if (rank := self._crew.rank_of(conn)) is not None:
                self._copied(number, rank, reason)
            case Received(conn, _):
                self._link.close(conn)
                self._crew.leave(conn)
            case Lost(conn):
                self._crew.leave(conn)  # it comes back, or this engine is at its end
            case _:
                pass

    def knows(self, conn: ConnId) -> bool:
        """Whether one of our workers is at the other end."""
        return self._crew.rank_of(conn) is not None

    def _catch_up(self, rank: int) -> None:
        for copying in self._copyings.values():
            for order, owing in copying.left.values():
                if rank in owing:
                    self._crew.tell(rank, order)

    def _copied(self, number: PartId, rank: int, reason: str) -> None:
        for request, copying in list(self._copyings.items()):
            if number not in copying.left or rank not in copying.left[number][1]:
                continue
            copying.left[number][1].discard(rank)
            copying.failure = copying.failure or reason
            if not copying.left[number][1]:
                del copying.left[number]
            if not copying.left:
                del self._copyings[request]
                self._unpacked.append((request, copying.failure))
            return
        self._tally.count("late_notifications")


def _cut(groups: Groups) -> Iterator[tuple[tuple[BlockId, ...], ...]]:
    """Cut a request's blocks into as many as one message may name."""
    for start in range(0, max(map(len, groups)), MAX_PART):
        yield tuple(tuple(blocks[start : start + MAX_PART]) for blocks in groups)
