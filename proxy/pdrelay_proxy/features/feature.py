"""The base class of features, with all hooks by which one may add to a router."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter

from pdrelay_proxy.api.operator_route import OperatorAccess
from pdrelay_proxy.building.engines import EngineSide
from pdrelay_proxy.building.requests import RequestSide
from pdrelay_proxy.core.fleet.compatibility import PairsWithin
from pdrelay_proxy.core.fleet.probe_schedule import OtherProbes
from pdrelay_proxy.core.protocol.stream_opening import StreamOpenings
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.core.schemas.feature_status import FeatureStatus
from pdrelay_proxy.io.background import Running
from pdrelay_proxy.io.discovery.discovery import Discovery
from pdrelay_proxy.io.discovery.reconciler import EngineFeed
from pdrelay_proxy.io.discovery.store import SharedStore
from pdrelay_proxy.io.metric_families import Family
from pdrelay_proxy.io.probes.metrics_listener import MetricsListener
from pdrelay_proxy.io.request_path.telemetry import HearEnded
from pdrelay_proxy.io.worker_place import WorkerPlace
from pdrelay_proxy.requests.claims import CallClaims
from pdrelay_proxy.requests.request_set import MakeWatcher
from pdrelay_proxy.requests.services import Spans
from pdrelay_proxy.settings import Settings


@dataclass(frozen=True, slots=True)
class Ground:
    """The part of a router that is built before its features."""

    settings: Settings
    engines: EngineSide
    clock: Callable[[], float]  # seconds; only differences count
    place: WorkerPlace | None = None  # that of one of several workers


@dataclass(frozen=True, slots=True)
class Core:
    """A router that is complete but for its features."""

    serving: RequestSide
    discovery: Discovery
    wall: Callable[[], float]  # seconds of a clock that hosts have in common


@dataclass(frozen=True, slots=True)
class FeatureParts:
    """What a feature adds to a router."""

    # tasks that run while the router serves, started in this order
    running: Sequence[Running] = ()
    routes: Sequence[Callable[[OperatorAccess], APIRouter]] = ()  # for operators
    # a section of the status page, in plain text
    status: Callable[[], FeatureStatus | None] = lambda: None
    # metrics; None: gives way to other work
    families: Callable[[], Iterator[Family | None]] = lambda: iter(())
    # learn from the metrics of engines, which are read in rounds
    metrics_listeners: Sequence[MetricsListener] = ()
    # the probes of other routers; at most one feature has them
    other_probes: OtherProbes | None = None


class Feature:
    """One feature of one router. Every method has a default."""

    def __init__(self, ground: Ground) -> None:
        """Called before the request side of the router is built. Raises ConfigError."""
        self.ground = ground

    @staticmethod
    def check(settings: Settings, /) -> None:
        """Raise ConfigError if settings contradict each other."""

    @staticmethod
    def finds_engines(settings: Settings, /) -> bool:
        """Tell whether it finds engines, so that the settings need not name any."""
        del settings
        return False

    @staticmethod
    def has_other_routers(settings: Settings, /) -> bool:
        """Tell whether other routers, or workers, share loads and limits with this one."""
        del settings
        return False

    @staticmethod
    def pairs_within(settings: Settings, /) -> PairsWithin | None:
        """Return a rule by which a slice limits an engine's partners; None: no rule."""
        del settings
        return None

    @staticmethod
    def shared_store(settings: Settings, /) -> SharedStore | None:
        """Return where routers keep the engines that operators add; None: in memory."""
        del settings
        return None

    @staticmethod
    def for_workers(settings: Settings, folder: Callable[[], str], /) -> Sequence[object]:
        """Return settings of features that workers have in common, in place of the operator's.

        ``folder``: makes a folder for all workers, and returns its path; raises ConfigError.
        """
        del settings, folder
        return ()

    def feed(self) -> EngineFeed | None:
        """Return a source of engines that runs while the router serves."""
        return None

    def routing(self) -> RoutingParts:
        """Return its parts of the choice of engines. Raises ConfigError."""
        return RoutingParts()

    def hears_ended(self) -> HearEnded | None:
        """Return a callback for finished requests, some at a time; it must not wait or raise."""
        return None

    def spans(self) -> Spans | None:
        """Return a factory of spans for requests and their legs."""
        return None

    def claims(self) -> CallClaims | None:
        """Return what tells requests that it answers itself, by requests of its own; None: it
        answers none.
        """
        return None

    def openings(self) -> StreamOpenings | None:
        """Return what begins streams with prefill engines' answers; None: it begins none."""
        return None

    def watcher(self) -> MakeWatcher | None:
        """Return what makes its watcher of the requests under way; None: it watches none."""
        return None

    def parts(self, core: Core) -> FeatureParts:
        """Return its tasks, routes, metrics and status. Raises ConfigError."""
        del core
        return FeatureParts()
