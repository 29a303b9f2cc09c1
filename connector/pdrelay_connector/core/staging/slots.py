"""Slots of a host buffer: who holds which, and who waits, first come first served.

A slot has room for one of vLLM's blocks in all layers of one KV cache group; each group has its own
slots. Slot 0 is never granted, because block id 0 means "not held" (vLLM's null block).
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from pdrelay_connector.core.ids import BlockId
from pdrelay_connector.core.ports import Copier
from pdrelay_connector.errors import HostBufferTooSmall, IllegalTransition

OwnerT = TypeVar("OwnerT", bound=Hashable)
GroupSlots: TypeAlias = tuple[tuple[BlockId, ...], ...]  # of each KV cache group


class SlotsGranted(NamedTuple, Generic[OwnerT]):
    """The slots of each KV cache group that an owner has got, in ascending order."""

    ticket: OwnerT
    groups: GroupSlots


class Slots(Generic[OwnerT]):
    """The slots 1 to ``count`` of each KV cache group.

    Requests are granted strictly in order, so a large one is not starved by small ones.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = tuple(counts)
        self._free = [[BlockId(slot) for slot in range(1, count + 1)] for count in counts]  # heaps
        # In the order of asking; emptied from the front, which takes a plain dict longer the more
        # it has lost.
        self._waiting: OrderedDict[OwnerT, tuple[int, ...]] = OrderedDict()
        self._granted: dict[OwnerT, GroupSlots] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._granted)

    @property
    def groups(self) -> int:
        """How many KV cache groups there are."""
        return len(self._counts)

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return len(self._waiting)

    @property
    def granted(self) -> int:
        """The number of granted slots of all groups."""
        return sum(self._counts) - sum(map(len, self._free))

    def check(self, counts: Sequence[int]) -> None:
        """Raise :exc:`~pdrelay_connector.errors.HostBufferTooSmall` if there are too few slots."""
        if len(counts) != self.groups:
            raise HostBufferTooSmall(
                f"slots of {len(counts)} KV cache groups are wanted; there are {self.groups} groups"
            )
        for group, (want, count) in enumerate(zip(counts, self._counts, strict=True)):
            if want > count:
                raise HostBufferTooSmall(
                    f"{want} slots of KV cache group {group} are wanted; staging_blocks is {count}"
                )

    def enqueue(self, ticket: OwnerT, counts: Sequence[int]) -> None:
        """Queue for so many slots of each KV cache group; :meth:`take_granted` returns them.

        Raises :exc:`~pdrelay_connector.errors.HostBufferTooSmall` if there will never be so many.
        """
        if ticket in self._waiting or ticket in self._granted:
            raise IllegalTransition(f"{ticket} asks for slots twice")
        self.check(counts)
        self._waiting[ticket] = tuple(counts)

    def take_granted(self) -> list[SlotsGranted[OwnerT]]:
        """Grant slots to the owners at the head of the queue, in order; return the grants."""
        granted: list[SlotsGranted[OwnerT]] = []
        while self._waiting:
            ticket, counts = next(iter(self._waiting.items()))
            if any(count > len(free) for count, free in zip(counts, self._free, strict=True)):
                break
            del self._waiting[ticket]
            slots = tuple(
                tuple(heapq.heappop(free) for _ in range(count))
                for count, free in zip(counts, self._free, strict=True)
            )
            self._granted[ticket] = slots
            granted.append(SlotsGranted(ticket, slots))
        return granted

    def release(self, ticket: OwnerT) -> None:
        """Free an owner's slots or its place in the queue, if it has either."""
        self._waiting.pop(ticket, None)
        for free, slots in zip(
            self._free, self._granted.pop(ticket, ((),) * self.groups), strict=True
        ):
            for slot in slots:
                heapq.heappush(free, slot)


class HostBuffer(NamedTuple, Generic[OwnerT]):
    """The slots of a host buffer, and what copies between them and the cache."""

    slots: Slots[OwnerT]
    copier: Copier
