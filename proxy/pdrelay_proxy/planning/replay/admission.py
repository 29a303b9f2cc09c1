"""The queue of a replay: the router's own admission, with classes, in virtual time."""

from collections.abc import Callable
from typing import Final

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.service_classes import ServiceClasses
from pdrelay_proxy.core.admission.service_levels import ClassEntry
from pdrelay_proxy.core.admission.ticket import Ticket, TicketState
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.planning.replay.engine import EventLoop
from pdrelay_proxy.planning.replay.routers import ReplayRouter
from pdrelay_proxy.planning.replay.traces import NoReplay, Trace
from pdrelay_proxy.settings import Settings

_LOOK_S: Final = 0.02  # as requests/gate.py
_ENDLESS: Final = 1 << 30  # requests in the queue, and served: a replay is about targets
_CLIENT: Final = "replay"


class ReplayGate:
    """Lets the turns of a trace in, in their classes."""

    def __init__(self, settings: Settings, router: ReplayRouter, loop: EventLoop, trace: Trace) -> None:
        """Raises NoReplay: a turn has a class that is none."""
        self._classes = classes_of(settings)
        self._admission = Admission(limits_of(settings))
        self._router, self._loop, self._trace = router, loop, trace
        self._tickets = dict[int, Ticket]()
        self._starts = dict[Ticket, tuple[Callable[[], None], Callable[[], None]]]()  # of those that wait
        self._looks = False
        for number, turn in enumerate(trace.turns):
            if turn.service_class is not None and turn.service_class not in self._classes.by_name:
                raise NoReplay(f"request {number} has the class {turn.service_class!r}, which is none of the classes")

    def arrive(self, number: int, start: Callable[[], None], refused: Callable[[], None]) -> None:
        """Have a turn started, now or when it is its turn, or refused."""
        turn, now = self._trace.turns[number], self._loop.now
        service_class = self._classes.by_name.get(turn.service_class or "", self._classes.default)
        outlook = self._router.fleet.outlook()
        own = None if outlook is None else self._router.own_times(number, outlook)
        entry = ClassEntry(service_class, own, outlook)
        ticket = self._admission.arrive(_CLIENT, 0, 0, now, turn.prompt_tokens, entry=entry)
        self._tickets[number] = ticket
        if ticket.state is TicketState.ADMITTED:
            start()
        elif ticket.state is TicketState.WAITING:
            self._starts[ticket] = start, refused
            self._look_later()
        else:
            refused()
        self._settle()

    def leave(self, number: int) -> None:
        """A turn is over."""
        self._admission.leave(self._tickets.pop(number), now=self._loop.now)
        self._settle()

    def _settle(self) -> None:
        for ticket in self._admission.poll():
            start, refused = self._starts.pop(ticket)
            if ticket.state is TicketState.ADMITTED:
                start()
            else:
                refused()

    def _look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._loop.after(_LOOK_S, self._look)

    def _look(self) -> None:
        self._looks, now = False, self._loop.now
        self._admission.expire(now=now)
        self._admission.look(self._router.fleet.outlook(), now=now)
        self._settle()
        if self._admission.waiting:
            self._look_later()


def limits_of(settings: Settings) -> Settings:
    """Return settings with these classes, and no other limits."""
    return Settings(
        classes=settings.classes,
        default_class=settings.default_class,
        max_concurrency=_ENDLESS,
        max_queue=_ENDLESS,
        max_queue_wait_s=settings.max_queue_wait_s,
    )


def classes_of(settings: Settings) -> ServiceClasses:
    """Return the classes; raises NoReplay: they are wrong, or there are none."""
    try:
        found = ServiceClasses.of(settings.classes, settings.default_class)
    except ConfigError as exc:
        raise NoReplay(str(exc)) from exc
    if found is None:
        raise NoReplay("there are no classes")
    return found
