"""What travels between our two halves inside one engine."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from xpyd_connector.core.ids import RequestId
from xpyd_connector.core.messages import Fingerprint, RankInfo
from xpyd_connector.core.pull.load import LoadOrder
from xpyd_connector.core.push.push_job import ComputedBlocks, TransferOver
from xpyd_connector.core.results import LoadResult


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: what a peer must know of this rank."""

    rank: RankInfo  # what is read from it, or written by it
    landing: RankInfo  # what is written into it
    fingerprint: Fingerprint
    token: bytes = b""  # what this worker proves itself with to its scheduler, in push


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    orders: list[LoadOrder] = field(default_factory=list[LoadOrder])
    idle: bool = False  # nothing is computed in this step: it may wait a moment for a transfer
    pieces: list[ComputedBlocks | TransferOver] = field(
        default_factory=list[ComputedBlocks | TransferOver]
    )  # push: what is computed, and what is over
    arrived: list[LoadResult] = field(default_factory=list[LoadResult])  # push: what the scheduler knows to have ended


@dataclass
class QuarantineMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: whose blocks NIXL may still write into, and whose no longer. Once for each rank."""

    quarantined: list[RequestId] = field(default_factory=list[RequestId])
    released: list[RequestId] = field(default_factory=list[RequestId])

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "QuarantineMetadata":
        """Add what another rank says."""
        if not isinstance(other, QuarantineMetadata):
            raise TypeError(f"{type(other).__name__} is not ours")
        return QuarantineMetadata(self.quarantined + other.quarantined, self.released + other.released)
