"""Resolves the names of engines, and uses their last addresses while DNS is away."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdrelay_proxy.io.wire.connection_guard import Resolve

_Name: TypeAlias = tuple[str, int]  # host and port
_PATIENCE_S: Final = 1.0  # wait for a name whose addresses are known
# Seconds for which a good answer stays in use: a resolver restarts in fewer, and health checks
# resolve every few seconds. Later the address may belong to another pod, which would get the
# prompts and perhaps the key.
_LAST_GOOD_S: Final = 60.0
_KEPT_S: Final = 120.0  # that a name counts as late: health checks look it up more often
_MOST: Final = 65_536  # names that are remembered
# Lookups at once of names that may hang: each takes a thread of the process, which has five at
# least.
_DOUBTFUL_MOST: Final = 4
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LastGood:
    """The addresses of a name, and when DNS answered so."""

    addresses: Sequence[str]
    at: float  # seconds of the event loop


class EngineNames:
    """Resolves each name anew for each connection.

    A name that does not resolve keeps its last good addresses for a minute.

    A failed lookup says nothing of the engines: the cluster's DNS is away for seconds when its pods
    move. A request waits for it once; while a name is late, further requests use the last addresses
    at once. A name that DNS denies is treated alike: a DNS server that has just started denies
    names that it has not loaded yet.
    """

    def __init__(self, resolve: Resolve, *, patience_s: float = _PATIENCE_S) -> None:
        self._resolve = resolve
        self._patience_s = patience_s
        self._known: dict[_Name, _LastGood] = {}
        self._lookups: dict[_Name, asyncio.Task[Sequence[str]]] = {}  # under way
        self._doubtful = asyncio.Semaphore(_DOUBTFUL_MOST)
        # whose last lookup failed or is late, and when, the oldest first
        self._late: dict[_Name, float] = {}
        # likewise: late names whose last good answer is too old
        self._expired: dict[_Name, float] = {}

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a name; raises OSError: it has none, and had none of late."""
        name = host, port
        known = self._known.get(name)
        lookup = self._lookups.get(name) or self._start_lookup(name)
        if known is None:
            return await asyncio.shield(lookup)
        if name not in self._late or _is_old(known):
            await asyncio.wait((lookup,), timeout=self._patience_s)
            if not lookup.done():
                self._is_late(name, "no answer")
        known = self._known.get(name, known)
        if _is_old(known):
            self._expire(name)
            raise _failure(lookup)
        return known.addresses

    def _start_lookup(self, name: _Name) -> "asyncio.Task[Sequence[str]]":
        async def lookup() -> Sequence[str]:
            if name in self._known and name not in self._late:
                return await self._resolve(*name)
            async with self._doubtful:
                return await self._resolve(*name)

        task = self._lookups[name] = asyncio.get_running_loop().create_task(lookup())
        task.add_done_callback(lambda task: self._answered(name, task))
        return task

    def _answered(self, name: _Name, task: "asyncio.Task[Sequence[str]]") -> None:
        del self._lookups[name]
        if task.cancelled():
            return
        error = task.exception()
        if error is None and (addresses := task.result()):
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[name] = _LastGood(addresses, asyncio.get_running_loop().time())
            self._expired.pop(name, None)
            if self._late.pop(name, None) is not None and not self._late:
                logger.info("the names of engines resolve again")
        elif name in self._known:
            self._is_late(name, str(error or "no address"))

    def _is_late(self, name: _Name, why: str) -> None:
        if _is_first(name, self._late):
            logger.warning(
                "names of engines do not resolve (%s): their last good addresses are used for %g s",
                why,
                _LAST_GOOD_S,
            )

    def _expire(self, name: _Name) -> None:
        if _is_first(name, self._expired):
            text = (
                "%s has not resolved for %g s: it is not connected to, as its address may be "
                "another's by now"
            )
            logger.warning(text, name[0], _LAST_GOOD_S)


def _is_first(name: _Name, others: dict[_Name, float]) -> bool:
    """Add a name, and return whether there was none; those of engines that were removed are not
    looked up any more, and are dropped.
    """
    now = asyncio.get_running_loop().time()
    while others and now - next(iter(others.values())) > _KEPT_S:
        del others[next(iter(others))]
    is_first = not others
    others.pop(name, None)
    others[name] = now
    return is_first


def _is_old(answer: _LastGood) -> bool:
    return asyncio.get_running_loop().time() - answer.at > _LAST_GOOD_S


def _failure(lookup: "asyncio.Task[Sequence[str]]") -> OSError:
    """Return why a lookup has no good answer."""
    error = lookup.exception() if lookup.done() and not lookup.cancelled() else None
    if isinstance(error, OSError):
        return error
    return socket.gaierror(socket.EAI_AGAIN, "the name does not resolve")
