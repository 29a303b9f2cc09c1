"""What the router's index of KV events knows of simulated engines."""

from collections.abc import Callable
from typing import Final

import msgspec

from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.event_reports import EventReports
from pdrelay_proxy.features.kv_events.core.prompt_lookup import PromptLookup
from pdrelay_proxy.features.kv_events.event_schemas import BlockRemoved, BlockStored, KvEventBatch
from pdrelay_tools.planning.replay.traces import IDS_LEAST, NoReplay, token_ids


class FollowedCaches:
    """The caches of all engines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._index = CacheIndex()
        self.routing: Final = RoutingParts(EventReports(self._index, PromptLookup(None, clock)))

    def of(self, engine: InstanceId, block_tokens: int) -> "FollowedCache":
        """Return the cache of one; raises NoReplay."""
        return FollowedCache(self._index, engine, block_tokens)


class FollowedCache:
    """The KV events of one engine, written as vLLM does, and read by the router's index."""

    def __init__(self, index: CacheIndex, engine: InstanceId, block_tokens: int) -> None:
        """Raises NoReplay: the blocks are too small to differ by their token ids."""
        if block_tokens < IDS_LEAST:
            raise NoReplay(
                f"blocks of {block_tokens} tokens are too small for KV events: {IDS_LEAST} tell "
                f"them apart"
            )
        self._index = index
        self._engine = engine
        self._block_tokens = block_tokens
        index.open(engine, {engine: None})
        self._apply()

    def stored(self, name: int, before: int | None) -> None:
        """A block is in the cache from now on."""
        self._apply(
            BlockStored([name], [*token_ids(name, self._block_tokens)], self._block_tokens, before)
        )

    def removed(self, name: int) -> None:
        """A block is gone."""
        self._apply(BlockRemoved([name]))

    def _apply(self, *events: BlockStored | BlockRemoved) -> None:
        batch = KvEventBatch(0.0, [msgspec.Raw(msgspec.msgpack.encode(event)) for event in events])
        for _ in self._index.apply(self._engine, batch):
            pass
