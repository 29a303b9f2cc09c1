"""What travels between our two halves inside one engine."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from xpyd_connector.core.messages import Fingerprint, RankInfo
from xpyd_connector.core.reader import Order


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: what a peer must know of this rank."""

    rank: RankInfo
    fingerprint: Fingerprint


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    orders: list[Order] = field(default_factory=list[Order])
    idle: bool = False  # nothing is computed in this step: it may wait a moment for a transfer
