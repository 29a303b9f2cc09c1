"""Gives blocks back that a prefill engine keeps, or is about to keep, for a decode leg that is
never sent.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol, Self

from pdrelay_proxy.core.model import EngineResponse, Instance, LegRequest
from pdrelay_proxy.core.ports import Releases
from pdrelay_proxy.errors import EngineError

# at the same time; more than that is a router that has lost all its decode engines
_MOST: Final = 64
_TRIES: Final = 3  # engines that are asked; one that cannot be reached tells nobody
_TIMEOUT_S: Final = 5.0  # an engine says no within milliseconds
_OK: Final = 200
_REFUSED: Final = 400


class ReleaseSender(Protocol):
    """Sends one leg, and waits for its whole answer."""

    async def post(self, leg: LegRequest, *, timeout_s: float) -> EngineResponse:
        """Post; raises EngineError."""
        ...


class Releaser:
    """Use it as a context manager: at the end it waits for what is under way."""

    def __init__(self, engines: ReleaseSender, listeners: Sequence[Releases] = ()) -> None:
        self._engines = engines
        self._listeners = listeners
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._tasks:
            _done, late = await asyncio.wait(self._tasks, timeout=_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def release(
        self, prefill: Instance, legs: Sequence[LegRequest], abandoning: LegRequest
    ) -> None:
        """Have one of these legs refused by a decode engine; if none does, have the prefill engine
        serve the last one.

        Returns at once. Decode engines come first: vLLM's own connector listens to them alone.
        """
        self._start(prefill, [*((leg, _REFUSED) for leg in legs[:_TRIES]), *_twice(abandoning)])

    def abandon(self, prefill: Instance, leg: LegRequest) -> None:
        """Have this leg served; returns at once."""
        self._start(prefill, _twice(leg))

    def _start(self, prefill: Instance, legs: Sequence[tuple[LegRequest, int]]) -> None:
        if len(self._tasks) >= _MOST:
            self._report(prefill, freed=False)
            return
        task = asyncio.create_task(self._release(prefill, legs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, prefill: Instance, legs: Sequence[tuple[LegRequest, int]]) -> None:
        """Send legs until one is answered with the status that stands beside it."""
        for leg, good in legs:
            try:
                answer = await self._engines.post(leg, timeout_s=_TIMEOUT_S)
            except EngineError:
                continue
            if answer.status == good:
                self._report(prefill, freed=True)
                return
        self._report(prefill, freed=False)

    def _report(self, prefill: Instance, *, freed: bool) -> None:
        for listener in self._listeners:
            listener.released(prefill, freed=freed)


def _twice(abandoning: LegRequest) -> Sequence[tuple[LegRequest, int]]:
    """Say it again if the connection breaks: that does no harm, and else the blocks stay pinned for
    a whole lease.
    """
    return [(abandoning, _OK), (abandoning, _OK)]
