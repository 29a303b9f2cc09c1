"""Puts the pairing of engines by slice into a router."""

from collections.abc import Iterator, Mapping
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import NO_SLICE, PairsWithin
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.features.feature import Core, Feature, FeatureParts, Ground
from pdrelay_proxy.features.slices.core.slice_preference import SlicePreference, slice_sizes
from pdrelay_proxy.features.slices.settings import SlicePairing, SliceSettings
from pdrelay_proxy.io.metric_families import Family, counter_family, gauge_family
from pdrelay_proxy.settings import Settings


class SlicesFeature(Feature):
    """Prefers or requires one slice for both engines of a request."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._pairing = ground.settings.for_feature(SliceSettings).slice_pairing
        prefers = self._pairing is SlicePairing.PREFER
        self._preference = SlicePreference(ground.engines.registry) if prefers else None

    @staticmethod
    def pairs_within(settings: Settings, /) -> PairsWithin | None:
        """Return the rule of ``require``; engines without a slice count as a slice."""
        requires = settings.for_feature(SliceSettings).slice_pairing is SlicePairing.REQUIRE
        return (lambda name: name or NO_SLICE) if requires else None

    def routing(self) -> RoutingParts:
        """Return the preference for one slice."""
        return RoutingParts(preference=self._preference)

    def parts(self, core: Core) -> FeatureParts:
        """Return the metrics."""
        del core
        return FeatureParts(families=self._families)

    def _families(self) -> Iterator[Family]:
        plays_a_part = self._pairing is not SlicePairing.OFF
        return slice_families(
            self.ground.engines.registry if plays_a_part else None, self._preference
        )


def slice_families(
    registry: Registry | None, preference: SlicePreference | None
) -> Iterator[Family]:
    """Return the metrics; None: slices are off, or not preferred."""
    sizes = {} if registry is None else slice_sizes(registry)
    text = "Engines that may serve, by pdrelay/slice; 0: the slice has some, and none of them may."
    yield gauge_family("pdrelay_slice_instances", text, ("slice", "role"), list(sizes.items()))
    text = (
        "Pairs whose engines are of two slices though one is preferred (slice_pairing), by reason."
    )
    crossings: Mapping[tuple[str, ...], int] = {} if preference is None else preference.counted
    yield from counter_family("pdrelay_slice_crossings", text, ("reason",), crossings)


FEATURE: Final = SlicesFeature
