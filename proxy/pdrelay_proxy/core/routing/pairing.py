"""What chooses the engines of a request: a policy for each leg, or one for both."""

from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.fleet import compatibility
from pdrelay_proxy.core.model import (
    ANY,
    Instance,
    RoutingHints,
)
from pdrelay_proxy.core.routing.alone_bound import AloneBound, Holding
from pdrelay_proxy.core.routing.candidates import Among, Fits

Pair: TypeAlias = tuple[Instance, Instance]  # the prefill engine, and the decode engine
# likewise; None: the decode engine serves the request alone
Chosen: TypeAlias = tuple[Instance | None, Instance]


class Policy(Protocol):
    """Chooses the engine of one leg; the sequence is never empty."""

    def choose(self, among: Among, hints: RoutingHints = ANY, /) -> Instance:
        """Return one of these engines."""
        ...

    def copy(self) -> Self:
        """Return one that chooses alike, and whose choices leave no trace here."""
        ...


class PairPolicy(Policy, Protocol):
    """Chooses both engines of a request, or the decode engine alone."""

    def pair(self, prefill: Among, decode: Among, hints: RoutingHints, fits: Fits, /) -> Pair:
        """Return two engines that fit; every engine of either side fits one of the other side."""
        ...


class HolderPolicy(Protocol):
    """A policy for decode engines that knows what these have in their caches.

    Asking it leaves no trace.
    """

    def holding(
        self, among: Among, hints: RoutingHints, least: int, bound: AloneBound, /
    ) -> Holding:
        """Return the engines that lack fewer than ``least`` bytes of a prompt, and may compute
        these beside others.
        """
        ...

    def holders(self, among: Among, hints: RoutingHints, /) -> Among:
        """List the engines that would be chosen for what they have in their cache; none, if that
        decides nothing.
        """
        ...


class WeighingPolicy(PairPolicy, HolderPolicy, Protocol):
    """A choice that knows what engines would take, and so whether one is faster than two."""

    def take_expected(self, hints: RoutingHints, /) -> ExpectedTime | None:
        """Return what was expected of the latest choice, once, if it was this request's."""
        ...

    def alone(self, prefill: Among, decode: Among, hints: RoutingHints, /) -> bool:
        """Tell whether the engine that ``choose`` returns next is faster than any pair."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyPerLeg:
    """A choice by one policy for each leg; they do not know of each other."""

    prefill: Policy
    decode: Policy
    decode_first: bool = False  # the other engine is chosen among those that fit this one

    def pair(self, prefill: Among, decode: Among, hints: RoutingHints, fits: Fits, /) -> Pair:
        """Return what each of them chooses."""
        if self.decode_first:
            first = self.decode.choose(decode, hints)
            if fits is not compatibility.always:
                prefill = [instance for instance in prefill if fits(instance, first)]
            return self.prefill.choose(prefill, hints), first
        chosen = self.prefill.choose(prefill, hints)
        if fits is not compatibility.always:
            decode = [instance for instance in decode if fits(chosen, instance)]
        return chosen, self.decode.choose(decode, hints)

    def choose(self, among: Among, hints: RoutingHints = ANY, /) -> Instance:
        """Return what the decode policy chooses."""
        return self.decode.choose(among, hints)

    def copy(self) -> "PolicyPerLeg":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return PolicyPerLeg(self.prefill.copy(), self.decode.copy(), self.decode_first)
