"""The places where a feature may add something to a router."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeAlias

from fastapi import APIRouter

from pdrelay_proxy.api.operator_route import OperatorAccess
from pdrelay_proxy.building.engines import EngineSide
from pdrelay_proxy.building.requests import RequestSide
from pdrelay_proxy.core.schemas.feature_status import FeatureStatus
from pdrelay_proxy.io.discovery.reconciler import Discovery
from pdrelay_proxy.io.metric_families import Family
from pdrelay_proxy.settings import Settings

Running: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]  # anew for each start of the server


@dataclass(frozen=True, slots=True)
class Core:
    """A router that is being built, for its features."""

    settings: Settings
    engines: EngineSide
    serving: RequestSide
    discovery: Discovery
    clock: Callable[[], float]  # seconds; only differences count
    wall: Callable[[], float]  # seconds of a clock that hosts have in common


@dataclass(frozen=True, slots=True)
class FeatureParts:
    """What a feature adds to a router."""

    running: Sequence[Running] = ()  # tasks, for as long as the router serves; the first begins first
    routes: Sequence[Callable[[OperatorAccess], APIRouter]] = ()  # for operators
    status: Callable[[], FeatureStatus | None] = lambda: None  # a part of the status page, in plain texts
    families: Callable[[], Iterator[Family | None]] = lambda: iter(())  # of metrics; None: a step without any


class Feature:
    """One feature. Each method may be left out."""

    def check(self, settings: Settings) -> None:
        """Raise ConfigError if settings contradict each other."""

    def build(self, core: Core) -> FeatureParts:
        """Return what the feature adds to a router with these settings. Raises ConfigError."""
        del core
        return FeatureParts()


def build_features(features: Sequence[Feature], core: Core) -> Sequence[FeatureParts]:
    """Build them. Raises ConfigError."""
    return [feature.build(core) for feature in features]
