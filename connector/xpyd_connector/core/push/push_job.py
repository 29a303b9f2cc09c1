"""One push on a prefill worker: what is computed, who wants it, and the table of its life."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from xpyd_connector.core.ids import BlockId, ConnId, RequestId
from xpyd_connector.core.messages import (
    RankInfo,
    Register,
)
from xpyd_connector.core.state_machine import follow
from xpyd_connector.core.transfer.remote_memory import Way
from xpyd_connector.core.transfer.transfers import ParcelId


class Piece(NamedTuple):
    """What the steps of the engine have computed of a prompt, beyond earlier pieces."""

    request: RequestId  # the transfer's name
    prompt: str | None  # its digest
    attempt: int  # grows when the prefill starts again: what came before is void
    groups: Sequence[Sequence[BlockId]]  # of each KV cache group, the blocks after those of earlier pieces
    tokens: int  # how many are computed, from the first on
    last: bool  # the prompt is complete


class Gone(NamedTuple):
    """A transfer is over, or its prefill was: its blocks are not to be read any more, and its name may come again.

    It comes with the engine's steps, as the pieces do, and so never before them.
    """

    request: RequestId


class WritingState(Enum):
    """Where a push to one reader is in its life, on one worker."""

    OPEN = auto()
    CEASING = auto()  # nothing more is written; waits for what is in flight
    OVER = auto()


class WritingEvent(Enum):
    """What can happen to it."""

    COMPLETED = auto()
    STOPPED = auto()
    QUIET = auto()  # nothing is in flight any more


TRANSITIONS: Final[Mapping[WritingState, Mapping[WritingEvent, WritingState]]] = {
    WritingState.OPEN: {
        WritingEvent.COMPLETED: WritingState.OVER,
        WritingEvent.STOPPED: WritingState.CEASING,
    },
    WritingState.CEASING: {WritingEvent.QUIET: WritingState.OVER},
    WritingState.OVER: {},
}


@dataclass(slots=True)
class Source:
    """One prompt, as far as it is computed here."""

    prompt: str | None
    attempt: int
    groups: list[list[BlockId]]
    tokens: int = 0
    complete: bool = False


@dataclass(slots=True)
class Writing:
    """One push to one reader, as far as it has come."""

    guest: ConnId
    order: Register
    state: WritingState = WritingState.OPEN
    attempt: int = 0
    sent: int = 0  # tokens from the prompt's first on that need no more writing
    parcels: set[ParcelId] = field(default_factory=set[ParcelId])  # under way
    reason: str = ""  # why it ceases
    mute: bool = False  # the guest is gone: nobody to tell

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be written."""
        return self.state is not WritingState.OPEN

    def on(self, event: WritingEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = follow(TRANSITIONS, self.state, event, f"the push to {self.order.reader}")


@dataclass(slots=True)
class Guest:
    """A decode engine we write to."""

    ways: dict[int, Way] = field(default_factory=dict[int, Way])  # its ranks that take something of ours
    rank: RankInfo | None = None  # one of its ranks: in what is not an address, all are alike
    objection: str = ""  # why its memory cannot be used
