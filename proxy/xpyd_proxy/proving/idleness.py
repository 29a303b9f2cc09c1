"""Waits until engines hold nothing, and says for how long they held what."""

import asyncio
from dataclasses import dataclass
from typing import Final

from xpyd_proxy.proving.bench import Bench, now
from xpyd_proxy.proving.core.finding import Finding, FindingName
from xpyd_proxy.proving.http_server import HttpServer

_POLL_S: Final = 0.2
_NUDGE_S: Final = 2.0  # vLLM's gauges move with a step: an engine that sleeps is given one
_WATCHED_BEYOND_S: Final = 15.0  # after the lease


@dataclass(frozen=True, slots=True)
class Idleness:
    """How it went."""

    seconds: float | None  # until everything was back; None: not known, or never
    findings: tuple[Finding, ...]


async def wait_idle(bench: Bench, since: float, *, bound_s: float) -> Idleness:
    """Watch all engines until they hold nothing, from ``since`` (the last request's end) on.

    What is not back within the bound is a finding. It is watched on for as long as a lease may last.
    """
    watched = bound_s if bound_s > bench.limits.lease_s else bench.limits.lease_s + _WATCHED_BEYOND_S
    watch = _Watch(bench, since)
    nudged = since + _NUDGE_S
    while await watch.look() and now() - since <= watched:
        if now() >= nudged:
            nudged = now() + 5 * _NUDGE_S
            await asyncio.gather(*(_nudge(bench, server) for server in watch.left))
        await asyncio.sleep(_POLL_S)
    findings = watch.late(bound_s) + [await _never(bench, server, watch) for server in watch.left]
    return Idleness(max(watch.back.values(), default=None) if not watch.left else None, tuple(findings))


class _Watch:
    """Who still holds something, and since when others hold nothing."""

    def __init__(self, bench: Bench, since: float) -> None:
        self.left: list[HttpServer] = list(bench.engines)
        self.held: dict[str, str] = {}  # what was seen first, by engine
        self.back: dict[str, float] = {}  # seconds
        self.since = since
        self._bench = bench

    async def look(self) -> bool:
        """Look at those that held something; tell whether one of them still does."""
        left: list[HttpServer] = []
        for server in self.left:
            seen = await self._bench.holdings(server)
            if seen is None:  # it does not say, or is dead, which is another finding
                continue
            if held := seen.beyond(self._bench.usual.get(server.name)):
                self.held.setdefault(server.name, held)
                left.append(server)
            else:
                self.back[server.name] = now() - self.since
        self.left = left
        return bool(left)

    def late(self, bound_s: float) -> list[Finding]:
        """Return what was back, and too late."""
        return [
            Finding(
                FindingName.BLOCKS_HELD,
                f"{name} held {self.held.get(name)} for {seconds:.1f} s; {bound_s:g} s are allowed",
            )
            for name, seconds in self.back.items()
            if seconds > bound_s and name in self.held
        ]


async def _never(bench: Bench, server: HttpServer, watch: _Watch) -> Finding:
    """Report what is not back, and take it as usual from now on: later checks are not blamed for it."""
    if (seen := await bench.holdings(server)) is not None:
        bench.usual[server.name] = seen
    said = f"{server.name} still held {watch.held[server.name]} after {now() - watch.since:.0f} s"
    return Finding(FindingName.BLOCKS_NEVER_FREED, said)


async def _nudge(bench: Bench, server: HttpServer) -> None:
    """Give an engine a step; what it answers does not matter."""
    body = {"model": bench.facts.name, "prompt": "step", "max_tokens": 1}
    await server.post("/v1/completions", body, timeout_s=bench.limits.request_s)
