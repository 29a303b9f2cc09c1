"""Puts KV events into a router."""

import asyncio
import random
from collections.abc import Iterator
from typing import Final

from pdrelay_proxy.core.routing.prompt_memory import PREFIX_LIFETIME_S
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features import feature_policies
from pdrelay_proxy.features.feature import Core, Feature, FeatureParts, Ground
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.event_reports import EventReports
from pdrelay_proxy.features.kv_events.core.known_prompts import KnownPrompts
from pdrelay_proxy.features.kv_events.core.prompt_learner import PromptLearner
from pdrelay_proxy.features.kv_events.core.prompt_lookup import PromptLookup
from pdrelay_proxy.features.kv_events.event_counts import EventCounts
from pdrelay_proxy.features.kv_events.event_follower import KvEventFollower
from pdrelay_proxy.features.kv_events.settings import KvEvents, KvEventSettings
from pdrelay_proxy.io.metric_families import Family
from pdrelay_proxy.settings import PolicyName, Settings


class KvEventFeature(Feature):
    """Follows the KV events of all engines, and looks prompts up in their index."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._index = CacheIndex()
        self._known_prompts = KnownPrompts(PREFIX_LIFETIME_S)
        self._counts = EventCounts()
        self._is_on = ground.settings.for_feature(KvEventSettings).kv_events is not KvEvents.OFF

    @staticmethod
    def check(settings: Settings, /) -> None:
        """Raise ConfigError if kv_events is auto and no policy uses it."""
        policies = {settings.prefill_policy, settings.decode_policy}
        by_cache = {PolicyName.PREFIX, *feature_policies()}
        if settings.for_feature(KvEventSettings).kv_events is KvEvents.AUTO and policies.isdisjoint(
            by_cache
        ):
            raise ConfigError(
                "kv_events is auto, and no policy asks for it: write prefill_policy or "
                "decode_policy prefix, "
                "or both expected_ttft"
            )

    def routing(self) -> RoutingParts:
        """Return the reports, and the learner of token ids."""
        if not self._is_on:
            return RoutingParts()
        clock = self.ground.clock
        lookup = PromptLookup(self._known_prompts, clock)
        reports = EventReports(self._index, lookup)
        learner = PromptLearner(
            self._known_prompts,
            clock,
            lambda call: asyncio.get_running_loop().call_soon(call),
            lookup,
        )
        return RoutingParts(reports, learner)

    def parts(self, core: Core) -> FeatureParts:
        """Return the follower's task, and the metrics."""
        del core
        engines = self.ground.engines
        follower = KvEventFollower(
            engines.registry,
            engines.checks,
            self._index,
            self._counts,
            random.random,
            known_prompts=self._known_prompts,
        )
        return FeatureParts((follower.running,) if self._is_on else (), families=self._families)

    def _families(self) -> Iterator[Family | None]:
        self._counts.keep(
            frozenset([member.instance.id for member in self.ground.engines.registry.members()])
        )
        yield from self._counts.families()


FEATURE: Final = KvEventFeature
