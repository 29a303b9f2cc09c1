"""A call that a feature answers by calls of its own, as far as the choice of engines goes."""

from abc import ABC, abstractmethod

from pdrelay_proxy.core.model import GenerationRequest, SingleEngineReason
from pdrelay_proxy.core.routing.fleet_choice import FleetChoice


class ClaimedCall(ABC):
    """One such call. A class, because a compiled call of a Protocol is slow."""

    __slots__ = ()

    @abstractmethod
    def single_reason(self, fleet: FleetChoice, *, may_be_alone: bool) -> SingleEngineReason | None:
        """Say why one engine gets all of it after all; None: the feature answers it.

        ``may_be_alone``: without prefill engines, a decode engine serves requests alone.
        """

    @abstractmethod
    def first_call(self) -> GenerationRequest:
        """Return the first of the calls that it becomes."""

    @abstractmethod
    def rule(self, first: str, /) -> str:
        """Say what becomes of it; ``first``: what becomes of the first of its calls."""
