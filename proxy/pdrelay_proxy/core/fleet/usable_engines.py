"""Which engines may get a request now: looked at once, until something changes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.member_table import MemberTable
from pdrelay_proxy.core.fleet.named_engines import listed
from pdrelay_proxy.core.fleet.twins import Twins
from pdrelay_proxy.core.model import Instance, Role
from pdrelay_proxy.errors import NoInstance

_HEALTHY: Final = HealthState.HEALTHY


@dataclass(frozen=True, slots=True)
class _Usable:
    """The engines of a role that can take a request, while nothing changes."""

    version: int  # the changes counted so far
    until: float  # when the passing of time may change it
    engines: Sequence[Instance]


class UsableEngines:
    """Of each role."""

    __slots__ = ("_changes", "_steady", "_table", "_twins", "_usable")

    def __init__(self, table: MemberTable, twins: Twins) -> None:
        self._table = table
        self._twins = twins
        self._changes = table.changes
        self._usable: dict[Role, _Usable] = {}
        # until when nothing but events changes it, and for which changes
        self._steady: tuple[int, float] = (-1, 0.0)

    def of(self, role: Role, now: float) -> Sequence[Instance]:
        """List the engines of a role that can take a request; raises NoInstance, with what has
        become of them.

        While nothing changes, the list is the same one: a request must not cost a look at each of
        thousands.
        """
        known = self._usable.get(role)
        if known is not None and known.version == self._changes.count and now < known.until:
            return known.engines
        engines = list[Instance]()
        until = math.inf
        for life, instance in self._table.serving[role].values():
            if life.state is _HEALTHY:  # nearly all are
                engines.append(instance)
                continue
            if life.may_serve(now=now):
                engines.append(instance)
            until = min(until, life.steady_until)
        if engines:
            kept = tuple(self._twins.without(engines))
            usable = self._usable[role] = _Usable(self._changes.count, until, kept)
            return usable.engines
        raise self._none(role, now)

    def _none(self, role: Role, now: float) -> NoInstance:
        members = [self._table.member(name) for name in self._table.serving[role]]
        if not members:
            return NoInstance(f"the router knows no {role} instance")
        states = list[str]()
        for member in members:
            state = (
                "being tried"
                if member.life.state is HealthState.HALF_OPEN
                else member.life.state.value
            )
            why = f" ({member.life.why})" if member.life.state is HealthState.STARTING else ""
            states.append(f"{member.instance.id} is {state}{why}")
        waits = [
            wait for member in members if (wait := member.life.serves_in_s(now=now)) is not None
        ]
        return NoInstance(
            f"no {role} instance can take a request: {listed(states)}",
            retry_after_s=max(1, math.ceil(min(waits))) if waits else None,
        )

    @property
    def steady_until(self) -> float:
        """When time may change which engines are usable; infinity: only what is counted does."""
        version, until = self._steady
        if version != self._changes.count:
            known = [
                usable.until
                for usable in self._usable.values()
                if usable.version == self._changes.count
            ]
            if len(known) == len(Role):  # all engines were looked at just now
                until = min(known)
            else:
                lives = [
                    member.life
                    for member in self._table.by_id.values()
                    if member.life.state is not _HEALTHY
                ]
                until = min([life.steady_until for life in lives], default=math.inf)
            self._steady = self._changes.count, until
        return until
