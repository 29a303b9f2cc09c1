"""A worker's half of staging: copy between the cache and host memory whenever our own scheduler says so."""

from collections import deque

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.ids import CopyId, EngineAt, PartId
from xpyd_connector.core.messages import MAX_REASON, Attend, CopyEnded, CopyIn, CopyOut, Message
from xpyd_connector.core.ports import Copier, Link, LinkEvent, Received
from xpyd_connector.core.session.scheduler_link import Home

MAX_REPORTED = 1024  # more than are ever between a scheduler's order and what it hears of an earlier one


class Stager:
    """Copies cannot be stopped, and need not be: nobody else gets their slots before they have ended."""

    def __init__(self, link: Link, copier: Copier, tally: Tally, *, home: EngineAt, attend: Attend) -> None:
        self._copier = copier
        self._tally = tally
        self._home = Home(link, home, attend)
        self._running: dict[CopyId, CopyOut | CopyIn] = {}
        self._reported: deque[PartId] = deque(maxlen=MAX_REPORTED)  # copies that ended, over this connection

    def __len__(self) -> int:
        return len(self._running)

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in what our scheduler says."""
        match event:
            case Received(_, message):
                self._told(message)
            case _ if self._home.on(event, now=now):
                self._reported.clear()  # nobody may have heard it
                self._tally.count("peers_lost")  # what runs is told to the next one, who asks for it again
            case _:
                pass

    def advance(self, *, now: float) -> float | None:
        """Report the copies that ended; return when to be called again at the latest."""
        for copied in self._copier.poll():
            order = self._running.pop(copied.copy)
            if not copied.reason:
                self._tally.count("bytes_staged_out" if isinstance(order, CopyOut) else "bytes_staged_in", copied.bytes)
            if self._home.is_there:
                self._reported.append(order.number)
            self._home.say(CopyEnded(order.number, copied.reason[:MAX_REASON]))
        return self._home.advance(now=now)

    def _told(self, message: Message) -> None:
        match message:
            case CopyOut(number) | CopyIn(number) if self._is_running(number) or number in self._reported:
                # Our scheduler is back: it hears of the one that runs, or will have heard of the one that ended. Copied
                # again, bytes would move into slots that are somebody else's by then.
                self._tally.count("late_notifications")
            case CopyOut(_, blocks, slots):
                self._running[self._copier.out(blocks, slots)] = message
            case CopyIn(_, slots, blocks):
                self._running[self._copier.into(slots, blocks)] = message
            case _:
                self._tally.count("late_notifications")

    def _is_running(self, number: PartId) -> bool:
        return any(order.number == number for order in self._running.values())
