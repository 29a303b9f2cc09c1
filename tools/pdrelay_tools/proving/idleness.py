"""Waits until engines hold nothing, and reports blocks that were held too long."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_tools.http_server import HttpServer
from pdrelay_tools.proving.bench import Bench, now
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.holdings import Holdings

_POLL_S: Final = 0.2
_NUDGE_S: Final = 2.0  # vLLM updates its gauges in a step: an idle engine is sent a request
_METRICS_S: Final = 10.0
_RENEWED: Final = 2 / 3  # of a lease: what a renewal adds to the time of vLLM's own
_WATCHED_LEASES: Final = 1.5  # for so many leases held blocks are watched


@dataclass(frozen=True, slots=True)
class Idleness:
    """How long the engines took to be idle, and findings about that."""

    seconds: float | None  # until everything was back; None: not known, or never
    findings: tuple[Finding, ...]


async def wait_rest(bench: Bench, server: HttpServer, deadline: float) -> Holdings | None:
    """Wait until an engine holds nothing, or for the deadline; return its holdings, if known."""
    holdings: Holdings | None = None

    async def list_holders() -> Sequence[HttpServer]:
        nonlocal holdings
        holdings = await bench.holdings(server)
        return [server] if holdings is not None and holdings.beyond(None) else []

    await _poll_until_free(bench, list_holders, now(), deadline)
    return holdings


async def seconds_until_free(bench: Bench, server: HttpServer, since: float) -> float:
    """Return how long after ``since`` an engine holds nothing, up to the end of any lease."""
    watch = _Watch(bench, [server], since, since)
    await _poll_until_free(
        bench, watch.list_holders, since, since + _WATCHED_LEASES * bench.limits.lease_s
    )
    return watch.back.get(server.name, now() - since)


async def wait_idle(
    bench: Bench, since: float, *, began: float, bound_s: float, dead: Collection[str] = ()
) -> Idleness:
    """Watch all engines until they hold nothing, from ``since`` (the last request's end) on.

    Blocks that are not free within the bound are a finding. They are watched for as long as a lease
    may last: those of a prefill engine that get free only when a lease that ``began`` with the
    check may have ended were stranded. An engine whose metrics stop to show its blocks is a
    finding, too, unless it is ``dead`` (names), which another finding reports.
    """
    watch = _Watch(bench, bench.engines, since, began, dead)
    await _poll_until_free(
        bench,
        watch.list_holders,
        since,
        since + max(bound_s, _WATCHED_LEASES * bench.limits.lease_s),
    )
    findings = watch.late(bound_s) + [
        await _never_freed(bench, server, watch) for server in watch.holders
    ]
    return Idleness(
        max(watch.back.values(), default=None) if not watch.holders else None, tuple(findings)
    )


async def _poll_until_free(
    bench: Bench,
    list_holders: Callable[[], Awaitable[Sequence[HttpServer]]],
    since: float,
    deadline: float,
) -> None:
    """Poll until no engine holds blocks, or for the deadline; nudge those that do."""
    nudged = since + _NUDGE_S
    while (holders := await list_holders()) and now() < deadline:
        if now() >= nudged:
            nudged = now() + 5 * _NUDGE_S
            await asyncio.gather(*(_nudge(bench, server) for server in holders))
        await asyncio.sleep(_POLL_S)


class _Watch:
    """Records which engines hold blocks, and when the others became free."""

    def __init__(
        self,
        bench: Bench,
        servers: Sequence[HttpServer],
        since: float,
        began: float,
        dead: Collection[str] = (),
    ) -> None:
        self.holders: Sequence[HttpServer] = servers
        self.first_held: dict[str, str] = {}  # by engine, in words
        self.unseen: set[str] = set()  # engines whose metrics do not show their blocks any more
        self.back: dict[str, float] = {}  # seconds until an engine held nothing
        self.since = since
        self._began = began
        self._bench = bench
        self._dead = dead

    async def list_holders(self) -> Sequence[HttpServer]:
        """Read the engines that held blocks; return those that still do."""
        holders: list[HttpServer] = []
        for server in self.holders:
            holdings = await self._bench.holdings(server)
            if holdings is None:
                if server.name in self._bench.usual and server.name not in self._dead:
                    self.unseen.add(server.name)
                    holders.append(server)
                continue
            self.unseen.discard(server.name)
            if excess := holdings.beyond(self._bench.usual.get(server.name)):
                self.first_held.setdefault(server.name, excess)
                holders.append(server)
            else:
                self.back[server.name] = now() - self.since
        self.holders = holders
        return holders

    def late(self, bound_s: float) -> list[Finding]:
        """Return findings of engines that held blocks for too long."""
        return [
            self._late(name, seconds, bound_s)
            for name, seconds in self.back.items()
            if seconds > bound_s and name in self.first_held
        ]

    def _late(self, name: str, seconds: float, bound_s: float) -> Finding:
        evidence = f"{name} held {self.first_held[name]} for {seconds:.1f} s after the last request was over"
        if not is_strand(self._bench, name, seconds + self.since - self._began):
            return Finding(FindingName.BLOCKS_HELD, f"{evidence}; {bound_s:g} s are allowed")
        lease = f"until leases of {self._bench.limits.lease_s:g} s had ended"
        return Finding(
            FindingName.BLOCKS_STRANDED, f"{evidence}, {lease}; {bound_s:g} s are allowed"
        )


def is_strand(bench: Bench, name: str, seconds: float) -> bool:
    """Tell whether a prefill engine held blocks for so long that a lease may have ended."""
    return (
        name in {server.name for server in bench.prefill}
        and seconds >= _RENEWED * bench.limits.lease_s
    )


async def _never_freed(bench: Bench, server: HttpServer, watch: _Watch) -> Finding:
    """Report blocks that are still held, and count them as usual: later checks are not to blame."""
    if server.name in watch.unseen:
        del bench.usual[server.name]
        reply = await server.get("/metrics", timeout_s=_METRICS_S)
        reason = reply.failure() or "its metrics have no numbers of vLLM's cache"
        return Finding(FindingName.BLOCKS_UNSEEN, f"{server.name}: {reason}")
    if (holdings := await bench.holdings(server)) is not None:
        bench.usual[server.name] = holdings
    evidence = f"{server.name} still held {watch.first_held[server.name]} after {now() - watch.since:.0f} s"
    return Finding(FindingName.BLOCKS_NEVER_FREED, evidence)


async def _nudge(bench: Bench, server: HttpServer) -> None:
    """Make an engine run a step; its answer does not matter."""
    body = {"model": bench.facts.name, "prompt": "step", "max_tokens": 1}
    await server.post("/v1/completions", body, timeout_s=bench.limits.request_s)
