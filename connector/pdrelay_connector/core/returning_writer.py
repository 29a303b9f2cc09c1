"""The worker of an engine that pushes its own KV and reads KV of earlier answers (kv-back.md in
docs).

Both use NIXL, so both run on the one transfer thread, and over its one link: connections to decode
engines are the reader's, the one to our own scheduler is the writer's.
"""

from collections.abc import Callable

from pdrelay_connector.core.deadlines import earliest
from pdrelay_connector.core.ports import LinkEvent
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.push.push_job import ComputedBlocks, TransferOver
from pdrelay_connector.core.results import BlocksReleased, LoadResult


class ReturningWriter:
    """Runs on the transfer thread."""

    def __init__(self, writer: PushWriter, reader: PullReader) -> None:
        self._writer = writer
        self._reader = reader

    def __len__(self) -> int:
        return len(self._writer) + len(self._reader)

    def add_computed(
        self,
        event: ComputedBlocks | TransferOver,
        *,
        now: float,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """Write what the engine has computed."""
        self._writer.add_computed(event, now=now, ready=ready)

    def load(self, order: LoadOrder, *, now: float) -> None:
        """Read what a decode engine has leased to us."""
        self._reader.load(order, now=now)

    def give_up(self, reason: str, *, now: float) -> None:
        """End everything that is under way."""
        self._writer.give_up(reason, now=now)
        self._reader.give_up(reason, now=now)

    @property
    def uses_memory(self) -> bool:
        """Whether something may still be read into this rank's memory, or written from it."""
        return self._writer.uses_memory or self._reader.uses_memory

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Handle an event of a connection."""
        (self._writer if self._writer.owns(event.conn) else self._reader).on(event, now=now)

    def advance(self, *, now: float) -> float | None:
        """Advance both; return when to be called again at the latest."""
        return earliest(self._writer.advance(now=now), self._reader.advance(now=now))

    def take_results(self) -> list[LoadResult | BlocksReleased]:
        """Return the reads that have ended since the last call."""
        return self._reader.take_results()
