"""``GET /pairs``: the observed pairs of engines, for operators (docs/faults.md)."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from pdrelay_proxy.api.operator_route import (
    OPERATOR_KEY,
    OPERATORS,
    OperatorAccess,
    operator_errors,
)
from pdrelay_proxy.api.stepped import in_steps
from pdrelay_proxy.features.pairs.core.pair_rows import pair_rows
from pdrelay_proxy.features.pairs.io.pair_notes import PairNotes
from pdrelay_proxy.features.pairs.schemas import PairList

_ROWS_AT_ONCE: Final = 50


def pair_routes(
    pairs: Callable[[], PairNotes], clock: Callable[[], float], access: OperatorAccess
) -> APIRouter:
    """Build the route; it needs the operator's key."""
    router = APIRouter(
        prefix="/pairs", tags=[OPERATORS], dependencies=[OPERATOR_KEY], route_class=access.route()
    )

    @router.get("", responses=operator_errors(), response_model=PairList)
    async def list_all() -> Response:
        """List the pairs of engines that fail, and those that were used lately."""
        return StreamingResponse(in_steps(_pieces(pairs(), clock())), media_type="application/json")

    return router


def _pieces(pairs: PairNotes, now: float) -> Iterator[bytes]:
    """Return all pairs as JSON, in pieces of some pairs each."""
    matrix = pairs.matrix
    health = pairs.health
    modes = pairs.modes
    head = {
        "known": len(matrix),
        "dropped": matrix.dropped,
        "resting": health.resting,
        "unkept": health.unkept,
    }
    yield msgspec.json.encode(head)[:-1] + b',"pairs":['
    rows = pair_rows(matrix, health, modes, pairs.find, now=now)
    before = b""
    while page := list(islice(rows, _ROWS_AT_ONCE)):
        yield before + msgspec.json.encode(page)[1:-1]
        before = b","
    yield b"]}"
