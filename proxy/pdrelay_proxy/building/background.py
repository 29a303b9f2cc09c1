"""Builds the work beside requests: discovery, and the checks of engines."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from pdrelay_proxy.building.engines import EngineSide
from pdrelay_proxy.building.requests import RequestSide
from pdrelay_proxy.core.fleet.probe_schedule import OtherProbes
from pdrelay_proxy.core.schemas.feature_status import FeatureStatus
from pdrelay_proxy.io.discovery.discovery import Discovery
from pdrelay_proxy.io.probes.engine_metrics_watch import EngineMetricsWatch
from pdrelay_proxy.io.probes.metrics_listener import MetricsListener
from pdrelay_proxy.io.probes.prober import Prober
from pdrelay_proxy.io.status import Status
from pdrelay_proxy.settings import Settings


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """The work beside requests, and its status."""

    status: Status
    # new contexts for each start, entered in this order
    running: Callable[[], Sequence[AbstractAsyncContextManager[object]]]


def build_background(
    settings: Settings,
    engines: EngineSide,
    serving: RequestSide,
    discovery: Discovery,
    shown: Sequence[Callable[[], FeatureStatus | None]],
    *,
    other_probes: OtherProbes | None,
    metrics_listeners: Sequence[MetricsListener],
    clock: Callable[[], float],
) -> BackgroundWork:
    """Build it. Raises ConfigError.

    ``shown``: features' parts of the status page. ``other_probes``: the probes of other routers.
    ``metrics_listeners``: learn from the metrics of engines.
    """
    registry = engines.registry
    telemetry = serving.telemetry
    admission = serving.gate.admission
    prober = Prober(
        registry,
        engines.checks,
        settings,
        clock,
        random.random,
        give_up=engines.wire.pool.give_up,
        others=other_probes,
        warnings=engines.warnings,
    )
    every_s = settings.engine_metrics_interval_s
    metrics_watch = EngineMetricsWatch(
        registry,
        engines.checks.metrics,
        telemetry,
        metrics_listeners,
        every_s=every_s,
        clock=clock,
    )
    status = Status(
        telemetry,
        registry,
        admission,
        clock,
        may_be_alone=lambda: serving.requests.services.settings.current.decode_only_fallback,
        features=shown,
        warnings=engines.warnings,
        preference=serving.fleet.preference,
    )

    def running() -> Sequence[AbstractAsyncContextManager[object]]:
        return (
            discovery.running(),
            prober.running(),
            metrics_watch.running(),
        )

    return BackgroundWork(status, running)
