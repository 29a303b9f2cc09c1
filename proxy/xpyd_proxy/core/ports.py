"""What the relay needs from the world."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from xpyd_proxy.core.model import Answer, Headers, Instance, Leg


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
        """The body, as it arrives; iterating raises EngineError when the engine breaks off."""
        ...


class Engines(Protocol):
    """Talks to vLLM. Raises EngineError or EngineTimeout, and nothing else."""

    async def ask(self, leg: Leg, *, timeout_s: float) -> Answer:
        """Post, and wait at most so many seconds for the whole answer."""
        ...

    def stream(self, leg: Leg) -> AbstractAsyncContextManager[Stream]:
        """Post, and wait for the head. Leaving the block closes the request at once, read or not."""
        ...

    async def models(self, instance: Instance, headers: Headers) -> Answer:
        """Get the engine's list of models."""
        ...


class Pairing(Protocol):
    """Chooses engines. The sequences are never empty and may differ from call to call."""

    def pair(self, prefill: Sequence[Instance], decode: Sequence[Instance], /) -> tuple[Instance, Instance]:
        """Return the two engines that share a request."""
        ...

    def one(self, decode: Sequence[Instance], /) -> Instance:
        """Return the decode engine that serves a request alone."""
        ...
