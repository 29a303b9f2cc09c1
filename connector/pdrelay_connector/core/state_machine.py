"""State machines as tables: a transition that is not in the table is a bug, and raises."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from pdrelay_connector.errors import IllegalTransition

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


def transition(
    table: Mapping[StateT, Mapping[EventT, StateT]], state: StateT, event: EventT, who: str
) -> StateT:
    """Return the next state; raises :exc:`~pdrelay_connector.errors.IllegalTransition`."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransition(f"{who} cannot handle {event.name} while {state.name}") from None
