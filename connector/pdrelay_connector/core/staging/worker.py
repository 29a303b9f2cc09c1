"""A worker in staging: copies between the cache and host memory when its scheduler orders it."""

from collections import deque

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import CopyId, EngineEndpoint, PartId
from pdrelay_connector.core.messages import (
    MAX_REASON,
    CopyEnded,
    CopyIn,
    CopyOut,
    Message,
    WorkerHello,
)
from pdrelay_connector.core.ports import Copier, Link, LinkEvent, MessageReceived
from pdrelay_connector.core.session.scheduler_link import SchedulerLink

# more than are ever between a scheduler's order and what it hears of an earlier one
MAX_REPORTED = 1024


class StagingWorker:
    """A copy cannot be stopped, and need not be: its slots stay taken until it has ended."""

    def __init__(
        self,
        link: Link,
        copier: Copier,
        counters: Counters,
        *,
        scheduler_endpoint: EngineEndpoint,
        hello: WorkerHello,
    ) -> None:
        self._copier = copier
        self._counters = counters
        self._scheduler = SchedulerLink(link, scheduler_endpoint, hello)
        self._running: dict[CopyId, CopyOut | CopyIn] = {}
        # copies that ended, over this connection
        self._reported: deque[PartId] = deque(maxlen=MAX_REPORTED)

    def __len__(self) -> int:
        return len(self._running)

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Handle a message of our scheduler."""
        match event:
            case MessageReceived(_, message):
                self._on_message(message)
            case _ if self._scheduler.on(event, now=now):
                # The reports may be lost; copies that run are reported over the next connection,
                # which asks for them.
                self._reported.clear()
                self._counters.count("peers_lost")
            case _:
                pass

    def advance(self, *, now: float) -> float | None:
        """Report the copies that ended; return when to be called again at the latest."""
        for copied in self._copier.poll():
            order = self._running.pop(copied.copy)
            if not copied.reason:
                self._counters.count(
                    "bytes_staged_out" if isinstance(order, CopyOut) else "bytes_staged_in",
                    copied.bytes,
                )
            if self._scheduler.is_connected:
                self._reported.append(order.number)
            self._scheduler.send(CopyEnded(order.number, copied.reason[:MAX_REASON]))
        return self._scheduler.advance(now=now)

    def _on_message(self, message: Message) -> None:
        match message:
            case CopyOut(number) | CopyIn(number) if number in self._reported or self._is_running(
                number
            ):
                # Our scheduler is back: it hears of the one that runs, or will have heard of the
                # one that ended. Copied again, bytes would move into slots that have another owner
                # by then.
                self._counters.count("unknown_transfer_messages")
            case CopyOut(_, blocks, slots):
                self._running[self._copier.out(blocks, slots)] = message
            case CopyIn(_, slots, blocks):
                self._running[self._copier.into(slots, blocks)] = message
            case _:
                self._counters.count("unknown_transfer_messages")

    def _is_running(self, number: PartId) -> bool:
        return any(order.number == number for order in self._running.values())
