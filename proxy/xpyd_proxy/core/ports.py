"""What parts of the router need from others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from xpyd_proxy.core.admission.limits import Limit
from xpyd_proxy.core.model import ANY, EngineResponse, Headers, Instance, Role, RoutingHints


class Engines(Protocol):
    """Talks to vLLM. Raises EngineError or EngineTimeout, and nothing else."""

    async def models(self, instance: Instance, headers: Headers, *, bare: bool = False) -> EngineResponse:
        """Get the engine's list of models; ``bare``: without showing a key."""
        ...


class EngineFleet(Protocol):
    """The engines there are."""

    def known(self, role: Role, /) -> Sequence[Instance]:
        """List all of a role, also those that must not get a request now (broken, draining): to show, never to send."""
        ...

    def usable(self, role: Role, /) -> Sequence[Instance]:
        """List those of a role that may get a request now, first tries and retries alike; raises NoInstance."""
        ...

    def fitting(self, prefill: Instance, decode: Sequence[Instance], /) -> Sequence[Instance]:
        """List those decode engines that can read the blocks of a prefill engine, as far as it is known."""
        ...


class Pairing(Protocol):
    """Chooses engines. The sequences are never empty and may differ from call to call.

    Both calls raise UnknownModel when no known engine serves the model that is asked for, BadRequest when none has the
    rank, and NoInstance when those that do may not get a request now, or fit no engine of the other role.
    """

    def pair(
        self, prefill: Sequence[Instance], decode: Sequence[Instance], ask: RoutingHints = ANY, /
    ) -> tuple[Instance, Instance]:
        """Return the two engines that share a request."""
        ...

    def one(self, decode: Sequence[Instance], ask: RoutingHints = ANY, /) -> Instance:
        """Return the engine that serves a request, or its decode leg, alone."""
        ...


class Releases(Protocol):
    """Is told when a prefill engine was asked to free blocks nobody will read; never waits and never raises."""

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """``freed``: it has freed them. Else they stay pinned until their lease runs out."""
        ...


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One engine as operators see it."""

    instance: Instance
    state: str  # a word of its life's table
    why: str = ""  # what brought it there, in words that name no address


class InstanceStateReader(Protocol):
    """Knows every engine and what state it is in; asked only when somebody looks."""

    def states(self) -> Sequence[str]:
        """Return every word that a state can be."""
        ...

    def standings(self) -> Sequence[InstanceStatus]:
        """List the engines, in the order they were added."""
        ...


class Queue(Protocol):
    """Knows the requests that wait to be let in; asked only when somebody looks."""

    @property
    def waiting(self) -> int:
        """How many wait now."""
        ...

    @property
    def admitted(self) -> int:
        """How many are being served now."""
        ...

    @property
    def refused(self) -> Mapping[Limit, int]:
        """How many were not let in since the start, by the limit they were over."""
        ...
