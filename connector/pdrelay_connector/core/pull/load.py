"""One load of a decode worker: its order, the table of its life, and its end."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple

from pdrelay_connector.core.ids import Address, EngineId, RequestId
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.staging.slots import GroupSlots
from pdrelay_connector.core.state_machine import transition


class LoadState(Enum):
    """Where a load is in its life."""

    QUEUED = auto()  # for room in our staging buffer
    WAITING = auto()  # for the peer to be met
    ASKING = auto()  # P to stage a part
    READING = auto()
    COPYING = auto()  # what was read into our staging buffer into the cache
    ABORTING = auto()  # failed and told so; our blocks may still be written into
    CONFIRMING = auto()  # read; P has been asked whether the lease held
    OVER = auto()


class LoadEvent(Enum):
    """What can happen to a load, or to its next part."""

    SLOTS_GRANTED = auto()
    ASKED = auto()
    STARTED = auto()
    FETCHED = auto()  # in our staging buffer
    READ = auto()  # the last part is where it belongs
    CONFIRMED = auto()
    CANCELLED = auto()
    RELEASED = auto()
    FAILED = auto()


NEXT_PART: Final[Mapping[LoadEvent, LoadState]] = {
    LoadEvent.ASKED: LoadState.ASKING,
    LoadEvent.STARTED: LoadState.READING,
    LoadEvent.FAILED: LoadState.OVER,
}
TRANSITIONS: Final[Mapping[LoadState, Mapping[LoadEvent, LoadState]]] = {
    # the latter if nothing is lacking
    LoadState.WAITING: {**NEXT_PART, LoadEvent.READ: LoadState.CONFIRMING},
    LoadState.QUEUED: {
        LoadEvent.SLOTS_GRANTED: LoadState.WAITING,
        LoadEvent.FAILED: LoadState.OVER,
    },
    LoadState.ASKING: {LoadEvent.STARTED: LoadState.READING, LoadEvent.FAILED: LoadState.OVER},
    LoadState.READING: {
        LoadEvent.ASKED: LoadState.ASKING,
        LoadEvent.FAILED: LoadState.OVER,
        LoadEvent.FETCHED: LoadState.COPYING,
        LoadEvent.READ: LoadState.CONFIRMING,
        LoadEvent.CANCELLED: LoadState.ABORTING,
    },
    LoadState.COPYING: {
        **NEXT_PART,
        LoadEvent.READ: LoadState.CONFIRMING,
        LoadEvent.CANCELLED: LoadState.ABORTING,
    },
    LoadState.ABORTING: {LoadEvent.RELEASED: LoadState.OVER},
    LoadState.CONFIRMING: {LoadEvent.CONFIRMED: LoadState.OVER, LoadEvent.FAILED: LoadState.OVER},
    LoadState.OVER: {},
}
UNDER_WAY: Final = (LoadState.READING, LoadState.COPYING)  # something is written into our memory


class LoadOrder(NamedTuple):
    """The scheduler's order of a load to a worker."""

    request: RequestId  # ours
    remote_request: RequestId  # P's
    engine: EngineId
    address: Address
    token_ranges: Sequence[TokenRange]  # one for each KV cache group that lacks something


@dataclass(slots=True)
class Load:
    """One load, as far as it has come."""

    order: LoadOrder
    state: LoadState = LoadState.WAITING
    deadline: float = inf  # of the step that is under way
    meet_by: float = inf  # while it waits for a peer that did not answer before
    # left to read, once P is met
    parts: deque[list[TokenRange]] = field(default_factory=deque[list[TokenRange]])
    number: int = 0  # of the part that is under way
    slots: GroupSlots = ()  # of our staging buffer

    @property
    def due(self) -> float:
        """When it fails unless something happens."""
        return (
            min(self.deadline, self.meet_by) if self.state is LoadState.WAITING else self.deadline
        )

    def on(self, event: LoadEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = transition(TRANSITIONS, self.state, event, f"load of {self.order.request}")
