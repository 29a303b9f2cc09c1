"""Reads in decode engines' metrics whose KV they could not load, and tells what is known of pairs."""

from collections.abc import Sequence
from typing import Final

from xpyd_proxy.core.fleet.peer_loads import PeerLoads, read_totals
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.io.request_path.pair_notes import PairNotes

_ASKED_AT_ONCE: Final = 8  # prefill engines that are asked for their ids in one round


class PairWatch:
    """Looks at one decode engine's metrics after the other; a round is over when all have been looked at."""

    def __init__(self, registry: Registry, notes: PairNotes) -> None:
        self._registry = registry
        self._notes = notes
        self._loads = PeerLoads()
        self._engine_ids: dict[InstanceId, str | None] = {}  # of prefill engines, at the end of the last round
        self._unknown = 0  # prefill engines of this round's news that nobody knows
        self._next = 0  # the prefill engine that is asked next

    def look(self, decode: Instance, exposition: bytes, now: float) -> None:
        """Take in what a decode engine shows."""
        news, was_restarted = self._loads.look(decode.id, read_totals(exposition, decode.rank))
        if was_restarted:
            self._notes.restarted(decode)
        self._unknown += len(self._notes.loads(decode, news, now))

    def end_round(self) -> Sequence[Instance]:
        """Forget what is known of engines that were replaced; return prefill engines whose ids should be read again."""
        prefills = self._registry.known(Role.PREFILL)
        before, self._engine_ids = self._engine_ids, {one.id: self._registry.facts(one).engine_id for one in prefills}
        for name, engine_id in self._engine_ids.items():
            if before.get(name) not in (None, engine_id):
                self._notes.is_another(name)
        self._loads.keep(frozenset([decode.id for decode in self._registry.known(Role.DECODE)]))
        unknown, self._unknown = self._unknown, 0
        if not unknown or not prefills:
            return ()
        start, count = self._next % len(prefills), min(_ASKED_AT_ONCE, len(prefills))
        self._next = start + count
        return [*prefills[start:], *prefills[:start]][:count]
