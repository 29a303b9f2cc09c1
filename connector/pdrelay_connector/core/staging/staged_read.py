"""A decode engine's request that reads staged KV, and the state of each part of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from pdrelay_connector.core.ids import ConnId, PartId, RequestId
from pdrelay_connector.core.messages import StagePart
from pdrelay_connector.core.staging.slots import GroupSlots
from pdrelay_connector.core.state_machine import transition


class PartState(Enum):
    """State of a part."""

    GATHERING = auto()  # some of the decode engine's ranks have asked, not all
    WAITING = auto()  # for slots
    COPYING = auto()  # into the slots of each of our ranks
    STAGED = auto()  # may be read
    ENDING = auto()  # it must not be read any more; our workers still copy
    OVER = auto()


class PartEvent(Enum):
    """What can happen to it."""

    COMPLETE = auto()  # every rank has asked
    GRANTED = auto()
    COPIED = auto()  # by the last worker
    ENDED = auto()  # all ranks have read it, or it must not be read any more
    DRAINED = auto()  # no worker copies any more


TRANSITIONS: Final[Mapping[PartState, Mapping[PartEvent, PartState]]] = {
    PartState.GATHERING: {PartEvent.COMPLETE: PartState.WAITING, PartEvent.ENDED: PartState.OVER},
    PartState.WAITING: {PartEvent.GRANTED: PartState.COPYING, PartEvent.ENDED: PartState.OVER},
    PartState.COPYING: {PartEvent.COPIED: PartState.STAGED, PartEvent.ENDED: PartState.ENDING},
    PartState.STAGED: {PartEvent.ENDED: PartState.OVER},
    PartState.ENDING: {PartEvent.DRAINED: PartState.OVER},
    PartState.OVER: {},
}


class StagedReadId(NamedTuple):
    """Several requests of decode engines may read one lease: one prompt, n answers."""

    request: RequestId
    reader: RequestId


@dataclass(slots=True)
class StagedPart:
    """As much of a request as is in the staging buffer at a time."""

    number: PartId  # ours, over all readers
    order: StagePart  # the first rank's
    state: PartState = PartState.GATHERING
    # who has asked, and not gone on
    ranks: dict[int, ConnId] = field(default_factory=dict[int, ConnId])
    slots: GroupSlots = ()
    # our ranks that have not said that they are done
    copying: set[int] = field(default_factory=set[int])

    def on(self, event: PartEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = transition(
            TRANSITIONS, self.state, event, f"part {self.order.part} of {self.order.request}"
        )


@dataclass(slots=True)
class StagedRead:
    """One request of a decode engine: its ranks, and the parts that they ask for or read."""

    ranks: dict[int, ConnId] = field(default_factory=dict[int, ConnId])
    parts: dict[int, StagedPart] = field(default_factory=dict[int, StagedPart])
    broken: str = ""  # why nothing more is staged for it

    def objection(self, conn: ConnId, order: StagePart) -> str:
        """Return why a rank may not ask for that part now; empty: it may."""
        rank = order.rank
        number = order.part
        if self.broken:
            return self.broken
        if rank >= order.ranks:
            return f"rank {rank} of {order.ranks} asks"
        if self.ranks.get(rank, conn) != conn:
            return f"rank {rank} asks over a second connection"
        for part in self.parts.values():
            if rank in part.ranks and (
                part.state is not PartState.STAGED or part.order.part >= number
            ):
                return f"rank {rank} asks for part {number}; it has asked for part {part.order.part} before"
        same = self.parts.get(number)
        if same is not None and (same.order.groups, same.order.ranks) != (
            order.groups,
            order.ranks,
        ):
            return f"another rank has asked for other blocks of part {number}"
        if same is not None and same.state is not PartState.GATHERING:
            return f"rank {rank} has gone on from part {number} before"
        return ""
