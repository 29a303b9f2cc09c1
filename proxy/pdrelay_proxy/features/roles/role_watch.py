"""Samples all engines every few seconds, and has the controller of roles decide."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from pdrelay_proxy.core.fleet.health import WELL
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineRole, Instance, Role
from pdrelay_proxy.features.roles.engine_totals import EngineReading, EngineTotals, engine_totals
from pdrelay_proxy.features.roles.leased_role_changes import LeasedRoleChanges
from pdrelay_proxy.features.roles.role_board import RoleBoard
from pdrelay_proxy.features.roles.role_controller import FleetSnapshot, RoleController, Verdict
from pdrelay_proxy.features.roles.role_lease import RoleHold
from pdrelay_proxy.io.background import meanwhile, repeatedly
from pdrelay_proxy.io.probes.checks import ProbeFailed
from pdrelay_proxy.io.probes.metrics_round import read_all

logger = logging.getLogger(__name__)


class RoleWatch:
    """One task; run it for as long as the router serves."""

    def __init__(
        self,
        registry: Registry,
        metrics: Callable[[Instance], Awaitable[bytes]],
        controller: RoleController,
        board: RoleBoard,
        *,
        queued: Callable[[], int],
        every_s: float,
        clock: Callable[[], float],
        role_changes: LeasedRoleChanges | None = None,
    ) -> None:
        """``role_changes``: begins role changes if this router decides; None: a dry run."""
        self._registry = registry
        self._metrics = metrics  # raises ProbeFailed
        self._controller = controller
        self._board = board
        self._queued = queued  # requests that wait in this router
        self._every_s = every_s
        self._clock = clock  # seconds; only differences count
        self._role_changes = role_changes

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Decide again and again while the block lasts."""
        async with meanwhile(
            repeatedly(self._every_s, self.decide, logger, "the roles could not be decided")
        ):
            yield

    async def decide(self) -> None:
        """Sample every serving engine, decide, and begin the role change that was decided."""
        all_members = self._registry.members()
        members = [
            member
            for member in all_members
            if member.life.state in WELL and not member.life.is_away and member.turn is None
        ]
        all_totals = await read_all(
            [member.instance for member in members], self._read, self._every_s
        )
        readings = list[EngineReading]()
        serving_both = list[EngineReading]()
        for member, totals in zip(members, all_totals, strict=True):
            (serving_both if member.role is EngineRole.BOTH else readings).append(
                self._reading(member, totals)
            )
        queued = self._queued()
        hold = (
            RoleHold(holds=True) if self._role_changes is None else await self._role_changes.hold()
        )
        snapshot = FleetSnapshot(
            readings,
            serving_both=serving_both,
            turning=[
                member.instance.id
                for member in all_members
                if member.turn is not None and not member.retires
            ],
            changed_at=None if self._role_changes is None else hold.changed_at,
            queued_requests=queued,
            trouble=hold.trouble or self._trouble(members),
            leads=hold.holds,
            leader=hold.holder,
        )
        decision = self._controller.decide(snapshot, now=self._clock())
        self._board.decided(decision)
        if decision.role_change is not None and self._role_changes is not None:
            instance = decision.role_change.instance
            role = decision.role_change.role
            if refusal := await self._role_changes.begin(
                instance, role, counts=decision.verdict is Verdict.TURN
            ):
                logger.warning("%s does not turn to %s: %s", instance, role, refusal)

    def _reading(self, member: Member, totals: EngineTotals | None) -> EngineReading:
        instance = member.instance
        other_role = EngineRole.DECODE if instance.role is Role.PREFILL else EngineRole.PREFILL
        may_turn = self._registry.get(instance.id) is member and self._registry.departures.can_turn(
            instance.id, other_role
        )
        return EngineReading(instance.id, instance.role, _key(instance), totals, may_turn)

    async def _read(self, instance: Instance) -> EngineTotals | None:
        """Return an engine's totals; None: it does not answer, which the prober logs."""
        try:
            text = await self._metrics(instance)
        except ProbeFailed:
            return None
        return engine_totals(text, instance.rank, now=self._clock())

    def _trouble(self, members: Sequence[Member]) -> str:
        """Return why no decision is possible for these engines; empty: it is."""
        if any(member.facts.pairs_within is not None for member in members):
            return "slice_pairing is require, and roles are decided for one pool of engines"
        return _mixed(members)


def _key(instance: Instance) -> str:
    """Return the name of an engine at every router: ids differ between routers."""
    return f"{instance.address.authority} {instance.rank}"


def _mixed(members: Sequence[Member]) -> str:
    models = {
        frozenset(member.facts.models) - (member.facts.adapters or frozenset())
        for member in members
        if member.facts.models is not None
    }
    if len(models) > 1:
        return (
            f"engines serve {len(models)} different sets of models, and roles are decided for one"
        )
    keys = [_key(member.instance) for member in members]
    if len(set(keys)) < len(keys):
        return "an engine has both roles at the same time"
    return ""
