"""Role changes in virtual time: the router's controller decides by simulated engines' loads.

A role change is slower than the router's, as no stream moves: the engine gets no new requests,
serves its own to their end, and then takes the other role, with its cache.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.features.roles.engine_totals import EngineReading, EngineTotals
from pdrelay_proxy.features.roles.role_controller import (
    FleetSnapshot,
    RoleController,
    RoleDecision,
    RoleLimits,
)
from pdrelay_proxy.features.roles.work_meter import RoleTargets
from pdrelay_tools.planning.replay.engine import EventLoop, TurnedEngine, VirtualEngine

_SERVE: Final = frozenset({HealthState.STARTING, HealthState.HEALTHY})
_DECIDE_EVERY_S: Final = 5.0
_POLL_S: Final = 0.25  # between two checks whether a leaving engine is empty


@dataclass(frozen=True, slots=True)
class RolesPlan:
    """How engines change roles."""

    targets: RoleTargets
    limits: RoleLimits = field(default_factory=RoleLimits)
    # that decide independently, at different times
    controllers: int = 1
    # how often new controllers, without a memory, replace these; 0: never
    dies_every_s: float = 0.0

    def begin(
        self,
        registry: Registry,
        engines: MutableMapping[InstanceId, VirtualEngine],
        roles: MutableMapping[InstanceId, Role],
        loop: EventLoop,
    ) -> "SimulatedRoles":
        """Return what changes them."""
        return SimulatedRoles(self, registry, engines, roles, loop)


class SimulatedRoles:
    """The controllers, and the role changes that they decide."""

    def __init__(
        self,
        plan: RolesPlan,
        registry: Registry,
        engines: MutableMapping[InstanceId, VirtualEngine],
        roles: MutableMapping[InstanceId, Role],
        loop: EventLoop,
    ) -> None:
        """``engines`` and ``roles`` get a second name for an engine that has another role."""
        self._plan = plan
        self._registry = registry
        self._loop = loop
        self._engines = engines
        self._roles = roles
        self._controllers = self._new_controllers()
        # the role they turn to, and since when
        self._leaving = dict[InstanceId, tuple[Role, float]]()
        self._changed_at = list[float]()  # of all controllers, which know each other's
        self._is_over: Callable[[], bool] = lambda: False
        self.turned: Final = list[TurnedEngine]()
        self.decisions: Final = list[tuple[float, RoleDecision]]()

    def start(self, is_over: Callable[[], bool]) -> None:
        """Decide again and again, until the replay is over."""
        self._is_over = is_over
        for number in range(self._plan.controllers):
            self._loop.after(
                _DECIDE_EVERY_S * (1 + number / self._plan.controllers),
                partial(self._decide, number),
            )
        if self._plan.dies_every_s:
            self._loop.after(self._plan.dies_every_s, self._die)

    def _new_controllers(self) -> list[RoleController]:
        return [
            RoleController(self._plan.targets, self._plan.limits)
            for _ in range(self._plan.controllers)
        ]

    def _die(self) -> None:
        if not self._is_over():
            self._controllers = self._new_controllers()
            self._loop.after(self._plan.dies_every_s, self._die)

    def _decide(self, number: int) -> None:
        if self._is_over():
            return
        now = self._loop.now
        readings = [
            _reading(member.instance, self._engines[member.instance.id], now)
            for member in self._registry.members()
            if member.life.state in _SERVE
        ]
        turning = list(self._leaving)
        decision = self._controllers[number].decide(
            FleetSnapshot(readings, turning, self._changed_at), now=now
        )
        self.decisions.append((now, decision))
        if decision.role_change is not None:
            self._begin_role_change(decision.role_change.instance, decision.role_change.role)
        self._loop.after(_DECIDE_EVERY_S, partial(self._decide, number))

    def _begin_role_change(self, name: InstanceId, role: Role) -> None:
        now = self._loop.now
        self._changed_at.append(now)
        self._registry.departures.drain(name, now=now)
        self._leaving[name] = role, now
        self._loop.after(_POLL_S, partial(self._finish_if_empty, name))

    def _finish_if_empty(self, name: InstanceId) -> None:
        """Give an engine its new role if it has no request left."""
        member = self._registry.member(name)
        engine = self._engines[name]
        if member.load.in_flight or engine.running or engine.queued:
            self._loop.after(_POLL_S, partial(self._finish_if_empty, name))
            return
        now = self._loop.now
        role, began = self._leaving.pop(name)
        self._registry.remove(name, now=now)
        again = self._registry.add(role, member.instance.address, facts=member.facts, now=now)
        self._engines[again.id] = engine
        self._roles[again.id] = role
        counts = [len(self._registry.known(serving_role)) for serving_role in Role]
        self.turned.append(TurnedEngine(began, now, role, *counts))


def _reading(instance: Instance, engine: VirtualEngine, now: float) -> EngineReading:
    log = engine.log
    totals = EngineTotals(
        at=now,
        running=engine.running,
        waiting=engine.queued,
        kv_usage=engine.kv_use,
        computed_tokens=log.computed_tokens,
        prompts=log.legs,
        itl_sum_s=log.itl_sum_s,
        itl_count=log.itl_count,
    )
    return EngineReading(instance.id, instance.role, instance.address.authority, totals)


def plan_for(ttft_s: float, itl_s: float) -> RolesPlan:
    """Return the plan that keeps these targets."""
    return RolesPlan(RoleTargets(ttft_s, itl_s))
