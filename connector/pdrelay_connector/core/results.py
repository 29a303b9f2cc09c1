"""The outcome of a load, as the engine must know it; pull and push report the same."""

from collections.abc import Sequence
from typing import NamedTuple

from pdrelay_connector.core.ids import EngineId, RequestId
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import RankSums


class LoadChecks(NamedTuple):
    """The checksums that each worker must compare before the blocks of a push are used.

    ``token_ranges`` name our blocks as local.
    """

    engine: EngineId  # the prefill engine
    sums: Sequence[RankSums]
    token_ranges: Sequence[TokenRange]


class LoadResult(NamedTuple):
    """A load has ended; ``failure`` is empty if the blocks hold valid KV.

    If ``quarantined``, the blocks must not be used before :class:`BlocksReleased` of the same
    request.
    """

    request: RequestId
    failure: str
    quarantined: bool = False
    checks: LoadChecks | None = None


class BlocksReleased(NamedTuple):
    """Nothing can write into the blocks of a failed load any more."""

    request: RequestId


class HandshakeEnded(NamedTuple):
    """A handshake's end: P is connected, incompatible (``objection``), or silent (``failure``)."""

    engine: EngineId
    objection: str = ""
    failure: str = ""
    is_final: bool = True  # False: another attempt may end otherwise
    cause: str = ""  # of an objection or failure, as vllm:pdrelay_peer_loads names it
    is_absent: bool = False  # nothing, or another engine, answers where it says that it is


class PeerLost(NamedTuple):
    """The connection to P has ended: another process may answer under its id, or P again."""

    engine: EngineId


class PeerObjects(NamedTuple):
    """A decode engine is connected to this one, but loads no KV of it."""

    engine: EngineId | None  # absent: its connection is gone
    reason: str


class NumbersDue(NamedTuple):
    """Numbers have waited for a step of the engine: they reach vLLM's metrics with one."""


class FellAsleep(NamedTuple):
    """This engine's memory is not used any more, and may go away; no peer is connected.

    With a ``failure`` it is still used, and the engine stays awake.
    """

    failure: str = ""


class LeaseLost(NamedTuple):
    """P holds no lease for this request of ours: a load that has not begun must not begin."""

    request: RequestId
