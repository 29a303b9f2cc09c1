"""A push that a decode engine expects of a prefill engine (P): what is lent, and its state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from pdrelay_connector.core.ids import Address, EngineId, RequestId
from pdrelay_connector.core.messages import LentBlocks, RankSums
from pdrelay_connector.core.state_machine import transition


class ReceiveState(Enum):
    """State of an expected push."""

    QUEUED = auto()  # for room in our staging buffer
    WAITING = auto()  # for P to be met, or to answer over a connection that has been quiet for long
    REGISTERED = auto()  # P may write
    STOPPING = auto()  # reported as failed; P may still write until it sends PushStopped
    QUARANTINED = auto()  # aborted, and P is gone: what it sent may still arrive
    COPYING = auto()  # from our staging buffer into the cache
    ABORTING = auto()  # given up while it is copied
    OVER = auto()


class ReceiveEvent(Enum):
    """What can happen to an expected push."""

    SLOTS_GRANTED = auto()
    REGISTERED = auto()
    STAGED = auto()  # complete in our host buffer
    DONE = auto()  # in the cache
    FAILED = auto()  # and P does not write
    ABORTED = auto()
    PEER_LOST = auto()
    PEER_BACK = auto()
    RELEASED = auto()


TRANSITIONS: Final[Mapping[ReceiveState, Mapping[ReceiveEvent, ReceiveState]]] = {
    ReceiveState.QUEUED: {
        ReceiveEvent.SLOTS_GRANTED: ReceiveState.WAITING,
        ReceiveEvent.FAILED: ReceiveState.OVER,
    },
    ReceiveState.WAITING: {
        ReceiveEvent.REGISTERED: ReceiveState.REGISTERED,
        ReceiveEvent.FAILED: ReceiveState.OVER,
    },
    ReceiveState.REGISTERED: {
        ReceiveEvent.STAGED: ReceiveState.COPYING,
        ReceiveEvent.DONE: ReceiveState.OVER,
        ReceiveEvent.FAILED: ReceiveState.OVER,
        ReceiveEvent.ABORTED: ReceiveState.STOPPING,
        ReceiveEvent.PEER_LOST: ReceiveState.QUARANTINED,
    },
    ReceiveState.STOPPING: {
        ReceiveEvent.RELEASED: ReceiveState.OVER,
        ReceiveEvent.PEER_LOST: ReceiveState.QUARANTINED,
    },
    ReceiveState.QUARANTINED: {
        ReceiveEvent.RELEASED: ReceiveState.OVER,
        ReceiveEvent.PEER_BACK: ReceiveState.STOPPING,
    },
    ReceiveState.COPYING: {
        ReceiveEvent.DONE: ReceiveState.OVER,
        ReceiveEvent.FAILED: ReceiveState.OVER,
        ReceiveEvent.ABORTED: ReceiveState.ABORTING,
    },
    ReceiveState.ABORTING: {ReceiveEvent.RELEASED: ReceiveState.OVER},
    ReceiveState.OVER: {},
}


class PushOrder(NamedTuple):
    """What the scheduler asks for: the blocks to lend, of each KV cache group."""

    request: RequestId  # ours
    remote_request: RequestId  # the transfer's name
    engine: EngineId
    address: Address
    prompt: str | None  # its digest
    groups: Sequence[LentBlocks]


@dataclass(slots=True)
class ExpectedPush:
    """One push into our blocks."""

    order: PushOrder
    state: ReceiveState = ReceiveState.WAITING
    lent: Sequence[LentBlocks] = ()  # what P may write into: our blocks, or slots
    sums: Sequence[RankSums] = ()  # of what it has written, if it has sampled the prefill

    def on(self, event: ReceiveEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = transition(TRANSITIONS, self.state, event, f"landing of {self.order.request}")

    @property
    def has_failed(self) -> bool:
        """Whether it has failed, and something may still write into what was lent."""
        return self.state in (
            ReceiveState.STOPPING,
            ReceiveState.QUARANTINED,
            ReceiveState.ABORTING,
        )

    @property
    def ignores_peer(self) -> bool:
        """Whether what P says or does makes no difference any more, or not yet."""
        return self.state in (
            ReceiveState.QUEUED,
            ReceiveState.QUARANTINED,
            ReceiveState.COPYING,
            ReceiveState.ABORTING,
        )
