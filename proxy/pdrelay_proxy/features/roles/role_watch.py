"""Looks at all engines again and again, and has the controller of roles decide."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from pdrelay_proxy.core.fleet.health import WELL
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineRole, Instance, Role
from pdrelay_proxy.features.roles.engine_totals import EngineReading, EngineTotals, engine_totals
from pdrelay_proxy.features.roles.role_board import RoleBoard
from pdrelay_proxy.features.roles.role_controller import FleetSnapshot, RoleController, Verdict
from pdrelay_proxy.features.roles.role_lease import RoleHold
from pdrelay_proxy.features.roles.role_turns import RoleTurns
from pdrelay_proxy.io.background import meanwhile, repeatedly
from pdrelay_proxy.io.probes.checks import ProbeFailed
from pdrelay_proxy.io.probes.metrics_round import look_at_all

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
        turns: RoleTurns | None = None,
    ) -> None:
        """``turns``: has engines turn, if this router is the one that decides; None: a dry run."""
        self._registry = registry
        self._metrics = metrics  # raises ProbeFailed
        self._controller = controller
        self._board = board
        self._queued = queued  # requests that wait in this router
        self._every_s = every_s
        self._clock = clock  # seconds; only differences count
        self._turns = turns

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Look and decide while the block lasts."""
        async with meanwhile(
            repeatedly(self._every_s, self.look, logger, "the roles could not be decided")
        ):
            yield

    async def look(self) -> None:
        """Look at every engine that serves, and decide."""
        known = self._registry.members()
        members = [
            one
            for one in known
            if one.life.state in WELL and not one.life.is_away and one.turn is None
        ]
        found = await look_at_all(
            [member.instance for member in members], self._read, self._every_s
        )
        readings = list[EngineReading]()
        both = list[EngineReading]()
        for one, totals in zip(members, found, strict=True):
            (both if one.role is EngineRole.BOTH else readings).append(self._reading(one, totals))
        queued = self._queued()
        hold = RoleHold(holds=True) if self._turns is None else await self._turns.hold()
        snapshot = FleetSnapshot(
            readings,
            both=both,
            turning=[one.instance.id for one in known if one.turn is not None and not one.retires],
            turned_at=None if self._turns is None else hold.turned_at,
            queued_requests=queued,
            trouble=hold.trouble or self._trouble(members),
            leads=hold.holds,
            leader=hold.holder,
        )
        decision = self._controller.decide(snapshot, now=self._clock())
        self._board.decided(decision)
        if decision.turn is not None and self._turns is not None:
            instance = decision.turn.instance
            role = decision.turn.role
            if why := await self._turns.begin(
                instance, role, counts=decision.verdict is Verdict.TURN
            ):
                logger.warning("%s does not turn to %s: %s", instance, role, why)

    def _reading(self, member: Member, totals: EngineTotals | None) -> EngineReading:
        one = member.instance
        other = EngineRole.DECODE if one.role is Role.PREFILL else EngineRole.PREFILL
        may_turn = self._registry.get(one.id) is member and self._registry.departures.can_turn(
            one.id, other
        )
        return EngineReading(one.id, one.role, _key(one), totals, may_turn)

    async def _read(self, instance: Instance) -> EngineTotals | None:
        """Return what an engine shows; None: it does not answer, and the prober says so."""
        try:
            text = await self._metrics(instance)
        except ProbeFailed:
            return None
        return engine_totals(text, instance.rank, now=self._clock())

    def _trouble(self, members: Sequence[Member]) -> str:
        """Say why the engines cannot be divided; empty: they can."""
        if any(member.facts.pairs_within is not None for member in members):
            return "slice_pairing is require, and roles are decided for one pool of engines"
        return _mixed(members)


def _key(instance: Instance) -> str:
    """Name an engine as every router does: ids are each router's own."""
    return f"{instance.address.authority} {instance.rank}"


def _mixed(members: Sequence[Member]) -> str:
    models = {
        frozenset(one.facts.models) - (one.facts.adapters or frozenset())
        for one in members
        if one.facts.models is not None
    }
    if len(models) > 1:
        return (
            f"engines serve {len(models)} different sets of models, and roles are decided for one"
        )
    keys = [_key(one.instance) for one in members]
    if len(set(keys)) < len(keys):
        return "an engine has both roles at the same time"
    return ""
