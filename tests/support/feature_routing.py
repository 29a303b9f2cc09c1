"""What all features add to a router, for tests that have no whole one."""

from types import SimpleNamespace

from pdrelay_proxy.features import features
from pdrelay_proxy.features.feature import Ground


def all_features(settings, registry, clock):
    """Return the features; what else they need of a router is not there."""
    ground = Ground(settings, SimpleNamespace(registry=registry, checks=None), clock)
    return [feature(ground) for feature in features()]


def routing_of_features(settings, registry, clock):
    """Return what they add to the choice of engines."""
    return [feature.routing() for feature in all_features(settings, registry, clock)]
