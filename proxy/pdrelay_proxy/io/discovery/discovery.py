"""Runs all sources of engines, and compares what they say with the registry."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from pdrelay_proxy.core.discovery.store_entries import assignment_name, assignment_of
from pdrelay_proxy.core.discovery.unnamed_assignments import UnnamedAssignments
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.io.background import Running, meanwhile, repeatedly
from pdrelay_proxy.io.discovery.engine_changes import EngineChanges
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from pdrelay_proxy.io.discovery.store import Store, StoreDown

logger = logging.getLogger(__name__)
# seconds between two checks for assignments of engines that are gone
_ASSIGNMENTS_S: Final = 5.0
# seconds between two comparisons without a reason: a retired engine may have made room
_TICK_S: Final = 1.0


class Discovery:
    """All sources while they run."""

    def __init__(
        self,
        reconciler: Reconciler,
        store: Store,
        changes: EngineChanges,
        *,
        feeds: Sequence[Running] = (),
    ) -> None:
        """``store``: its observer tells the reconciler; ``feeds``: do so, too."""
        self._reconciler = reconciler
        self._store = store
        self.changes = changes  # that operators may make
        self._feeds = feeds
        self._unnamed = UnnamedAssignments()
        self.freshness = reconciler.freshness

    @property
    def missing(self) -> Sequence[EngineSource]:
        """The sources that have not been heard yet."""
        return self._reconciler.sources.missing

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Follow all sources while the block lasts."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._store.running())
            for feed in self._feeds:
                await stack.enter_async_context(feed())
            trouble = "the engines could not be compared with what the sources say"
            await stack.enter_async_context(
                meanwhile(repeatedly(_TICK_S, self._reconcile, logger, trouble))
            )
            # apart from that, for it waits for the store
            forgets = repeatedly(
                _ASSIGNMENTS_S,
                self.drop_unnamed_assignments,
                logger,
                "what engines serve that are gone could not be looked for",
            )
            await stack.enter_async_context(meanwhile(forgets))
            yield

    async def _reconcile(self) -> None:
        for _ in self._reconciler.reconcile():
            await asyncio.sleep(0)

    async def drop_unnamed_assignments(self) -> None:
        """Drop role assignments of engines that no router of the store names any more."""
        roles = self._reconciler.roles
        clock = self._reconciler.clock
        changes = self._unnamed.decide(roles.assignments, roles.is_named, now=clock())
        try:
            for before, after in changes:
                if roles.assignments.get(before.key) != before:
                    continue  # its role changed, or a source named it, while others were written
                name = assignment_name(before.key)
                if after is not None:
                    await self._store.put(name, assignment_of(after))
                    self._unnamed.written(after, now=clock())
                else:
                    await self._store.delete(name)
                    text = (
                        "no router knows a %s engine at %s any more: it is forgotten that it "
                        "serves %s"
                    )
                    logger.info(text, before.key.role, before.key.authority, before.serves)
        except StoreDown as exc:  # the next check tries again
            logger.warning("what engines serve that are gone is not forgotten yet: %s", exc)
