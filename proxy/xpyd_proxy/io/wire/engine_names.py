"""Where the names of engines lead, and where they led last while DNS does not say."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]  # raises OSError
_Name: TypeAlias = tuple[str, int]  # host and port
_PATIENCE_S: Final = 1.0  # for an answer about a name whose addresses are known
_MOST: Final = 65_536  # names that are remembered
logger = logging.getLogger(__name__)


class EngineNames:
    """Resolves each name anew for each connection. One that does not resolve has its last good addresses.

    That no name resolves says nothing of the engines: it is the cluster's DNS, which is away for seconds when its pods
    move. A request waits for it once; while a name is late, those that follow take the last addresses at once.
    """

    def __init__(self, resolve: Resolve, *, patience_s: float = _PATIENCE_S) -> None:
        self._resolve = resolve
        self._patience_s = patience_s
        self._known: dict[_Name, Sequence[str]] = {}
        self._asked: dict[_Name, asyncio.Task[Sequence[str]]] = {}  # that are not answered
        self._late: set[_Name] = set()  # that had no good answer the last time

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a name; raises OSError: it has none, and never had."""
        name = host, port
        known, asked = self._known.get(name), self._asked.get(name) or self._ask(name)
        if known is None:
            return await asyncio.shield(asked)
        if name not in self._late:
            await asyncio.wait((asked,), timeout=self._patience_s)
            if not asked.done():
                self._is_late(name, "no answer")
        return self._known.get(name, known)

    def _ask(self, name: _Name) -> "asyncio.Task[Sequence[str]]":
        async def ask() -> Sequence[str]:
            return await self._resolve(*name)

        task = self._asked[name] = asyncio.get_running_loop().create_task(ask())
        task.add_done_callback(lambda task: self._answered(name, task))
        return task

    def _answered(self, name: _Name, task: "asyncio.Task[Sequence[str]]") -> None:
        del self._asked[name]
        if task.cancelled():
            return
        error = task.exception()
        if error is None and (found := task.result()):
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[name] = found
            if name in self._late:
                self._late.remove(name)
                if not self._late:
                    logger.info("the names of engines resolve again")
        elif name in self._known:
            self._is_late(name, str(error or "no address"))

    def _is_late(self, name: _Name, why: str) -> None:
        if not self._late:
            logger.warning("names of engines do not resolve (%s): their last good addresses are used", why)
        self._late.add(name)
