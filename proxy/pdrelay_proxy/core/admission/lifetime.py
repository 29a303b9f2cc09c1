"""The life of the router process, from its first request to its last."""

from collections.abc import Mapping
from enum import auto
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.errors import ClosingDown

_RETRY_AFTER_S: Final = 1  # another router is there already, or this one will be again in a moment


class Stage(FastStrEnum):
    """How the router treats new requests."""

    SERVING = auto()
    LEAVING = auto()  # it says that it is not ready, and still serves those that have not heard it
    CLOSED = auto()  # it refuses them; those it has are finished


_CLOSED: Final = Stage.CLOSED  # looking a member up takes as long as a call


class Step(FastStrEnum):
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

    def check(self) -> None:
        """Let a request in; raises ClosingDown."""
        if self.stage is _CLOSED:
            raise ClosingDown(
                "the router is about to end and takes no new requests", retry_after_s=_RETRY_AFTER_S
            )

    def serving(self) -> "Serving":
        """Count a request for as long as the block lasts."""
        return Serving(self)


class Serving:
    """One request under way, as a context manager."""

    __slots__ = ("_lifetime",)

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime

    def __enter__(self) -> None:
        self._lifetime.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self._lifetime.in_flight -= 1


def cut_short() -> ClosingDown:
    """Return what a request is told that is still under way when the router ends."""
    return ClosingDown(
        "the router has to end before this request is finished", retry_after_s=_RETRY_AFTER_S
    )
