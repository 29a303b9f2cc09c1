"""What the relay needs from the world."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

from xpyd_proxy.core.limits import Limit
from xpyd_proxy.core.model import ANY, Answer, Ask, Headers, Instance, InstanceId, Leg, RequestId, Role
from xpyd_proxy.core.retries import Failure


def nothing() -> None:
    """Do nothing: nobody wants to know."""


class Stream(Protocol):
    """An engine's answer whose head has arrived and whose body is arriving."""

    @property
    def status(self) -> int:
        """HTTP status."""
        ...

    @property
    def content_type(self) -> str:
        """The engine's own content type; empty when it sent none."""
        ...

    @property
    def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it arrives; iterating raises EngineError when the engine breaks off.

        They may also be such as ``delivery_of`` knows to deliver.
        """
        ...


class Delivery(Protocol):
    """Chunks that can also be had without waiting for each of them."""

    async def deliver(self, sink: Callable[[bytes], object], /) -> None:
        """Call ``sink`` with each piece as soon as it is here, and return at the end; raises what iterating raises.

        ``sink`` must not wait; what it raises ends the delivery, and comes out here.
        """
        ...

    def pause(self) -> None:
        """Let the engine wait."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


def delivery_of(chunks: AsyncIterator[bytes]) -> Delivery | None:
    """Return the chunks as what can be delivered, where they can."""
    return cast("Delivery", chunks) if hasattr(chunks, "deliver") else None


class Engines(Protocol):
    """Talks to vLLM. Raises EngineError or EngineTimeout, and nothing else."""

    async def ask(self, leg: Leg, *, timeout_s: float) -> Answer:
        """Post, and wait at most so many seconds for the whole answer."""
        ...

    def stream(self, leg: Leg, *, sent: Callable[[], None] = nothing) -> AbstractAsyncContextManager[Stream]:
        """Post, and wait for the head. Leaving the block closes the request at once, read or not.

        ``sent`` is called when the whole request is on its way: from then on the engine may have it.
        """
        ...

    async def models(self, instance: Instance, headers: Headers, *, bare: bool = False) -> Answer:
        """Get the engine's list of models; ``bare``: without showing a key."""
        ...


class Fleet(Protocol):
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
        self, prefill: Sequence[Instance], decode: Sequence[Instance], ask: Ask = ANY, /
    ) -> tuple[Instance, Instance]:
        """Return the two engines that share a request."""
        ...

    def one(self, decode: Sequence[Instance], ask: Ask = ANY, /) -> Instance:
        """Return the engine that serves a request, or its decode leg, alone."""
        ...


class Slots(Protocol):
    """Counts the requests that engines have or are about to get, so that later choices see them."""

    def hold(self, instance: Instance, request: RequestId, /) -> AbstractContextManager[None]:
        """Reserve a slot as soon as the engine is chosen; enter at once (nothing awaited in between), leave at the end.

        The decode engine's slot is held from before the prefill leg to the end of the stream, so that the handoff never
        waits. The same request may be held and watched (``began``) at the same engine: it counts once.
        """
        ...


class Uncounted:
    """Slots that nobody counts."""

    def hold(self, _instance: Instance, _request: RequestId, /) -> AbstractContextManager[None]:
        """Reserve nothing."""
        return nullcontext()


class RetryBudget(Protocol):
    """Bounds how much load retries may add, over all requests."""

    def came(self, *, now: float) -> None:
        """A request has come (once for each, not for its retries); now: seconds of a clock that only rises."""
        ...

    def grants(self, *, now: float) -> bool:
        """Tell whether one more leg may be sent again now, and count it. Ask last: after the request's own chances."""
        ...


class Unlimited:
    """A budget that always grants."""

    def came(self, *, now: float) -> None:
        """Take no notice."""

    def grants(self, *, now: float) -> bool:  # noqa: ARG002 (the port's name)
        """Grant."""
        return True


class Watcher(Protocol):
    """Is told how legs go; the calls never wait and never raise."""

    def began(self, instance: Instance, request: RequestId, /) -> None:
        """A leg is about to be sent; the two legs of a request have the same id."""
        ...

    def answered(self, instance: Instance, request: RequestId, seconds: float, /) -> None:
        """So long after it began it has a good answer: all of it (prefill), or its first event (decode)."""
        ...

    def ended(self, instance: Instance, request: RequestId, failure: Failure | None, /) -> None:
        """It is closed: exactly once for every ``began``. None: it went well, or nobody needed it any more."""
        ...


class Releases(Protocol):
    """Is told when a prefill engine was asked to free blocks nobody will read; never waits and never raises."""

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """``freed``: it has freed them. Else they stay pinned until their lease runs out."""
        ...


class Auditor(Protocol):
    """Is told when the two legs of a request did not have the same prompt; never waits and never raises."""

    def differed(self, prefill: InstanceId, decode: InstanceId, /) -> None:
        """Their ``usage`` counts different numbers of prompt tokens: the answer may be wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Standing:
    """One engine as operators see it."""

    instance: Instance
    state: str  # a word of its life's table
    why: str = ""  # what brought it there, in words that name no address


class Census(Protocol):
    """Knows every engine and what state it is in; asked only when somebody looks."""

    def states(self) -> Sequence[str]:
        """Return every word that a state can be."""
        ...

    def standings(self) -> Sequence[Standing]:
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
