"""A turn: an engine that leaves one role and serves another, under the same process
(docs/turning-roles.md).

A role that is added is served at once. One that is left takes time: the engine gets nothing new,
its streams move or end, decode engines read what it has computed for them, and then it serves what
it shall. If that takes longer than ``TURN_TIMEOUT_S``, it serves the new role all the same, and the
rest of the old one ends there.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.model import EngineRole


class TurnState(FastStrEnum):
    """Where a turn is; those at the end are its outcomes, as metrics name them."""

    LEAVING = auto()  # it gets nothing new, and something of the old role is left
    TURNED = auto()
    LATE = auto()  # it serves the new role, and something of the old one was left
    CANCELLED = auto()
    REMOVED = auto()  # the engine was, before it had turned


class TurnEvent(FastStrEnum):
    """What happens to a turn."""

    EMPTY = auto()  # nothing of the old role is left, or it leaves none
    TIMEOUT = auto()
    CANCEL = auto()  # by undrain, by another turn, or by its source
    REMOVE = auto()


# What still runs by then goes on beside the new role: a longer time would only keep the engine
# idle.
TURN_TIMEOUT_S: Final = 120.0
TRANSITIONS: Final[Mapping[TurnState, Mapping[TurnEvent, TurnState]]] = {
    TurnState.LEAVING: {
        TurnEvent.EMPTY: TurnState.TURNED,
        TurnEvent.TIMEOUT: TurnState.LATE,
        TurnEvent.CANCEL: TurnState.CANCELLED,
        TurnEvent.REMOVE: TurnState.REMOVED,
    },
    TurnState.TURNED: {},
    TurnState.LATE: {},
    TurnState.CANCELLED: {},
    TurnState.REMOVED: {},
}


class RoleTurn:
    """One turn. Times are seconds of the registry's clock."""

    __slots__ = ("since", "state", "to", "until")

    def __init__(self, to: EngineRole, since: float, until: float) -> None:
        self.to = to
        self.since = since
        self.until = until  # when it takes place whatever is left
        self.state = TurnState.LEAVING

    def on(self, event: TurnEvent) -> TurnState:
        """Go to the next state, and return it; raises KeyError: it is over."""
        self.state = TRANSITIONS[self.state][event]
        return self.state
