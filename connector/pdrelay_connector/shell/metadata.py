"""Messages between the scheduler and the workers of one engine, in vLLM's types."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pdrelay_connector.core.ids import RequestId
from pdrelay_connector.core.messages import Fingerprint, RankInfo, RankSums
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.push.push_job import ComputedBlocks, TransferOver
from pdrelay_connector.core.results import LoadResult
from pdrelay_connector.core.verify.sampling import SampledBlock


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, at start and after each sleep: this rank's description for peers."""

    rank: RankInfo  # memory that is read from, in pull, or pushed from
    landing: RankInfo  # memory that is pushed into
    fingerprint: Fingerprint
    token: bytes = b""  # authenticates the worker at its own scheduler, in push
    generation: int = 0  # how often this rank has slept (core/sleep.py)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    orders: list[LoadOrder] = field(default_factory=list[LoadOrder])
    # of a step that computes tokens, where its end must be known; 0: report nothing
    number: int = 0
    idle: bool = False  # the step computes no tokens, so it may wait a moment for a transfer
    pieces: list[ComputedBlocks | TransferOver] = field(
        default_factory=list[ComputedBlocks | TransferOver]
    )  # push: computed blocks, and ended transfers
    arrived: list[LoadResult] = field(default_factory=list[LoadResult])  # push: ended loads
    # push: loads that may begin when the workers have begun this step (offloaded_blocks.py)
    deferred: list[RequestId] = field(default_factory=list[RequestId])
    # pull: the blocks of finished prefills of which checksums are to be taken
    sampled: dict[RequestId, tuple[SampledBlock, ...]] = field(
        default_factory=dict[RequestId, tuple[SampledBlock, ...]]
    )


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: requests whose blocks NIXL may still write into, or no longer.

    Each rank adds its entries. ``step``: the number of its step, equal on all ranks. ``sums``: the
    checksums that the step ordered, by rank. ``deferred``: as in :class:`StepMetadata`, equal on
    all ranks.
    """

    quarantined: list[RequestId] = field(default_factory=list[RequestId])
    released: list[RequestId] = field(default_factory=list[RequestId])
    step: int = 0
    sums: dict[RequestId, list[RankSums]] = field(default_factory=dict[RequestId, list[RankSums]])
    deferred: list[RequestId] = field(default_factory=list[RequestId])

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Append the entries of another rank."""
        if not isinstance(other, WorkerMetadata):
            raise TypeError(f"{type(other).__name__} is no WorkerMetadata")
        return WorkerMetadata(
            self.quarantined + other.quarantined,
            self.released + other.released,
            min(self.step, other.step),
            {
                name: self.sums.get(name, []) + other.sums.get(name, [])
                for name in {**self.sums, **other.sums}
            },
            self.deferred,
        )
