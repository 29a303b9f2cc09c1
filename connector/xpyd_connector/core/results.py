"""How the KV of a request fares, as the engine must know it; pull and push report the same."""

from typing import NamedTuple

from xpyd_connector.core.ids import RequestId


class Result(NamedTuple):
    """A load ended; ``failure`` is empty when the blocks hold the right bytes.

    If it ``lingers``, its blocks must not be used by anybody before a :class:`LetGo` of the same request.
    """

    request: RequestId
    failure: str
    lingers: bool = False


class LetGo(NamedTuple):
    """Nothing can write any more into the blocks of a load that failed before."""

    request: RequestId


class LeaseLost(NamedTuple):
    """P does not hold the blocks for a request of ours any more: if nothing reads them yet, nothing must."""

    request: RequestId
