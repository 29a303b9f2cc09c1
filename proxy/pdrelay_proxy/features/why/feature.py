"""Puts timelines and traces into a router."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Set
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from pdrelay_proxy.building.requests import PATHS
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.feature import Core, Feature, FeatureParts, Ground
from pdrelay_proxy.features.why.engine_spans import EngineSpans, HearEnd
from pdrelay_proxy.features.why.engine_timelines import Timelines
from pdrelay_proxy.features.why.request_history import RequestHistory
from pdrelay_proxy.features.why.request_timeline import Timeline
from pdrelay_proxy.features.why.requests_route import request_routes
from pdrelay_proxy.features.why.settings import WhySettings
from pdrelay_proxy.io.request_path.telemetry import HearEnded
from pdrelay_proxy.requests.services import Spans

if TYPE_CHECKING:
    from pdrelay_proxy.features.why.traces import Traces


class WhyFeature(Feature):
    """Keeps the latest finished requests, builds their timelines, and exports spans."""

    def __init__(
        self, ground: Ground, make_traces: "Callable[[HearEnd], Traces] | None" = None
    ) -> None:
        """``make_traces``: for a test; None: by the settings. Raises ConfigError."""
        super().__init__(ground)
        chosen = ground.settings.for_feature(WhySettings)
        self._timelines = Timelines(ground.engines.registry, ground.engines.checks, ground.clock)
        self._history = RequestHistory(chosen.request_history)
        self._engine_spans = EngineSpans(self._rows, ground.clock)
        make_traces = make_traces or _trace_maker(chosen.otlp_endpoint)
        self._traces = None if make_traces is None else make_traces(self._engine_spans.offer)

    def hears_ended(self) -> HearEnded:
        """Return the history's callback."""
        return self._history.add

    def spans(self) -> Spans | None:
        """Return the traces; None: no collector is set."""
        return self._traces

    def parts(self, core: Core) -> FeatureParts:
        """Return the route, and the tasks of traces."""
        telemetry = core.serving.telemetry
        requests = core.serving.requests

        def history() -> RequestHistory:
            telemetry.later.settle()
            return self._history

        routes = partial(
            request_routes,
            history,
            lambda: [(request.record, request.state) for request in requests],
            self._timelines,
        )
        if self._traces is None:
            return FeatureParts(routes=(routes,))
        running = partial(_closing, self._traces), self._engine_spans.running
        return FeatureParts(running, (routes,), families=self._engine_spans.families)

    def _rows(
        self, record: RequestRecord, without: Set[InstanceId]
    ) -> Awaitable[tuple[float, Timeline]]:
        """Return the timeline of a finished request, without some engines."""
        return self._timelines.for_request(record, is_over=True, asks_engines=True, without=without)


@asynccontextmanager
async def _closing(traces: "Traces") -> AsyncGenerator[None]:
    """Export the remaining spans at the end of the block."""
    try:
        yield
    finally:
        await asyncio.to_thread(traces.close)


def _trace_maker(endpoint: str | None) -> "Callable[[HearEnd], Traces] | None":
    """Return a factory of traces; None: no collector is set."""
    if endpoint is None:
        return None
    try:
        from pdrelay_proxy.features.why.traces import Traces  # noqa: PLC0415 (what it imports is an extra)
    except ImportError as exc:
        missing = "spans are asked for (otlp_endpoint), but OpenTelemetry is not installed"
        raise ConfigError(f"{missing}: pip install 'pdrelay[tracing]'") from exc
    return partial(Traces.to, endpoint, PATHS)


FEATURE: Final = WhyFeature
