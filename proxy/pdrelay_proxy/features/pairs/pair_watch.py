"""Reads in engines' metrics whose KV they could not load, and how fast it moved."""

from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.fleet.peer_metrics import read_failures, read_moved, read_totals
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.features.pairs.core.peer_loads import PeerLoads
from pdrelay_proxy.features.pairs.core.peer_rates import PeerRates
from pdrelay_proxy.features.pairs.io.pair_notes import OURS, PairNotes

_ASKED_AT_ONCE: Final = 8  # prefill engines that are asked for their ids in one round


class PairWatch:
    """A MetricsListener: tells what is known of pairs."""

    def __init__(self, registry: Registry, notes: PairNotes) -> None:
        self._registry = registry
        self._notes = notes
        self._loads = PeerLoads()
        self._rates = PeerRates()
        self._written = PeerRates()
        # Prefill engines whose KV was read since the last round.
        self._read_from = set[InstanceId]()
        self._round_began = 0.0
        # Of prefill engines, at the end of the last round.
        self._engine_ids: dict[InstanceId, str | None] = {}
        self._unknown = 0  # engines of this round's news that are not in the registry
        self._next = 0  # the prefill engine that is asked next

    def decode_shown(self, decode: Instance, exposition: bytes, now: float, /) -> None:
        """Take in what a decode engine shows."""
        news, was_restarted = self._loads.news_of(decode.id, read_totals(exposition, decode.rank))
        if was_restarted:
            self._notes.restarted(decode)
        self._unknown += len(self._notes.loads(decode, news, now))
        self._notes.take_troubles(decode, read_failures(exposition, decode.rank))
        rates = self._rates.rates_of(decode.id, read_moved(exposition, decode.rank))
        others, unknown = self._notes.moved(decode, rates, writes=False)
        self._read_from.update(others)
        self._unknown += unknown

    def prefills_to_read(self, now: float, /) -> Sequence[Instance]:
        """List those whose KV seems to be pushed, for those count it themselves."""
        used = self._notes.matrix.used_since(self._round_began) - self._read_from
        self._round_began = now
        self._read_from = set[InstanceId]()
        prefills = self._registry.known(Role.PREFILL) if used else ()
        return [
            prefill
            for prefill in prefills
            if prefill.id in used and self._registry.facts(prefill).connector == OURS
        ]

    def prefill_shown(self, prefill: Instance, exposition: bytes, /) -> None:
        """Take in what a prefill engine shows."""
        rates = self._written.rates_of(prefill.id, read_moved(exposition, prefill.rank))
        self._notes.moved(prefill, rates, writes=True)

    def round_over(self) -> Sequence[Instance]:
        """Forget what is known of engines that were replaced or removed."""
        prefills = self._registry.known(Role.PREFILL)
        before = self._engine_ids
        self._engine_ids = {
            prefill.id: self._registry.facts(prefill).engine_id for prefill in prefills
        }
        for name, engine_id in self._engine_ids.items():
            if before.get(name) not in (None, engine_id):
                self._notes.is_another(name)
        self._notes.keep()
        decodes = frozenset([decode.id for decode in self._registry.known(Role.DECODE)])
        self._loads.keep(decodes)
        self._rates.keep(decodes)
        self._written.keep(frozenset(self._engine_ids))
        unknown = self._unknown
        self._unknown = 0
        if not unknown or not prefills:
            return ()
        start = self._next % len(prefills)
        count = min(_ASKED_AT_ONCE, len(prefills))
        self._next = start + count
        return [*prefills[start:], *prefills[:start]][:count]
