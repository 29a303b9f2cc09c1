"""The life of the router process, from its first request to its last."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import auto
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.errors import ClosingDown

_RETRY_AFTER_S: Final = 1  # by then another router serves, or this one has restarted


class Stage(FastStrEnum):
    """How the router treats new requests."""

    SERVING = auto()
    LEAVING = auto()  # not ready; still serves requests of balancers that have not noticed yet
    CLOSED = auto()  # refuses new requests; finishes the rest


_CLOSED: Final = Stage.CLOSED


class Step(FastStrEnum):
    """The steps towards the end."""

    SHUTDOWN = auto()  # the process was asked to end
    GRACE_OVER = auto()


TRANSITIONS: Final[Mapping[Stage, Mapping[Step, Stage]]] = {
    Stage.SERVING: {Step.SHUTDOWN: Stage.LEAVING},
    Stage.LEAVING: {Step.SHUTDOWN: Stage.LEAVING, Step.GRACE_OVER: Stage.CLOSED},
    Stage.CLOSED: {Step.SHUTDOWN: Stage.CLOSED},
}


class Lifetime:
    """The stage of the process, and how many requests it is serving."""

    def __init__(self) -> None:
        self.stage = Stage.SERVING
        self.in_flight = 0

    def on(self, step: Step) -> None:
        """Take a step; one outside the table is a bug."""
        self.stage = TRANSITIONS[self.stage][step]

    def check(self) -> None:
        """Accept a new request; raises ClosingDown."""
        if self.stage is _CLOSED:
            raise ClosingDown(
                "the router is about to end and takes no new requests", retry_after_s=_RETRY_AFTER_S
            )

    @contextmanager
    def serving(self) -> Generator[None]:
        """Count a request for as long as the block lasts."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


def cut_short() -> ClosingDown:
    """Return the error of a request that is still under way when the router ends."""
    return ClosingDown(
        "the router has to end before this request is finished", retry_after_s=_RETRY_AFTER_S
    )
