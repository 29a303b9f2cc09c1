"""One push on a prefill worker: its computed blocks, its decode engine, and its state."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from pdrelay_connector.core.ids import BlockId, ConnId, RequestId
from pdrelay_connector.core.messages import RankInfo, RegisterPush
from pdrelay_connector.core.push.part_writer import PartWriteId
from pdrelay_connector.core.state_machine import transition
from pdrelay_connector.core.transfer.remote_memory import RemoteRank


class ComputedBlocks(NamedTuple):
    """What engine steps have computed of a prompt since the last report."""

    request: RequestId  # the transfer's name
    prompt: str | None  # its digest
    attempt: int  # grows when the prefill starts again: what came before is void
    # of each KV cache group, the blocks after those of earlier pieces
    groups: Sequence[Sequence[BlockId]]
    tokens: int  # how many are computed, from the first on
    last: bool  # the prompt is complete
    # groups whose new blocks vLLM zeroes unless they are filled: all of each block is written
    zeroed: Set[int] = frozenset()


class TransferOver(NamedTuple):
    """A transfer or its prefill is over: its blocks must not be read, and its id may be reused.

    It travels with the engine's steps, as :class:`ComputedBlocks` does, so never before it.
    """

    request: RequestId


class PushJobState(Enum):
    """State of a push to one reader, on one worker."""

    OPEN = auto()
    STOPPING = auto()  # nothing more is written; waits for what is in flight
    OVER = auto()


class PushJobEvent(Enum):
    """What can happen to it."""

    COMPLETED = auto()
    STOPPED = auto()
    DRAINED = auto()  # nothing is in flight any more


TRANSITIONS: Final[Mapping[PushJobState, Mapping[PushJobEvent, PushJobState]]] = {
    PushJobState.OPEN: {
        PushJobEvent.COMPLETED: PushJobState.OVER,
        PushJobEvent.STOPPED: PushJobState.STOPPING,
    },
    PushJobState.STOPPING: {PushJobEvent.DRAINED: PushJobState.OVER},
    PushJobState.OVER: {},
}


@dataclass(slots=True)
class PromptBlocks:
    """One prompt, as far as it is computed here."""

    prompt: str | None
    attempt: int
    groups: list[list[BlockId]]
    zeroed: Set[int]  # as in ComputedBlocks
    tokens: int = 0
    complete: bool = False


@dataclass(slots=True)
class PushJob:
    """One push to one reader."""

    peer: ConnId
    order: RegisterPush
    state: PushJobState = PushJobState.OPEN
    attempt: int = 0
    posted: int = 0  # tokens from the first on that are written or being written
    parts: set[PartWriteId] = field(default_factory=set[PartWriteId])  # under way
    reason: str = ""  # why it ceases
    # our scheduler has lost us: report nothing unless it names the job again
    is_forgotten: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be written."""
        return self.state is not PushJobState.OPEN

    def on(self, event: PushJobEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = transition(TRANSITIONS, self.state, event, f"the push to {self.order.reader}")


@dataclass(slots=True)
class DecodeTarget:
    """A decode engine that we write to."""

    engine: str = ""  # its id
    remote_ranks: dict[int, RemoteRank] = field(
        default_factory=dict[int, RemoteRank]
    )  # its ranks that take something of ours
    rank: RankInfo | None = None  # one of its ranks that have layers of ours
    # tokens, by KV cache group, of these ranks
    block_sizes: dict[int, int] = field(default_factory=dict[int, int])
    objection: str = ""  # why its memory cannot be used
