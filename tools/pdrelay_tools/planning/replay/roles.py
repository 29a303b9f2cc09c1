"""Engines that turn, in virtual time: the router's own controller decides by what simulated engines
show.

A turn is slower than the router's: nothing moves. The engine gets nothing new, serves what it has
to its end, and then takes the other role with an empty batch and what is in its cache.
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
from pdrelay_tools.planning.replay.engine import EventLoop, VirtualEngine

_SERVE: Final = frozenset({HealthState.STARTING, HealthState.HEALTHY})
_LOOK_S: Final = 5.0  # between two looks of a controller
_GLANCE_S: Final = 0.25  # between two looks at whether a leaving engine is empty


@dataclass(frozen=True, slots=True)
class RolesPlan:
    """How engines turn."""

    targets: RoleTargets
    limits: RoleLimits = field(default_factory=RoleLimits)
    # that decide beside each other, each a part of the time between two looks later
    controllers: int = 1
    # the controllers are replaced so often by new ones, which know nothing; 0: never
    dies_every_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnedEngine:
    """One turn. Times are seconds of the replay."""

    began: float
    ended: float  # when the engine served its new role
    role: Role  # the new one
    prefill: int  # engines afterwards
    decode: int


class SimulatedRoles:
    """The controllers, and what they have engines do."""

    def __init__(
        self,
        plan: RolesPlan,
        registry: Registry,
        engines: MutableMapping[InstanceId, VirtualEngine],
        roles: MutableMapping[InstanceId, Role],
        loop: EventLoop,
    ) -> None:
        """``engines`` and ``roles`` get another name for an engine that has turned; the old one
        stays.
        """
        self._plan = plan
        self._registry = registry
        self._loop = loop
        self._engines = engines
        self._roles = roles
        self._controllers = self._new_controllers()
        # the role they turn to, and since when
        self._leaving = dict[InstanceId, tuple[Role, float]]()
        self._turned_at = list[float]()  # what all controllers know of each other's turns
        self._is_over: Callable[[], bool] = lambda: False
        self.turned: Final = list[TurnedEngine]()
        self.decisions: Final = list[tuple[float, RoleDecision]]()

    def start(self, is_over: Callable[[], bool]) -> None:
        """Look again and again, until it is over."""
        self._is_over = is_over
        for number in range(self._plan.controllers):
            self._loop.after(
                _LOOK_S * (1 + number / self._plan.controllers), partial(self._look, number)
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

    def _look(self, number: int) -> None:
        if self._is_over():
            return
        now = self._loop.now
        readings = [
            _reading(one.instance, self._engines[one.instance.id], now)
            for one in self._registry.members()
            if one.life.state in _SERVE
        ]
        turning = list(self._leaving)
        decision = self._controllers[number].decide(
            FleetSnapshot(readings, turning, self._turned_at), now=now
        )
        self.decisions.append((now, decision))
        if decision.turn is not None:
            self._begin(decision.turn.instance, decision.turn.role)
        self._loop.after(_LOOK_S, partial(self._look, number))

    def _begin(self, name: InstanceId, role: Role) -> None:
        now = self._loop.now
        self._turned_at.append(now)
        self._registry.departures.drain(name, now=now)
        self._leaving[name] = role, now
        self._loop.after(_GLANCE_S, partial(self._glance, name))

    def _glance(self, name: InstanceId) -> None:
        """Have an engine take its new role if it has nothing left."""
        member = self._registry.member(name)
        engine = self._engines[name]
        if member.load.in_flight or engine.running or engine.queued:
            self._loop.after(_GLANCE_S, partial(self._glance, name))
            return
        now = self._loop.now
        role, began = self._leaving.pop(name)
        self._registry.remove(name, now=now)
        again = self._registry.add(role, member.instance.address, facts=member.facts, now=now)
        self._engines[again.id] = engine
        self._roles[again.id] = role
        counts = [len(self._registry.known(each)) for each in Role]
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
