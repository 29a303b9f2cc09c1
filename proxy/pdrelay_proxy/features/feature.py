"""The places where a feature may add something to a router."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter

from pdrelay_proxy.api.operator_route import OperatorAccess
from pdrelay_proxy.building.engines import EngineSide
from pdrelay_proxy.building.requests import RequestSide
from pdrelay_proxy.core.fleet.compatibility import PairsWithin
from pdrelay_proxy.core.fleet.probe_schedule import OtherProbes
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.core.schemas.feature_status import FeatureStatus
from pdrelay_proxy.io.background import Running
from pdrelay_proxy.io.discovery.reconciler import Discovery, EngineFeed
from pdrelay_proxy.io.metric_families import Family
from pdrelay_proxy.io.probes.metrics_listener import MetricsListener
from pdrelay_proxy.io.request_path.telemetry import HearEnded
from pdrelay_proxy.io.worker_place import WorkerPlace
from pdrelay_proxy.requests.claims import CallClaims
from pdrelay_proxy.requests.services import Spans
from pdrelay_proxy.settings import Settings


@dataclass(frozen=True, slots=True)
class Ground:
    """What every feature is built on."""

    settings: Settings
    engines: EngineSide
    clock: Callable[[], float]  # seconds; only differences count
    place: WorkerPlace | None = None  # that of one of several workers


@dataclass(frozen=True, slots=True)
class Core:
    """A router that is built but for its features."""

    serving: RequestSide
    discovery: Discovery
    wall: Callable[[], float]  # seconds of a clock that hosts have in common


@dataclass(frozen=True, slots=True)
class FeatureParts:
    """What a feature adds to a router."""

    # tasks, for as long as the router serves; the first begins first
    running: Sequence[Running] = ()
    routes: Sequence[Callable[[OperatorAccess], APIRouter]] = ()  # for operators
    # a part of the status page, in plain texts
    status: Callable[[], FeatureStatus | None] = lambda: None
    # of metrics; None: a step without any
    families: Callable[[], Iterator[Family | None]] = lambda: iter(())
    # learn from the metrics of engines, which are read in rounds
    metrics_listeners: Sequence[MetricsListener] = ()
    # those of other routers; only one feature may have them
    other_probes: OtherProbes | None = None


class Feature:
    """One feature of one router. Each method may be left out."""

    def __init__(self, ground: Ground) -> None:
        """Begin it, before what serves requests is built. Raises ConfigError."""
        self.ground = ground

    @staticmethod
    def check(settings: Settings, /) -> None:
        """Raise ConfigError if settings contradict each other."""

    @staticmethod
    def finds_engines(settings: Settings, /) -> bool:
        """Tell whether ``feed`` will name engines, so that the settings need not."""
        del settings
        return False

    @staticmethod
    def has_other_routers(settings: Settings, /) -> bool:
        """Tell whether it has other routers, or several workers, share loads and limits with this
        one.
        """
        del settings
        return False

    @staticmethod
    def pairs_within(settings: Settings, /) -> PairsWithin | None:
        """Return what the partners of an engine must have, too, by its slice; None: nothing but
        what has to fit.
        """
        del settings
        return None

    def feed(self) -> EngineFeed | None:
        """Return what tells the router which engines there are, while it serves."""
        return None

    def routing(self) -> RoutingParts:
        """Return what it adds to the choice of engines. Raises ConfigError."""
        return RoutingParts()

    def hears_ended(self) -> HearEnded | None:
        """Return what is told of requests that are over, some at a time; it must not wait or
        raise.
        """
        return None

    def spans(self) -> Spans | None:
        """Return what opens a span for each request and for each of its legs."""
        return None

    def claims(self) -> CallClaims | None:
        """Return what tells requests that it answers itself, by requests of its own; None: it
        answers none.
        """
        return None

    def parts(self, core: Core) -> FeatureParts:
        """Return what it adds besides. Raises ConfigError."""
        del core
        return FeatureParts()
