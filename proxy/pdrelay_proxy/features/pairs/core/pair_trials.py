"""Finds the request that tries a pair of engines which has rested for long enough."""

from collections.abc import Sequence

from pdrelay_proxy.core.fleet.compatibility import fit
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, RoutingHints
from pdrelay_proxy.features.pairs.core.pair_health import PairHealth


class PairTrials:
    """Of one router. A pair on trial goes before what the policies would choose."""

    def __init__(self, registry: Registry, health: PairHealth) -> None:
        self._registry = registry
        self._health = health

    def pair(
        self,
        prefill: Sequence[Instance],
        decode: Sequence[Instance],
        hints: RoutingHints,
        *,
        now: float,
        counts: bool,
    ) -> tuple[Instance, Instance] | None:
        """Return two of these engines that a request may try; pairs that are due wait, if it
        cannot.

        ``counts``: the request follows; else nothing changes.
        """
        health = self._health
        if hints.rank is not None or now < health.next_at:
            return None
        pair = self._due(prefill, decode, hints, now=now)
        if counts and pair is None:
            health.postpone(health.due(now=now), now=now)
        elif counts and pair is not None:
            health.tried((pair[0].id, pair[1].id), now=now)
        return pair

    def reader(
        self, lender: Instance, decode: Sequence[Instance], *, now: float
    ) -> Instance | None:
        """Return the decode engine that tries to read from one that a stream leaves, if one may.

        Requests try pairs of a prefill and a decode engine alone.
        """
        health = self._health
        for reader in decode if health.has_any else ():
            pair = lender.id, reader.id
            if health.has_rested(pair, now=now) and self._fit(lender, reader, None):
                health.tried(pair, now=now)
                return reader
        return None

    def _due(
        self,
        prefill: Sequence[Instance],
        decode: Sequence[Instance],
        hints: RoutingHints,
        *,
        now: float,
    ) -> tuple[Instance, Instance] | None:
        prefills = {engine.id: engine for engine in prefill}
        decodes = {engine.id: engine for engine in decode}
        for names in self._health.due(now=now):
            lender = prefills.get(names[0])
            reader = decodes.get(names[1])
            if (
                lender is not None
                and reader is not None
                and self._may_try(lender, hints)
                and self._may_try(reader, hints)
                and self._fit(lender, reader, hints.model)
            ):
                return lender, reader
        return None

    def _may_try(self, instance: Instance, hints: RoutingHints) -> bool:
        member = self._registry.get(instance.id)
        if member is None or member.life.state is HealthState.HALF_OPEN:
            return False
        return member.facts.serves(hints.model)

    def _fit(self, prefill: Instance, decode: Instance, model: str | None) -> bool:
        return fit(self._registry.facts(prefill), self._registry.facts(decode), model)
