"""Prefill legs also ask the engine how busy it is, for the sake of the next choice."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from xpyd_proxy.core.load import ASK_FOR_REPORT
from xpyd_proxy.core.model import Answer, Headers, Instance, Leg
from xpyd_proxy.core.ports import Engines, Stream, nothing


@dataclass(frozen=True, slots=True)
class Reporting:
    """Engines that say how busy they are whenever they answer a prefill leg."""

    engines: Engines
    reported: Callable[[Instance, bytes], None]

    async def ask(self, leg: Leg, *, timeout_s: float) -> Answer:
        """Post, and take the report out of the answer; raises what the engines raise."""
        answer = await self.engines.ask(_asking(leg), timeout_s=timeout_s)
        if answer.load:
            self.reported(leg.instance, answer.load)
        return answer

    def stream(self, leg: Leg, *, sent: Callable[[], None] = nothing) -> AbstractAsyncContextManager[Stream]:
        """Post; a stream carries no report."""
        return self.engines.stream(leg, sent=sent)

    async def models(self, instance: Instance, headers: Headers, *, bare: bool = False) -> Answer:
        """Get the engine's list of models."""
        return await self.engines.models(instance, headers, bare=bare)


def _asking(leg: Leg) -> Leg:
    return replace(leg, headers=(*leg.headers, ASK_FOR_REPORT))
