"""Puts the policy expected_ttft into a router."""

from functools import partial
from typing import Final

from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.expected_ttft.core.engine_speed import EngineSpeeds
from pdrelay_proxy.features.expected_ttft.settings import EXPECTED_TTFT, ExpectedTtftSettings
from pdrelay_proxy.features.expected_ttft.speed_families import speed_families
from pdrelay_proxy.features.expected_ttft.weighing import routing_parts
from pdrelay_proxy.features.feature import Core, Feature, FeatureParts, Ground
from pdrelay_proxy.settings import PolicyName, Settings


class ExpectedTtftFeature(Feature):
    """Measures engines, and chooses by their speeds."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._speeds = EngineSpeeds()

    @staticmethod
    def check(settings: Settings, /) -> None:
        """Raise ConfigError if max_decode_itl_s is set and no policy can price prompts."""
        is_bound = settings.for_feature(ExpectedTtftSettings).max_decode_itl_s > 0
        if is_bound and settings.decode_policy not in (PolicyName.PREFIX, EXPECTED_TTFT):
            raise ConfigError(
                "max_decode_itl_s needs decode_policy expected_ttft or prefix: no other knows what "
                "decode engines have "
                "to compute of a prompt"
            )

    def routing(self) -> RoutingParts:
        """Return the policy, and the listener that learns from legs."""
        return routing_parts(
            self.ground.settings, self.ground.engines.registry, self._speeds, self.ground.clock
        )

    def parts(self, core: Core) -> FeatureParts:
        """Return the metrics."""
        del core
        return FeatureParts(
            families=partial(speed_families, self.ground.engines.registry, self._speeds)
        )


FEATURE: Final = ExpectedTtftFeature
