"""The life of an engine that sleeps: vLLM puts its memory away, also the KV cache's, and brings it
back elsewhere.

Between two sleeps an engine has one *generation*. Each has an engine id of its own, so what peers
hold of an earlier one (offers, leases, NIXL's keys) is that of an engine that has ended, as after a
restart.
"""

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from pdrelay_connector.core.ids import EngineId
from pdrelay_connector.core.state_machine import transition

_LATER: Final = re.compile(r"_gen[0-9]+$")


class SleepState(Enum):
    """State of a process of an engine: its scheduler, or a worker."""

    AWAKE = auto()
    FALLING_ASLEEP = auto()  # it begins nothing, and what is under way ends
    ASLEEP = auto()  # no memory is registered, and no peer is connected


class SleepEvent(Enum):
    """What can happen to it."""

    SLEEP_ORDERED = auto()
    DRAINED = auto()  # nothing reads this engine's memory any more, or writes into it
    OVERDUE = auto()  # something still does: the memory must stay
    WOKEN = auto()


TRANSITIONS: Final[Mapping[SleepState, Mapping[SleepEvent, SleepState]]] = {
    SleepState.AWAKE: {SleepEvent.SLEEP_ORDERED: SleepState.FALLING_ASLEEP},
    SleepState.FALLING_ASLEEP: {
        SleepEvent.DRAINED: SleepState.ASLEEP,
        SleepEvent.OVERDUE: SleepState.AWAKE,
    },
    SleepState.ASLEEP: {SleepEvent.WOKEN: SleepState.AWAKE},
}


class Sleep:
    """The sleep of one process."""

    def __init__(self) -> None:
        self.state = SleepState.AWAKE
        self.generation = 0  # how often the workers have let go of their memory

    def on(self, event: SleepEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = transition(TRANSITIONS, self.state, event, "the sleep of this engine")


def in_generation(engine: EngineId, generation: int) -> EngineId:
    """Return the id of an engine in a generation; in the first, the configured one."""
    return EngineId(f"{engine}_gen{generation}") if generation else engine


def known_as(engine: str) -> EngineId:
    """Return the id that an engine has in all of its generations, as its metrics show it."""
    return EngineId(_LATER.sub("", engine))
