"""Has streams go on at other decode engines: those of engines that drain so, or have no KV room."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.feature import Core, Feature, FeatureParts, Ground
from pdrelay_proxy.features.moving_streams.core.kv_relief import KvRelief
from pdrelay_proxy.features.moving_streams.kv_watch import KvWatch
from pdrelay_proxy.features.moving_streams.move_counts import MoveCounts
from pdrelay_proxy.features.moving_streams.requests.stream_moves import StreamMoves
from pdrelay_proxy.features.moving_streams.settings import MoveSettings
from pdrelay_proxy.requests.request_set import MakeWatcher
from pdrelay_proxy.settings import Settings


class MovingStreamsFeature(Feature):
    """Watches the streams under way, and cuts those that should leave their engine."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._above = ground.settings.for_feature(MoveSettings).move_above
        self._relief = KvRelief(self._above)
        self._counts = MoveCounts()

    @staticmethod
    def check(settings: Settings, /) -> None:
        """Raise ConfigError if streams shall leave full engines, and none could."""
        above = settings.for_feature(MoveSettings).move_above
        if above is not None and not settings.resume_streams:
            raise ConfigError(
                f"move_above is {above:g}, and no stream could move: write "
                f"resume_streams = true, too"
            )

    def watcher(self) -> MakeWatcher:
        """Return what makes the moves."""
        return partial(StreamMoves, self._relief, self._counts.count)

    def parts(self, core: Core) -> FeatureParts:
        """Return the metrics; and see in those of decode engines which are full, if streams shall
        leave these.
        """
        del core
        listeners: Sequence[KvWatch] = ()
        if self._above is not None:
            listeners = (KvWatch(self.ground.engines.registry, self._relief),)
        return FeatureParts(families=self._counts.families, metrics_listeners=listeners)


FEATURE: Final = MovingStreamsFeature
