"""Waits until engines hold nothing, and says for how long they held what."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_tools.proving.bench import Bench, now
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.holdings import Holdings
from pdrelay_tools.proving.http_server import HttpServer

_POLL_S: Final = 0.2
_NUDGE_S: Final = 2.0  # vLLM's gauges move with a step: an engine that sleeps is given one
_METRICS_S: Final = 10.0
_RENEWED: Final = 2 / 3  # of a lease: what a renewal adds to the time of vLLM's own
_WATCHED_LEASES: Final = 1.5  # for which what is not back is watched


@dataclass(frozen=True, slots=True)
class Idleness:
    """How it went."""

    seconds: float | None  # until everything was back; None: not known, or never
    findings: tuple[Finding, ...]


async def wait_rest(bench: Bench, server: HttpServer, deadline: float) -> Holdings | None:
    """Wait until an engine holds nothing, or for the deadline; return what it holds then.

    None: it does not say.
    """
    seen: Holdings | None = None

    async def look() -> Sequence[HttpServer]:
        nonlocal seen
        seen = await bench.holdings(server)
        return [server] if seen is not None and seen.beyond(None) else []

    await _look_until(bench, look, now(), deadline)
    return seen


async def seconds_until_free(bench: Bench, server: HttpServer, since: float) -> float:
    """Return how long after ``since`` an engine holds nothing; it is watched for as long as a lease
    may last.
    """
    watch = _Watch(bench, [server], since, since)
    await _look_until(bench, watch.look, since, since + _WATCHED_LEASES * bench.limits.lease_s)
    return watch.back.get(server.name, now() - since)


async def wait_idle(
    bench: Bench, since: float, *, began: float, bound_s: float, dead: Collection[str] = ()
) -> Idleness:
    """Watch all engines until they hold nothing, from ``since`` (the last request's end) on.

    What is not back within the bound is a finding. It is watched on for as long as a lease may
    last: blocks of a prefill engine that are back when a lease that ``began`` with the check may be
    over were stranded. So is an engine that does not show any more what it holds, unless it is
    ``dead`` (names), which is another finding.
    """
    watch = _Watch(bench, bench.engines, since, began, dead)
    await _look_until(
        bench, watch.look, since, since + max(bound_s, _WATCHED_LEASES * bench.limits.lease_s)
    )
    findings = watch.late(bound_s) + [await _never(bench, server, watch) for server in watch.left]
    return Idleness(
        max(watch.back.values(), default=None) if not watch.left else None, tuple(findings)
    )


async def _look_until(
    bench: Bench, look: Callable[[], Awaitable[Sequence[HttpServer]]], since: float, deadline: float
) -> None:
    """Look again and again, until no engine holds something or the deadline is over; give a step to
    those that do.
    """
    nudged = since + _NUDGE_S
    while (left := await look()) and now() < deadline:
        if now() >= nudged:
            nudged = now() + 5 * _NUDGE_S
            await asyncio.gather(*(_nudge(bench, server) for server in left))
        await asyncio.sleep(_POLL_S)


class _Watch:
    """Who still holds something, and since when others hold nothing."""

    def __init__(
        self,
        bench: Bench,
        servers: Sequence[HttpServer],
        since: float,
        began: float,
        dead: Collection[str] = (),
    ) -> None:
        self.left: Sequence[HttpServer] = servers
        self.held: dict[str, str] = {}  # what was seen first, by engine
        self.unseen: set[str] = set()  # those that have shown what they hold, and do not now
        self.back: dict[str, float] = {}  # seconds
        self.since = since
        self._began = began
        self._bench = bench
        self._dead = dead

    async def look(self) -> Sequence[HttpServer]:
        """Look at those that held something; return those that still do."""
        left: list[HttpServer] = []
        for server in self.left:
            seen = await self._bench.holdings(server)
            if seen is None:
                if server.name in self._bench.usual and server.name not in self._dead:
                    self.unseen.add(server.name)
                    left.append(server)
                continue
            self.unseen.discard(server.name)
            if held := seen.beyond(self._bench.usual.get(server.name)):
                self.held.setdefault(server.name, held)
                left.append(server)
            else:
                self.back[server.name] = now() - self.since
        self.left = left
        return left

    def late(self, bound_s: float) -> list[Finding]:
        """Return what was back, and too late."""
        return [
            self._late(name, seconds, bound_s)
            for name, seconds in self.back.items()
            if seconds > bound_s and name in self.held
        ]

    def _late(self, name: str, seconds: float, bound_s: float) -> Finding:
        seen = f"{name} held {self.held[name]} for {seconds:.1f} s after the last request was over"
        if not is_strand(self._bench, name, seconds + self.since - self._began):
            return Finding(FindingName.BLOCKS_HELD, f"{seen}; {bound_s:g} s are allowed")
        lease = f"until leases of {self._bench.limits.lease_s:g} s had ended"
        return Finding(FindingName.BLOCKS_STRANDED, f"{seen}, {lease}; {bound_s:g} s are allowed")


def is_strand(bench: Bench, name: str, seconds: float) -> bool:
    """Tell whether an engine lends blocks, and held them so long after the first prompt that a
    lease may have ended.
    """
    return (
        name in {server.name for server in bench.prefill}
        and seconds >= _RENEWED * bench.limits.lease_s
    )


async def _never(bench: Bench, server: HttpServer, watch: _Watch) -> Finding:
    """Report what is not back, and take it as usual from now on: later checks are not blamed for
    it.
    """
    if server.name in watch.unseen:
        del bench.usual[server.name]
        reply = await server.get("/metrics", timeout_s=_METRICS_S)
        why = reply.failure() or "its metrics have no numbers of vLLM's cache"
        return Finding(FindingName.BLOCKS_UNSEEN, f"{server.name}: {why}")
    if (seen := await bench.holdings(server)) is not None:
        bench.usual[server.name] = seen
    said = f"{server.name} still held {watch.held[server.name]} after {now() - watch.since:.0f} s"
    return Finding(FindingName.BLOCKS_NEVER_FREED, said)


async def _nudge(bench: Bench, server: HttpServer) -> None:
    """Give an engine a step; what it answers does not matter."""
    body = {"model": bench.facts.name, "prompt": "step", "max_tokens": 1}
    await server.post("/v1/completions", body, timeout_s=bench.limits.request_s)
