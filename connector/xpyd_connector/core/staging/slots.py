"""Room in a staging buffer: who has which slots, and who waits for some, first come first served.

A slot is room for one of vLLM's blocks in all layers of one KV cache group; each group has slots of its own. Slot 0 is
never handed out: as a block id it means "not held".
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from xpyd_connector.core.ids import BlockId
from xpyd_connector.errors import IllegalTransition, NoRoom

TicketT = TypeVar("TicketT", bound=Hashable)
GroupSlots: TypeAlias = tuple[tuple[BlockId, ...], ...]  # of each KV cache group


class Granted(NamedTuple, Generic[TicketT]):
    """Somebody's turn has come: its slots of each KV cache group, in ascending order."""

    ticket: TicketT
    groups: GroupSlots


class Slots(Generic[TicketT]):
    """The slots 1 to ``count`` of each KV cache group.

    Nobody overtakes, not even with other groups: who asks for much is not starved by those who ask for little.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = tuple(counts)
        self._free = [[BlockId(slot) for slot in range(1, count + 1)] for count in counts]  # heaps
        # In the order of asking; emptied from the front, which takes a plain dict longer the more it has lost.
        self._waiting: OrderedDict[TicketT, tuple[int, ...]] = OrderedDict()
        self._held: dict[TicketT, GroupSlots] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._held)

    @property
    def groups(self) -> int:
        """How many KV cache groups there are."""
        return len(self._counts)

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """How many slots are handed out, of all groups."""
        return sum(self._counts) - sum(map(len, self._free))

    def check(self, wanted: Sequence[int]) -> None:
        """Raise :exc:`~xpyd_connector.errors.NoRoom` if so many slots of each group can never be had."""
        if len(wanted) != self.groups:
            raise NoRoom(f"slots of {len(wanted)} KV cache groups are wanted; there are {self.groups} groups")
        for group, (want, count) in enumerate(zip(wanted, self._counts, strict=True)):
            if want > count:
                raise NoRoom(f"{want} slots of KV cache group {group} are wanted; staging_blocks is {count}")

    def ask(self, ticket: TicketT, wanted: Sequence[int]) -> None:
        """Get in line for so many slots of each KV cache group; they come out of :meth:`take_granted`.

        Raises :exc:`~xpyd_connector.errors.NoRoom` if there will never be so many.
        """
        if ticket in self._waiting or ticket in self._held:
            raise IllegalTransition(f"{ticket} asks for slots twice")
        self.check(wanted)
        self._waiting[ticket] = tuple(wanted)

    def take_granted(self) -> list[Granted[TicketT]]:
        """Hand slots to those at the head of the line, as far as they last, and return who got which."""
        granted: list[Granted[TicketT]] = []
        while self._waiting:
            ticket, wanted = next(iter(self._waiting.items()))
            if any(want > len(free) for want, free in zip(wanted, self._free, strict=True)):
                break
            del self._waiting[ticket]
            slots = tuple(
                tuple(heapq.heappop(free) for _ in range(want)) for want, free in zip(wanted, self._free, strict=True)
            )
            self._held[ticket] = slots
            granted.append(Granted(ticket, slots))
        return granted

    def give_back(self, ticket: TicketT) -> None:
        """Take slots back, or leave the line; nothing happens to who has neither."""
        self._waiting.pop(ticket, None)
        for free, slots in zip(self._free, self._held.pop(ticket, ((),) * self.groups), strict=True):
            for slot in slots:
                heapq.heappush(free, slot)
