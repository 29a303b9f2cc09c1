"""What the engines of a router can still take, for a gateway or a DNS above several fleets (``GET /capacity``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Final

from pdrelay_proxy.core.fleet.health import EngineHealth, HealthState
from pdrelay_proxy.core.fleet.registry import Member, Registry
from pdrelay_proxy.core.model import Role

MODELS_MOST: Final = 1000  # names that are listed
FRESH_S: Final = 60.0  # for so long what an engine showed counts; it is read every 15 s
_WELL: Final = frozenset({HealthState.STARTING, HealthState.HEALTHY})
_LEAVING: Final = frozenset({HealthState.DRAINING, HealthState.DRAINED})


@dataclass(frozen=True, slots=True)
class RoleCapacity:
    """The engines of one role; those that are drained do not count."""

    engines: int
    serving: int  # get requests now

    @property
    def share(self) -> float:
        """The part of them that get requests; 1 without any."""
        return self.serving / self.engines if self.engines else 1.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The router's own admission, all of its workers together."""

    running: int
    waiting: int
    most: int  # max_concurrency of the workers that answer, at least 1


@dataclass(frozen=True, slots=True)
class Capacity:
    """All of it; None: not known."""

    prefill: RoleCapacity
    decode: RoleCapacity
    slots: int | None  # requests that the decode engines that serve can have at once (decode_slots)
    free_slots: int | None
    kv_room: float | None  # free share of the KV cache of those decode engines that have shown it lately, on the mean
    admitted: Admitted
    models: Sequence[str]  # of those decode engines; at most MODELS_MOST
    can_serve: bool

    @property
    def share(self) -> float:
        """The part of the engines that serve, of the role that has lost more."""
        return min(self.prefill.share, self.decode.share)

    @property
    def utilization(self) -> float:
        """How much of what it has is in use, 0 to 1: of what is known, that which is used most."""
        used = [(self.admitted.running + self.admitted.waiting) / self.admitted.most]
        if self.slots and self.free_slots is not None:
            used.append(1.0 - self.free_slots / self.slots)
        if self.kv_room is not None:
            used.append(1.0 - self.kv_room)
        return min(1.0, max(used))

    @property
    def weight(self) -> int:
        """Tell how much more it can take, 0 to 100. Only what cannot serve has 0: full is not away."""
        if not self.can_serve:
            return 0
        return max(1, round(100.0 * self.share * (1.0 - self.utilization)))


def capacity_of(
    registry: Registry,
    admitted: Admitted,
    *,
    slots: int | None,
    is_ready: bool,
    decode_alone: bool,
    now: float,
) -> Capacity:
    """Add up what is known. ``slots``: of a decode engine; ``decode_alone``: it may serve without a prefill engine."""
    by_role = {
        role: [
            member
            for member in registry.members()
            if member.as_role(role) is not None and member.life.state not in _LEAVING
        ]
        for role in Role
    }
    serving = {role: [member for member in members if _serves(member.life)] for role, members in by_role.items()}
    prefill, decode = (RoleCapacity(len(by_role[role]), len(serving[role])) for role in Role)
    decodes = serving[Role.DECODE]
    names = {name for member in decodes for name in member.facts.models or ()}
    rooms = [1.0 - usage for member in decodes if (usage := _kv_usage(member, now=now)) is not None]
    free = None if slots is None else sum([max(0, slots - _requests(member, now=now)) for member in decodes])
    return Capacity(
        prefill,
        decode,
        None if slots is None else slots * len(decodes),
        free,
        fsum(rooms) / len(rooms) if rooms else None,
        admitted,
        sorted(names)[:MODELS_MOST],
        is_ready and decode.serving > 0 and (prefill.serving > 0 or decode_alone),
    )


def _serves(life: EngineHealth) -> bool:
    """Tell whether an engine gets requests as they come; one on trial gets one at a time, which is nothing here."""
    return life.state in _WELL and not life.is_away


def _requests(member: Member, *, now: float) -> int:
    """Count the requests of an engine: its own number has those of other routers, ours those of this moment."""
    shown = member.shown
    own = member.load.in_flight
    return own if shown is None or now > shown.at + FRESH_S else max(own, shown.requests)


def _kv_usage(member: Member, *, now: float) -> float | None:
    shown = member.shown
    return None if shown is None or now > shown.at + FRESH_S else shown.kv_usage
