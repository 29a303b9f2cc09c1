"""The outcome of a load, as the engine must know it; pull and push report the same."""

from typing import NamedTuple

from xpyd_connector.core.ids import EngineId, RequestId


class LoadResult(NamedTuple):
    """A load has ended; ``failure`` is empty if the blocks hold valid KV.

    If ``quarantined``, the blocks must not be used before :class:`BlocksReleased` of the same request.
    """

    request: RequestId
    failure: str
    quarantined: bool = False


class BlocksReleased(NamedTuple):
    """Nothing can write into the blocks of a failed load any more."""

    request: RequestId


class HandshakeEnded(NamedTuple):
    """P has been met, or answers and has an ``objection`` (or we have), or does not answer (``failure``)."""

    engine: EngineId
    objection: str = ""
    failure: str = ""
    is_final: bool = True  # False: another attempt may end otherwise


class LeaseLost(NamedTuple):
    """P holds no lease for this request of ours: a load that has not begun must not begin."""

    request: RequestId
