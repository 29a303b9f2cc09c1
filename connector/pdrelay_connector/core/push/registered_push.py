"""The pushes that decode engines have registered: their state over all workers, and for whom."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from pdrelay_connector.core.ids import ConnId, EngineId, RequestId
from pdrelay_connector.core.messages import RankInfo, RankSums, RegisterPush
from pdrelay_connector.core.state_machine import transition


class PushState(Enum):
    """State of a push to one reader, over all workers."""

    OPEN = auto()
    STOPPING = auto()  # workers have been told to stop
    OVER = auto()


class PushEvent(Enum):
    """What can happen to it."""

    WRITTEN = auto()  # by the last worker
    STOPPED = auto()
    DRAINED = auto()  # no worker writes any more


TRANSITIONS: Final[Mapping[PushState, Mapping[PushEvent, PushState]]] = {
    PushState.OPEN: {PushEvent.WRITTEN: PushState.OVER, PushEvent.STOPPED: PushState.STOPPING},
    PushState.STOPPING: {PushEvent.DRAINED: PushState.OVER},
    PushState.OVER: {},
}


@dataclass(slots=True)
class RegisteredPush:
    """One push to one reader."""

    peer: ConnId
    order: RegisterPush
    writing_ranks: set[int]  # ranks that write, or may
    state: PushState = PushState.OPEN
    reason: str = ""  # why it stopped
    lease_lost: bool = False  # because the lease was over
    sums: list[RankSums] = field(default_factory=list[RankSums])  # of the workers that have written

    @property
    def key(self) -> "PushKey":
        """Whom it is for."""
        return PushKey(self.peer, self.order.reader)

    def on(self, event: PushEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = transition(TRANSITIONS, self.state, event, f"the push to {self.order.reader}")


class PushKey(NamedTuple):
    """Whom a push is for."""

    peer: ConnId
    reader: RequestId


@dataclass(slots=True)
class DrainingPush:
    """A push whose decode engine has disconnected, while workers may still write."""

    engine: EngineId | None
    writing_ranks: set[int]
    asker: ConnId | None = None  # the connection over which that engine wants to hear of its end


@dataclass(slots=True)
class DecodePeer:
    """A decode engine: the memory of its ranks, and its registrations."""

    engine: EngineId | None = None
    ranks: dict[int, RankInfo] = field(default_factory=dict[int, RankInfo])  # by worker
    pushes: dict[RequestId, RegisteredPush] = field(default_factory=dict[RequestId, RegisteredPush])
    # blocks of all pushes, by KV cache group
    lent: Counter[int] = field(default_factory=Counter[int])
    # blocks that there are, by KV cache group
    capacity: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def is_known(self) -> bool:
        """Whether the memory of all its ranks is known."""
        return bool(self.ranks) and len(self.ranks) == next(iter(self.ranks.values())).workers

    def can_lend(self, order: RegisterPush) -> bool:
        """Whether it can lend these blocks, too: it cannot lend a block twice."""
        return all(
            self.lent[group] + blocks <= self.capacity.get(group, 0)
            for group, blocks in _blocks(order).items()
        )

    def add_rank(self, rank: RankInfo) -> bool:
        """Add the memory of a rank; false: it is impossible, or contradicts an earlier one."""
        first = next(iter(self.ranks.values()), rank)
        if (
            rank.rank >= rank.ranks
            or rank.stage >= rank.stages
            or (rank.ranks, rank.stages) != (first.ranks, first.stages)
            or self.ranks.setdefault(rank.worker, rank) != rank
        ):
            return False
        self.capacity.update({region.group: region.blocks for region in rank.regions})
        return True

    def add(self, push: RegisteredPush) -> None:
        """Take a registration in."""
        self.pushes[push.order.reader] = push
        self.lent.update(_blocks(push.order))

    def remove(self, push: RegisteredPush) -> None:
        """Forget one that is over."""
        del self.pushes[push.order.reader]
        self.lent.subtract(_blocks(push.order))


def _blocks(order: RegisterPush) -> dict[int, int]:
    """Return how many blocks of each KV cache group are lent."""
    return {group: len(lent.blocks) for group, lent in enumerate(order.groups)}
