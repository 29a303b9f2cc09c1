"""A request's ticket for admission, and the table of its life."""

from collections.abc import Mapping
from enum import auto
from typing import Final

from pdrelay_proxy.core.admission.limits import Refusal
from pdrelay_proxy.core.fast_enum import FastStrEnum


class TicketState(FastStrEnum):
    """The state of a request."""

    ARRIVING = auto()
    WAITING = auto()
    ADMITTED = auto()
    REFUSED = auto()  # on arrival, or later in favour of a more important one
    EXPIRED = auto()  # it has waited too long
    LEFT = auto()  # it is over, or its client has gone


_ARRIVING: Final = TicketState.ARRIVING


class TicketEvent(FastStrEnum):
    """The events of a ticket."""

    ADMIT = auto()
    WAIT = auto()
    REFUSE = auto()
    EXPIRE = auto()
    LEAVE = auto()


TRANSITIONS: Final[Mapping[TicketState, Mapping[TicketEvent, TicketState]]] = {
    TicketState.ARRIVING: {
        TicketEvent.ADMIT: TicketState.ADMITTED,
        TicketEvent.WAIT: TicketState.WAITING,
        TicketEvent.REFUSE: TicketState.REFUSED,
    },
    TicketState.WAITING: {
        TicketEvent.ADMIT: TicketState.ADMITTED,
        TicketEvent.REFUSE: TicketState.REFUSED,
        TicketEvent.EXPIRE: TicketState.EXPIRED,
        TicketEvent.LEAVE: TicketState.LEFT,
    },
    TicketState.ADMITTED: {TicketEvent.LEAVE: TicketState.LEFT},
    TicketState.REFUSED: {},
    TicketState.EXPIRED: {},
    TicketState.LEFT: {},
}


class Ticket:
    """One request; only :class:`Admission` changes it."""

    __slots__ = (
        "charged",
        "due",
        "key",
        "priority",
        "refusal",
        "reported",
        "size",
        "state",
        "tokens",
    )

    def __init__(
        self,
        key: str,
        priority: int,
        size: int,
        due: float,
        state: TicketState = _ARRIVING,
        *,
        tokens: int = 0,
    ) -> None:
        self.key = key
        self.priority = priority  # lower is earlier
        self.size = size  # bytes of its body
        self.tokens = tokens  # estimate for its prompt, before an engine has counted them
        self.charged = 0  # tokens charged to its key's quota
        self.reported = 0  # tokens reported to the other routers of the fleet
        self.due = due  # the end of its wait
        self.state = state
        self.refusal: Refusal | None = None  # if it was refused or has expired

    def on(self, event: TicketEvent) -> None:
        """Take a step; one outside the table is a bug."""
        self.state = TRANSITIONS[self.state][event]
