"""One load of a decode worker: what is asked for, the table of its life, and how it ended."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple

from xpyd_connector.core.ids import Address, CopyId, EngineId, RequestId, TransferId
from xpyd_connector.core.layout.transfer_plan import Stretch
from xpyd_connector.core.staging.slots import GroupSlots
from xpyd_connector.core.state_machine import follow


class LoadState(Enum):
    """Where a load is in its life."""

    QUEUED = auto()  # for room in our staging buffer
    WAITING = auto()  # for the peer to be met
    ASKING = auto()  # P to stage a part
    READING = auto()
    COPYING = auto()  # what was read into our staging buffer into the cache
    GIVING_UP = auto()  # failed and told so; our blocks may still be written into
    CONFIRMING = auto()  # read; P has been asked whether the lease held
    OVER = auto()


class LoadEvent(Enum):
    """What can happen to a load, or to its next part."""

    ROOM = auto()
    ASKED = auto()
    STARTED = auto()
    LANDED = auto()  # in our staging buffer
    READ = auto()  # the last part is where it belongs
    CONFIRMED = auto()
    CANCELLED = auto()
    LET_GO = auto()
    FAILED = auto()


NEXT_PART: Final[Mapping[LoadEvent, LoadState]] = {
    LoadEvent.ASKED: LoadState.ASKING,
    LoadEvent.STARTED: LoadState.READING,
    LoadEvent.FAILED: LoadState.OVER,
}
TRANSITIONS: Final[Mapping[LoadState, Mapping[LoadEvent, LoadState]]] = {
    LoadState.WAITING: {**NEXT_PART, LoadEvent.READ: LoadState.CONFIRMING},  # the latter if nothing is lacking
    LoadState.QUEUED: {LoadEvent.ROOM: LoadState.WAITING, LoadEvent.FAILED: LoadState.OVER},
    LoadState.ASKING: {LoadEvent.STARTED: LoadState.READING, LoadEvent.FAILED: LoadState.OVER},
    LoadState.READING: {
        LoadEvent.ASKED: LoadState.ASKING,
        LoadEvent.FAILED: LoadState.OVER,
        LoadEvent.LANDED: LoadState.COPYING,
        LoadEvent.READ: LoadState.CONFIRMING,
        LoadEvent.CANCELLED: LoadState.GIVING_UP,
    },
    LoadState.COPYING: {
        **NEXT_PART,
        LoadEvent.READ: LoadState.CONFIRMING,
        LoadEvent.CANCELLED: LoadState.GIVING_UP,
    },
    LoadState.GIVING_UP: {LoadEvent.LET_GO: LoadState.OVER},
    LoadState.CONFIRMING: {LoadEvent.CONFIRMED: LoadState.OVER, LoadEvent.FAILED: LoadState.OVER},
    LoadState.OVER: {},
}
UNDER_WAY: Final = (LoadState.READING, LoadState.COPYING)  # something is written into our memory


class Order(NamedTuple):
    """What the scheduler asks a worker to load."""

    request: RequestId  # ours
    remote_request: RequestId  # P's
    engine: EngineId
    address: Address
    stretches: Sequence[Stretch]  # one for each KV cache group that lacks something


@dataclass(slots=True)
class Load:
    """One load, as far as it has come."""

    order: Order
    state: LoadState = LoadState.WAITING
    deadline: float = inf  # of the step that is under way
    parts: deque[list[Stretch]] = field(default_factory=deque[list[Stretch]])  # what is left to read, once P is met
    number: int = 0  # of the part that is under way
    slots: GroupSlots = ()  # of our staging buffer
    flights: set[TransferId] = field(default_factory=set[TransferId])
    copy: CopyId | None = None

    @property
    def is_touched(self) -> bool:
        """Whether something is still written into our memory."""
        return bool(self.flights) or self.copy is not None

    def on(self, event: LoadEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = follow(TRANSITIONS, self.state, event, f"load of {self.order.request}")
