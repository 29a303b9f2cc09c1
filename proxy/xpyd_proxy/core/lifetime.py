"""The life of the router process, from its first request to its last."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import StrEnum, auto
from typing import Final


class Stage(StrEnum):
    """How the router treats new requests."""

    SERVING = auto()
    LEAVING = auto()  # it says that it is not ready, and still serves those that have not heard it
    CLOSED = auto()  # it refuses them; those it has are finished


class Step(StrEnum):
    """What brings the end closer."""

    TOLD = auto()  # to end
    GRACE_OVER = auto()


TRANSITIONS: Final[Mapping[Stage, Mapping[Step, Stage]]] = {
    Stage.SERVING: {Step.TOLD: Stage.LEAVING},
    Stage.LEAVING: {Step.TOLD: Stage.LEAVING, Step.GRACE_OVER: Stage.CLOSED},
    Stage.CLOSED: {Step.TOLD: Stage.CLOSED},
}


class Lifetime:
    """Where the process is in its life, and how many requests it is serving."""

    def __init__(self) -> None:
        self.stage = Stage.SERVING
        self.in_flight = 0

    def on(self, step: Step) -> None:
        """Take a step; one that is not in the table is a bug."""
        self.stage = TRANSITIONS[self.stage][step]

    @contextmanager
    def serving(self) -> Generator[None]:
        """Count a request for as long as it lasts."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
