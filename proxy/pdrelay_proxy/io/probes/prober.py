"""Asks every engine again and again whether it lives and, less often, what it is; drained ones,
what they keep.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from pdrelay_proxy.core.fleet.fleet_warnings import FleetWarnings, pair_differences
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.probe_schedule import OtherProbes, ProbeSchedule, keeps_blocks
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId
from pdrelay_proxy.core.steps import portions
from pdrelay_proxy.io.background import meanwhile
from pdrelay_proxy.io.probes.checks import HttpChecks, ProbeFailed, ProbeNotMade
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)
# Seconds between two glances at who is due: each wakes a process that may have nothing to do.
_TICK_MOST_S: Final = 0.25
_TICK_LEAST_S: Final = 0.1
# Probes that begin at the same moment: with thousands of engines a hundred and more are due at a
# glance. All of them together would take tens of milliseconds, in which requests wait, so they are
# spread over the time until the next.
_BEGUN_AT_ONCE: Final = 4
# between these: enough for what four take, and a small fleet is known at once
_APART_MOST_S: Final = 0.01
_SEEN_AT_ONCE: Final = 250  # engines that are gone over in one step: half a millisecond
_MOST_LOGGED: Final = 20  # pairs in the log at one glance: a rollout of many revisions has hundreds
# an engine that has not answered by then may never do: a wrong name, port or key
_START_S: Final = 30.0
# Without a request, until a draining prefill engine is believed to be empty that does not say so:
# twice the leases of both connectors (30 s), which decode engines may have renewed once more.
DRAIN_IDLE_S: Final = 60.0
# without an answer to any check, until an engine's requests are retried elsewhere
HUNG_S: Final = 30.0
_MAY_BE_NEW: Final = frozenset({HealthState.STARTING, HealthState.EJECTED})
_TICKS: Final = 20  # glances in the time between two probes


class GiveUp(Protocol):
    """Ends the requests in flight at an engine."""

    def __call__(self, instance: Instance, /, *, silent_s: float) -> int:
        """Those that have heard nothing from it for so many seconds; return how many there were."""
        ...


class Prober:
    """One task group; run it for as long as the router serves."""

    def __init__(
        self,
        registry: Registry,
        checks: HttpChecks,
        settings: Settings,
        clock: Callable[[], float],
        chance: Callable[[], float],
        *,
        give_up: GiveUp | None = None,
        others: OtherProbes | None = None,
        warnings: FleetWarnings | None = None,
        drain_idle_s: float = DRAIN_IDLE_S,
        hung_s: float = HUNG_S,
    ) -> None:
        """``others``: what other routers probe; None: there are none.

        ``warnings``: those of others to see.
        """
        self._registry = registry
        self._checks = checks
        self._settings = settings
        self._drain_idle_s = drain_idle_s
        self._hung_s = hung_s
        self._clock = clock  # seconds; only differences count
        self._give_up = give_up
        self._schedule = ProbeSchedule(settings.health_check_interval_s, chance, others)
        self._others = others
        # and whether it should be up by now
        self._logged_states: dict[InstanceId, tuple[HealthState, str, bool]] = {}
        self._compared = -1  # changes of the registry when pairs of engines were last compared
        self._differences: Mapping[tuple[InstanceId, InstanceId], str] = {}
        self._warnings = warnings or FleetWarnings()
        self._is_lacking = False  # a probe could not be made, and none was since

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Probe while the block lasts."""
        async with meanwhile(self._run()):
            yield

    async def _run(self) -> None:
        tick_s = max(
            _TICK_LEAST_S, min(_TICK_MOST_S, self._settings.health_check_interval_s / _TICKS)
        )
        async with asyncio.TaskGroup() as group:
            while True:
                until = self._clock() + tick_s
                await self._log_changes()
                for instance in self._registry.settle(
                    patience_s=self._drain_idle_s, now=self._clock()
                ):
                    if self._registry.get(instance.id) is None:
                        logger.info("%s has nothing left, and is forgotten", instance.id)
                due = await self._due()
                for number, member in enumerate(due, start=1):
                    group.create_task(self._visit(member, group))
                    if number % _BEGUN_AT_ONCE == 0:
                        await asyncio.sleep(min(_APART_MOST_S, tick_s * _BEGUN_AT_ONCE / len(due)))
                await asyncio.sleep(max(0.0, until - self._clock()))

    async def _due(self) -> Sequence[Member]:
        """Return the engines to probe now: to go over thousands takes milliseconds, so others have
        their turns.
        """
        members = self._registry.members()
        self._schedule.know(members)
        due = list[tuple[float, Member]]()
        for portion in portions(members, _SEEN_AT_ONCE):
            await asyncio.sleep(0)
            due += self._schedule.due(portion, now=self._clock())
        return self._schedule.begin_due(due, now=self._clock())

    async def _log_changes(self) -> None:
        """Log what has changed; thousands of engines are looked at in steps."""
        self._log_states()
        await asyncio.sleep(0)
        if self._compared != self._registry.changes.count:
            self._compared = self._registry.changes.count
            self._log_differences()
            await asyncio.sleep(0)
            self._log_warnings()
            await asyncio.sleep(0)

    def _log_states(self) -> None:
        """Log what has become of engines, whether a probe, a request or an operator did it."""
        members = self._registry.members()
        now = self._clock()
        states = dict[InstanceId, tuple[HealthState, str, bool]]()
        for member in members:
            life = member.life
            is_late = (
                life.state is HealthState.STARTING and life.is_away and now >= life.since + _START_S
            )
            states[member.instance.id] = life.state, life.why, is_late
            if (
                self._logged_states.get(member.instance.id, (life.state, life.why, False))
                != states[member.instance.id]
            ):
                level = (
                    logging.WARNING
                    if is_late or life.state is HealthState.EJECTED
                    else logging.INFO
                )
                logger.log(level, "%s is %s: %s", member.instance.id, life.state, life.why)
        self._logged_states = states

    def _log_differences(self) -> None:
        """Log once which engines cannot share requests; of engines alike, the first."""
        differences = pair_differences(self._registry.members())
        new = [
            (pair, why) for pair, why in differences.items() if self._differences.get(pair) != why
        ]
        for (decode_id, prefill_id), why in new[:_MOST_LOGGED]:
            logger.warning("%s shares no request with %s: %s", decode_id, prefill_id, why)
        if len(new) > _MOST_LOGGED:
            logger.warning(
                "so it is with %d more pairs of engines of two kinds", len(new) - _MOST_LOGGED
            )
        self._differences = differences

    def _log_warnings(self) -> None:
        """Log, once, what is wrong with the fleet as a whole."""
        for text in self._warnings.update(self._registry)[:_MOST_LOGGED]:
            logger.warning("%s", text)

    async def _visit(self, member: Member, group: asyncio.TaskGroup) -> None:
        failed = True
        begun = self._clock()
        missed = member.life.misses
        try:
            await self._probe(member)
            failed = self._is_lacking = False
        except ProbeNotMade as lack:
            if not self._is_lacking:
                self._is_lacking = True
                logger.warning(
                    "%s %s: engines are not judged by probes until that is over",
                    member.instance.id,
                    lack,
                )
        except ProbeFailed as sick:
            member.life.missed(str(sick), now=self._clock(), silent=sick.silent)
            if not missed and self._is_missed_elsewhere(member.instance.id, begun=begun):
                member.life.missed(
                    f"{sick}, and another router neither", now=self._clock(), silent=sick.silent
                )
            hung_s = self._hung_s
            # its connections may stay open for ever
            hangs = member.life.silent_s(now=self._clock()) >= hung_s
            if (
                hangs
                and self._give_up
                and (count := self._give_up(member.instance, silent_s=hung_s))
            ):
                warning = "%s has answered no probe for %g s: %d requests are given up"
                logger.warning(warning, member.instance.id, hung_s, count)
        except Exception:  # a bug must not end the probing of all the others
            logger.exception("the probe of %s failed", member.instance.id)
        if self._others is not None and (missed == 0) != (member.life.misses == 0):
            self._others.note(member.instance.id, is_missing=missed == 0)
        self._schedule.ended(member.instance.id, failed=failed, now=self._clock())
        for other in self._schedule.begin(now=self._clock()):
            group.create_task(self._visit(other, group))

    def _is_missed_elsewhere(self, name: InstanceId, *, begun: float) -> bool:
        """Tell whether a failed probe counts as the second one in a row."""
        return self._others is not None and self._others.is_second_miss(name, begun=begun)

    async def _probe(self, member: Member) -> None:
        name = member.instance.id
        if keeps_blocks(member) and member.drain is not None:
            member.drain.reading((await self._checks.numbers(member.instance)).kept)
            member.life.heard()
            return
        begun = self._clock()
        is_whole = self._schedule.is_whole(member, now=begun)
        newer_facts = await self._checks.probe(member.instance, is_whole=is_whole)
        facts = member.facts  # of one that was just added, the models alone are known
        # It may be another engine by now; so may one that was drained, which is not ejected.
        was_away = member.life.state in _MAY_BE_NEW or member.life.misses > 0
        is_new = facts.models is None or facts.version is None or was_away or member.may_be_new
        if is_whole and is_new:
            with suppress(ProbeFailed):  # it lives, and an engine may keep its metrics to itself
                numbers = await self._checks.numbers(member.instance)
                newer_facts = newer_facts.updated(numbers.facts)
            member.asked_at = begun
        self._registry.learn(name, newer_facts)
        member.life.seen(now=self._clock())
