"""Has a router learn of pairs of engines: which cannot meet, and which way of their KV is
faster.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.features.feature import Core, Feature, FeatureParts, Ground
from pdrelay_proxy.features.pairs.core.pair_matrix import PAIRS_KEPT, PairMatrix
from pdrelay_proxy.features.pairs.core.pair_modes import PairModes, link_kind
from pdrelay_proxy.features.pairs.io.pair_notes import PairNotes
from pdrelay_proxy.features.pairs.pair_watch import PairWatch
from pdrelay_proxy.features.pairs.pairs_route import pair_routes
from pdrelay_proxy.features.pairs.status_part import status_part
from pdrelay_proxy.io.metric_families import Family, counter_family, gauge_family
from pdrelay_proxy.io.request_path.telemetry import HearEnded


class PairsFeature(Feature):
    """Notes what requests and decode engines show of pairs."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        registry = ground.engines.registry
        modes = PairModes(kind=partial(link_kind, registry.get))
        self._notes = PairNotes(registry, PairMatrix(PAIRS_KEPT), modes)

    def routing(self) -> RoutingParts:
        """Return the history of pairs."""
        return RoutingParts(pair_history=self._notes)

    def hears_ended(self) -> HearEnded:
        """Have it hear of requests that are over."""
        return self._notes.ended

    def parts(self, core: Core) -> FeatureParts:
        """Return the route, the metrics, a part of the status page, and what reads of pairs in
        engines' metrics.
        """
        later = core.serving.telemetry.later

        def settled() -> PairNotes:
            later.settle()
            return self._notes

        watch = PairWatch(self.ground.engines.registry, self._notes)
        routes = partial(pair_routes, settled, self.ground.clock)
        return FeatureParts(
            routes=(routes,),
            status=partial(status_part, settled, self.ground.clock),
            families=partial(pair_families, self._notes),
            metrics_listeners=(watch,),
        )


def pair_families(notes: PairNotes) -> Iterator[Family]:
    """Return the metrics."""
    text = (
        "Transfers between two engines that failed, as decode engines show them, "
        "and by legs that ended with 5xx."
    )
    yield from counter_family("pdrelay_pair_failures", text, ("reason",), notes.health.failures)
    text = "Pairs of engines that were forgotten to make room for others."
    yield from counter_family("pdrelay_pairs_dropped", text, (), notes.matrix.counts)
    text = "Pairs of engines that get no requests, because their transfers fail."
    resting = [((), notes.health.resting)]
    yield gauge_family("pdrelay_pairs_resting", text, (), resting)


FEATURE: Final = PairsFeature
