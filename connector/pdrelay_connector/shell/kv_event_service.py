"""Follows the KV events of an engine's ranks into a hub, while its API server process runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from vllm.logger import init_logger

from pdrelay_connector.core.kv_events.event_batch import BlockStored
from pdrelay_connector.core.kv_events.event_hub import KVEventHub
from pdrelay_connector.core.kv_events.group_announcements import read_group_metadata
from pdrelay_connector.errors import SettingsError
from pdrelay_connector.io.kv_event_source import KVEventSource, follow
from pdrelay_connector.shell.kv_event_metrics import KVEventMetrics

LOOK_EVERY_S = 5.0  # which ranks there are: elastic expert parallelism adds and removes them
GROUPS_WITHIN_S = 10.0
GROUPS = "get_kv_cache_group_metadata"  # of EngineCore; vLLM keeps it for those who follow events

logger = init_logger("vllm.pdrelay")
GroupQuestion: TypeAlias = Callable[[str], Awaitable[object]]


class KVEventService:
    """Follows the events of every rank, in one task each."""

    def __init__(
        self,
        sources: Callable[[], Mapping[int, Any]] | None,
        *,
        is_closed: bool,
        groups: Sequence[BlockStored] = (),
    ) -> None:
        """``sources`` returns vLLM's KVEventsConfig by rank; None: this vLLM does not know them.

        ``groups``: of every rank.
        """
        self.hub = KVEventHub()
        self.is_closed = is_closed  # only those who may read prompts reach the route
        self._metrics = KVEventMetrics(self.hub)
        self._groups = groups
        self.has_sources = sources is not None
        self._sources: Callable[[], Mapping[int, Any]] = sources or dict
        self._followed: dict[int, tuple[KVEventSource, asyncio.Task[None]]] = {}
        self._warned: set[str] = set()

    @property
    def has_events(self) -> bool:
        """Whether a rank publishes events."""
        return bool(self._followed)

    def start(self) -> None:
        """Follow the present ranks, and check for others until the event loop ends.

        Raises :exc:`~pdrelay_connector.errors.SettingsError` for an endpoint in a directory that
        others may enter.
        """
        for source in self._current_sources().values():
            if open_to_others := source.open_directories:
                raise SettingsError(_open_directory(open_to_others[0]))
        self._follow_ranks()
        self._metrics.open()
        self._looking = asyncio.create_task(self._poll_ranks(), name="pdrelay-kv-events")

    async def stop(self) -> None:
        """Follow nothing any more."""
        self._metrics.close()
        tasks = [self._looking, *(task for _, task in self._followed.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll_ranks(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._follow_ranks()
            self._metrics.update()

    def _current_sources(self) -> dict[int, KVEventSource]:
        return {
            rank: KVEventSource(config.endpoint, config.replay_endpoint, config.topic)
            for rank, config in self._sources().items()
            if config.publisher == "zmq"
        }

    def _follow_ranks(self) -> None:
        sources = self._current_sources()
        for rank, (source, task) in list(self._followed.items()):
            if task.done():
                self._log_end(rank, task)
            if task.done() or sources.get(rank) != source:
                task.cancel()
                del self._followed[rank]
                self.hub.remove_rank(rank)
        for rank in sources.keys() - self._followed.keys():
            self._follow(rank, sources[rank])

    def _follow(self, rank: int, source: KVEventSource) -> None:
        if source.open_directories:
            self._warn(_open_directory(source.open_directories[0]))
            return
        for endpoint in source.exposures:
            self._warn(
                f"KV events contain prompts, and {endpoint} is open to others without a key: use "
                "an ipc:// endpoint in a directory of mode 0700 (--kv-events-config)"
            )
        self.hub.add_rank(rank, self._groups)
        following = follow(source, partial(self._publish, rank), partial(self._forget, rank))
        self._followed[rank] = (
            source,
            asyncio.create_task(following, name=f"pdrelay-kv-events-{rank}"),
        )

    def _publish(self, rank: int, payload: bytes) -> None:
        before = self.hub.counts.overflows, self.hub.counts.refused_batches
        self.hub.publish(rank, payload)
        if (self.hub.counts.overflows, self.hub.counts.refused_batches) != before:
            self._warn(
                f"KV events of rank {rank}: too many blocks, or a batch of another form; all are "
                f"forgotten"
            )

    def _forget(self, rank: int) -> None:
        self.hub.forget(rank)
        logger.warning("KV events were lost, and what was known is forgotten; rank=%d", rank)

    def _log_end(self, rank: int, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._warn(
            f"KV events of rank {rank} are no more followed; another try every {LOOK_EVERY_S:.0f} "
            f"s: {error}"
        )

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < 1000:
            self._warned.add(text)
            logger.warning("%s", text)


def _open_directory(endpoint: str) -> str:
    return (
        f"KV events contain prompts, and others than this user may reach {endpoint}: put it into a "
        "directory of this user's with mode 0700 (--kv-events-config)"
    )


async def ask_for_groups(call_engine: GroupQuestion | None) -> tuple[BlockStored, ...]:
    """Return announcements of the engine's KV cache groups; none if it cannot list them.

    ``call_engine`` calls a method of EngineCore on every rank, and returns the first rank's answer:
    all ranks have the groups of one model. Without an answer a group is announced by its first
    block.
    """
    if call_engine is None:
        return ()
    try:
        async with asyncio.timeout(GROUPS_WITHIN_S):
            return read_group_metadata(await call_engine(GROUPS))
    # Whatever failed in the engine comes as Exception (core_client.py), and the events can be
    # followed without.
    except Exception as exc:  # noqa: BLE001
        logger.warning(
            "KV events: the engine does not tell its KV cache groups, so their first blocks do: %r",
            exc,
        )
        return ()
