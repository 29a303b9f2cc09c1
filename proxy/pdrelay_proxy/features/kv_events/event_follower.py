"""Follows the KV events of all engines, with one long GET for each."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.event_stream import PATH, KvEventStream, read_batch
from pdrelay_proxy.features.kv_events.core.known_prompts import KnownPrompts
from pdrelay_proxy.features.kv_events.errors import BadKvEvents
from pdrelay_proxy.features.kv_events.event_counts import EventCounts
from pdrelay_proxy.io.background import meanwhile
from pdrelay_proxy.io.probes.checks import HttpChecks, ProbeFailed

logger = logging.getLogger(__name__)
# seconds without a byte until a connection is given up: engines show life every 5
SILENT_S: Final = 20.0
_TICK_S: Final = 0.25  # seconds between two checks of the registry
# seconds before the next attempt; doubled with each failure, up to the most
_PAUSE_S: Final = 0.5
_PAUSE_MOST_S: Final = 30.0
_REFUSED_S: Final = 300.0  # seconds before an engine without events is tried again
_REFUSALS: Final = frozenset({401, 403, 404, 405, 501})
_Place: TypeAlias = tuple[Role, Address]
_Members: TypeAlias = Mapping[InstanceId, int | None]


class FollowState(FastStrEnum):
    """The state of the connection for one engine's events."""

    CONNECTING = "connecting"  # or waiting for the next attempt
    FOLLOWING = "following"
    REFUSED = "refused"  # it offers no events, or not to this router
    OVER_LIMIT = "over_limit"  # it has more blocks than the index keeps


class EndReason(FastStrEnum):
    """Why a connection ended, or could not be opened."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    BUSY = "busy"  # it has no room for another connection, or failed
    ENDED = "ended"  # by the engine, or the network
    SILENT = "silent"
    INVALID = "invalid"  # a gap, or invalid events
    OVER_LIMIT = "over_limit"


@dataclass(slots=True)
class _Following:
    """One engine that is followed, or will be."""

    members: _Members
    task: asyncio.Task[None]
    state: FollowState = FollowState.CONNECTING
    logged: str = ""
    is_up: bool = False  # by probes and requests
    came_up: asyncio.Event = field(default_factory=asyncio.Event)  # since the latest attempt began


@dataclass(slots=True)
class KvEventFollower:
    """One task for each engine; run it for as long as the router serves."""

    registry: Registry
    checks: HttpChecks
    index: CacheIndex
    counts: EventCounts
    chance: Callable[[], float]  # 0 to 1, so that several routers do not ask at once
    pause_s: float = _PAUSE_S
    refused_s: float = _REFUSED_S
    silent_s: float = SILENT_S
    known_prompts: KnownPrompts | None = None  # their counts are shown with those of the index
    _followed: dict[InstanceId, _Following] = field(default_factory=dict[InstanceId, _Following])

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Follow while the block lasts."""
        try:
            async with meanwhile(self._run()):
                yield
        finally:
            await self._drop(frozenset(self._followed))

    async def _run(self) -> None:
        while True:
            engines = self._engines_to_follow()
            changed = [
                name
                for name, following in self._followed.items()
                if engines.get(name, (None, None))[1] != following.members
            ]
            await self._drop(frozenset(changed))
            if changed:
                self.counts.keep(
                    frozenset([member.instance.id for member in self.registry.members()])
                )
            for name, (instance, members) in engines.items():
                if name not in self._followed:
                    task = asyncio.create_task(self._follow(name, instance))
                    self._followed[name] = _Following(members, task)
            self._note_health()
            self._show()
            await asyncio.sleep(_TICK_S)

    def _engines_to_follow(self) -> dict[InstanceId, tuple[Instance, _Members]]:
        """Return the engines by the name of their first instance: one for each role and address."""
        by_place: dict[_Place, list[Instance]] = {}
        for member in self.registry.members():
            instance = member.instance
            by_place.setdefault((instance.pool, instance.address), []).append(instance)
        return {
            instances[0].id: (instances[0], {instance.id: instance.rank for instance in instances})
            for instances in by_place.values()
        }

    async def _drop(self, names: frozenset[InstanceId]) -> None:
        tasks = [self._followed[name].task for name in names]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for name in names:
            del self._followed[name]
            self.index.forget(name)

    def _note_health(self) -> None:
        """Wake the pause of each engine that became healthy again: it may be long."""
        for following in self._followed.values():
            members = [self.registry.get(name) for name in following.members]
            is_up = any(
                member is not None and member.life.state is HealthState.HEALTHY
                for member in members
            )
            if is_up and not following.is_up:
                following.came_up.set()
            following.is_up = is_up

    def _show(self) -> None:
        """Update the gauges."""
        counts = self.counts
        counts.connections.clear()
        counts.index_blocks.clear()
        for name, following in self._followed.items():
            counts.connections[name, following.state] = 1
            counts.index_blocks[(name,)] = self.index.blocks(name)
        if self.known_prompts is not None:
            counts.known_prompt_bytes[()] = self.known_prompts.bytes
            for word, count in self.known_prompts.counts.items():
                counts.known_prompts[(word,)] = count

    async def _follow(self, name: InstanceId, instance: Instance) -> None:
        """Connect again and again, until cancelled."""
        failed = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            came_up = self._followed[name].came_up
            came_up.clear()
            try:
                reason, cause = await self._connection(name, instance)
            except Exception:  # a bug must not stop following this engine for ever
                logger.exception("the KV events of %s could not be followed", name)
                reason = EndReason.INVALID
                cause = "of a mistake in the router"
            following = self._followed[name]
            was_up = following.state is FollowState.FOLLOWING
            # one that tells its state and ends makes the router read all of it each time
            failed = 0 if was_up and loop.time() - began >= _PAUSE_MOST_S else failed + 1
            self._count(name)
            self.index.forget(name)
            self.counts.disconnects[name, reason] += 1
            following.state = _AFTER.get(reason, FollowState.CONNECTING)
            if following.logged != cause:
                following.logged = cause
                logger.log(
                    logging.INFO if reason is EndReason.UNREACHABLE else logging.WARNING,
                    "the KV events of %s are not followed: %s", name, cause,
                )  # fmt: skip
            pause = (
                self.refused_s
                if reason in _AFTER
                else min(self.pause_s * 2 ** min(failed, 16), _PAUSE_MOST_S)
            )
            if was_up:
                # this signal is older than the end of the connection
                came_up.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause * (0.75 + self.chance() / 2)):
                    await came_up.wait()
                    failed = 0

    async def _connection(self, name: InstanceId, instance: Instance) -> tuple[EndReason, str]:
        """Follow an engine until its connection ends; return the reason, and a text for the log."""
        following = self._followed[name]
        stream = KvEventStream()
        try:
            async with self.checks.open(instance, PATH) as (status, read):
                if status != 200:
                    text = (await read(self.silent_s))[:300].decode(errors="replace")
                    reason = EndReason.REFUSED if status in _REFUSALS else EndReason.BUSY
                    return reason, f"it answers with status {status}: {text!r}"
                self.index.open(name, following.members)
                following.state = FollowState.FOLLOWING
                while data := await read(self.silent_s):
                    for payload in stream.feed(data):
                        for _ in self.index.apply(name, read_batch(payload)):
                            await asyncio.sleep(0)
                    self._count(name)
                    if following.logged:
                        following.logged = ""
                        logger.info("the KV events of %s are followed", name)
                    if self.index.is_dropped(name):
                        self.counts.index_drops[(name,)] += 1
                        return EndReason.OVER_LIMIT, "it has more blocks than are remembered"
                    await asyncio.sleep(0)  # buffered data must not hold up requests
                return EndReason.ENDED, "it has ended the connection"
        except BadKvEvents as exc:
            return EndReason.INVALID, str(exc)
        except ProbeFailed as exc:
            if following.state is not FollowState.FOLLOWING:
                return EndReason.UNREACHABLE, f"it {exc}"
            return (
                EndReason.SILENT if isinstance(exc.__cause__, TimeoutError) else EndReason.ENDED
            ), f"it {exc}"

    def _count(self, name: InstanceId) -> None:
        counts = self.index.take_counts(name)
        events = self.counts.events
        for word, number in (
            ("stored", counts.stored),
            ("removed", counts.removed),
            ("cleared", counts.cleared),
            ("ignored", counts.ignored),
            ("unknown_parent", counts.unknown_parents),
        ):
            if number:
                events[name, word] += number


_AFTER: Final = {
    EndReason.REFUSED: FollowState.REFUSED,
    EndReason.OVER_LIMIT: FollowState.OVER_LIMIT,
}
