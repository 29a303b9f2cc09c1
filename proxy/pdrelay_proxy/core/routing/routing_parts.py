"""What a feature adds to the choice of engines."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdrelay_proxy.core.routing.cache_reports import CacheReports
from pdrelay_proxy.core.routing.leg_listener import LegListener


@dataclass(frozen=True, slots=True)
class RoutingParts:
    """All of it; each may be left out."""

    reports: CacheReports | None = None  # what engines tell of their caches; only one feature may have it
    listeners: Sequence[LegListener] = ()  # of each leg, behind what policies that go by caches learn themselves
