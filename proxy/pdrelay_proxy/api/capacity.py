"""GET /capacity: how much more the engines behind this router can take, for what chooses among several fleets."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Response

from pdrelay_proxy.api.error_answers import error_answers
from pdrelay_proxy.api.page import PAGE_HEADERS, Onlookers
from pdrelay_proxy.api.schemas import CapacityReport, EngineCounts, ErrorResponse
from pdrelay_proxy.core.admission.lifetime import Lifetime, Stage
from pdrelay_proxy.core.capacity import Admitted, Capacity, capacity_of
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.workers.reports import Whole
from pdrelay_proxy.errors import BadRequest
from pdrelay_proxy.io.discovery.reconciler import Discovery
from pdrelay_proxy.settings import Settings

KEPT_S: Final = 1.0  # for which an answer is given again: whoever asks often costs no more
# A whole number for the document; what else comes is refused in a sentence.
_LEAST: Final[dict[str, Any]] = {
    "name": "least",
    "in": "query",
    "required": False,
    "description": "The weight below which the answer is 503",
    "schema": {"type": "integer", "minimum": 0, "maximum": 100, "default": 1},
}


class CapacityMeter:
    """Adds up what this router knows, at most once a second."""

    def __init__(
        self,
        registry: Registry,
        discovery: Discovery,
        lifetime: Lifetime,
        settings: Callable[[], Settings],
        *,
        everybody: Callable[[], Awaitable[Whole]],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._discovery = discovery
        self._lifetime = lifetime
        self._settings = settings  # those in force
        self._everybody = everybody  # asks all workers
        self._clock = clock  # seconds; the one of the registry's times
        self._asking = asyncio.Lock()
        self._found: tuple[float, bool, Capacity] | None = None  # until when, whether the router was ready, and what

    async def now(self) -> Capacity:
        """Return what was found at most a second ago."""
        async with self._asking:
            is_ready = self._lifetime.stage is Stage.SERVING and not self._discovery.missing
            found = self._found
            if found is not None and self._clock() < found[0] and found[1] == is_ready:
                return found[2]
            whole, settings = await self._everybody(), self._settings()
            admitted = Admitted(
                sum(one.admitted for one in whole.all),
                sum(one.waiting for one in whole.all),
                sum(one.max_concurrency for one in whole.all),  # the settings have the share of this worker alone
            )
            now = self._clock()
            capacity = capacity_of(
                self._registry,
                admitted,
                slots=settings.decode_slots,
                is_ready=is_ready,
                decode_alone=settings.decode_only_fallback,
                now=now,
            )
            self._found = now + KEPT_S, is_ready, capacity
            return capacity


def capacity_routes(meter: CapacityMeter, onlookers: Onlookers) -> APIRouter:
    """Build the route; who may read the metrics may read it."""
    router = APIRouter(tags=["status"], dependencies=onlookers.keys)
    answers = error_answers(CapacityReport, {503: "The weight is below ``least``"})
    answers |= error_answers(ErrorResponse, {"default": "What is wrong, in one sentence"})

    @router.get(
        "/capacity",
        dependencies=[Depends(onlookers.scrapers)],
        responses=answers,
        response_model=CapacityReport,
        openapi_extra={"parameters": [_LEAST]},
    )
    async def capacity(least: Annotated[str, Query(include_in_schema=False)] = "1") -> Response:
        """Tell how much more the engines can take: 503 if that is less than ``least`` (0 to 100), else 200."""
        if not (least.isascii() and least.isdigit() and len(least) <= 3 and int(least) <= 100):
            raise BadRequest("least is not a weight: write a whole number from 0 to 100")
        return _answer(await meter.now(), int(least))

    return router


def _answer(found: Capacity, least: int) -> Response:
    report = CapacityReport(
        weight=found.weight,
        can_serve=found.can_serve,
        serving_share=round(found.share, 4),
        prefill=EngineCounts(engines=found.prefill.engines, serving=found.prefill.serving),
        decode=EngineCounts(engines=found.decode.engines, serving=found.decode.serving),
        decode_slots=found.slots,
        free_decode_slots=found.free_slots,
        kv_room=None if found.kv_room is None else round(found.kv_room, 4),
        requests_running=found.admitted.running,
        requests_waiting=found.admitted.waiting,
        max_concurrency=found.admitted.most,
        models=list(found.models),
    )
    headers = PAGE_HEADERS | {"endpoint-load-metrics": _orca(found)}
    status = 200 if found.weight >= least else 503
    return Response(report.model_dump_json(), status_code=status, headers=headers, media_type="application/json")


def _orca(found: Capacity) -> str:
    """Write an ORCA report (xds/data/orca/v3/orca_load_report.proto) as text, as vLLM does."""
    named = {
        "weight": found.weight,
        "free_decode_slots": found.free_slots,
        "kv_room": None if found.kv_room is None else round(found.kv_room, 4),
        "requests_waiting": found.admitted.waiting,
    }
    values = [f"named_metrics.{name}={value}" for name, value in named.items() if value is not None]
    return "TEXT " + ", ".join([f"application_utilization={found.utilization:.4f}", *values])
