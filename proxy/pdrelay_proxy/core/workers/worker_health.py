"""What the workers of one router tell each other of the engines: all of it every time, so a lost word costs nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Member, Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.schemas import HealthVerdict

MOST: Final = 1000  # engines in one bulletin; what is beyond has less to say
_WHY_MOST: Final = 100  # characters


class InstanceHealth(msgspec.Struct, frozen=True, array_like=True):
    """One engine, as one worker has it."""

    in_flight: int = 0  # requests of this worker
    is_drained: bool = False
    verdict: HealthVerdict | None = None


class HealthUpdate(msgspec.Struct, frozen=True, array_like=True):
    """One worker's engines; those of which there is nothing to say are left out."""

    worker: int
    engines: Mapping[InstanceId, InstanceHealth]


_NOTHING: Final = InstanceHealth()


def bulletin_of(worker: int, registry: Registry) -> HealthUpdate:
    """Write what the others should know; of too many engines those that are broken or drained, and the busiest."""
    found = {member.instance.id: entry for member in registry.members() if (entry := _entry(member)) != _NOTHING}
    if len(found) > MOST:
        worth = sorted(found, key=lambda name: (found[name].verdict is None, -found[name].in_flight))
        found = {name: found[name] for name in worth[:MOST]}
    return HealthUpdate(worker, found)


def _entry(member: Member) -> InstanceHealth:
    verdict = member.life.verdict
    if verdict is not None and len(verdict.why) > _WHY_MOST:
        verdict = HealthVerdict(verdict.at, verdict.is_broken, verdict.why[:_WHY_MOST], verdict.rest_s)
    return InstanceHealth(member.load.own, member.life.state is HealthState.DRAINED, verdict)


@dataclass(frozen=True, slots=True)
class _Heard:
    at: float
    bulletin: HealthUpdate


class WorkerHealth:
    """The other workers, as far as they are heard. Times are seconds of a clock that only rises."""

    def __init__(self, registry: Registry, *, patience_s: float = 3.0) -> None:
        self._registry = registry
        self._patience_s = patience_s  # seconds without a word after which a peer counts no more
        self._heard: dict[int, _Heard] = {}

    def hear(self, bulletin: HealthUpdate, *, now: float) -> bool:
        """Take in a bulletin; tell whether it is the first one of a peer."""
        is_new = bulletin.worker not in self._heard
        self._heard[bulletin.worker] = _Heard(now, bulletin)
        for name, entry in bulletin.engines.items():
            member = self._registry.get(name)
            if member is not None and entry.verdict is not None:
                member.life.told(entry.verdict, now=now)
        self._count()
        return is_new

    def forget(self, worker: int) -> None:
        """Count on a peer no more: it is gone."""
        if self._heard.pop(worker, None) is not None:
            self._count()

    def expire(self, *, now: float) -> Sequence[int]:
        """Forget those that have been silent for too long, and return them."""
        silent = [worker for worker, heard in self._heard.items() if now > heard.at + self._patience_s]
        for worker in silent:
            self.forget(worker)
        return silent

    def is_drained(self, name: InstanceId) -> bool:
        """Tell whether an engine is drained for all peers that are heard."""
        return all(heard.bulletin.engines.get(name, _NOTHING).is_drained for heard in self._heard.values())

    def _count(self) -> None:
        for member in self._registry.members():
            name = member.instance.id
            member.load.elsewhere = sum(
                heard.bulletin.engines.get(name, _NOTHING).in_flight for heard in self._heard.values()
            )
