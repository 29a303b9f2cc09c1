"""One request before the gate, and the table of its life."""

from collections.abc import Mapping
from enum import auto
from typing import Final

from pdrelay_proxy.core.admission.limits import Refusal
from pdrelay_proxy.core.fast_enum import FastStrEnum


class TicketState(FastStrEnum):
    """Where a request stands."""

    ARRIVING = auto()
    WAITING = auto()
    ADMITTED = auto()
    REFUSED = auto()  # at the door, or later for one that is more important
    EXPIRED = auto()  # it has waited too long
    LEFT = auto()  # it is over, or its client did not want to wait


_ARRIVING: Final = TicketState.ARRIVING  # looking a member up takes as long as a call


class TicketEvent(FastStrEnum):
    """What happens to it."""

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
        self.tokens = tokens  # about how many its prompt has, before anybody has counted them
        self.charged = 0  # tokens that the quota of its key was charged for it
        self.reported = 0  # tokens that the other routers of the fleet were told of it
        self.due = due  # when it has waited long enough
        self.state = state
        self.refusal: Refusal | None = None  # of one that was refused or has expired

    def on(self, event: TicketEvent) -> None:
        """Take a step; one that is not in the table is a bug."""
        self.state = TRANSITIONS[self.state][event]
