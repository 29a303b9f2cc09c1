"""What all features add to the choice of engines, for tests that have no whole router."""

from types import SimpleNamespace

from pdrelay_proxy.features import features
from pdrelay_proxy.features.feature import Ground


def routing_of_features(settings, registry, clock):
    """Return it; what else a feature needs of a router is not there."""
    ground = Ground(settings, SimpleNamespace(registry=registry, checks=None), clock)
    return [feature(ground).routing() for feature in features()]
