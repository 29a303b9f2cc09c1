"""What happens between the two engines of a request, as the router and decode engines see it: told
to the cores.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from pdrelay_proxy.core.fleet.pair_health import (
    LASTING,
    FailingPair,
    Pair,
    PairFailure,
    PairTrouble,
)
from pdrelay_proxy.core.fleet.pair_matrix import PairMatrix
from pdrelay_proxy.core.fleet.pair_modes import PairModes
from pdrelay_proxy.core.fleet.peer_loads import PeerNews
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, LegOrder, Role
from pdrelay_proxy.core.protocol.fault_table import Failure, is_engines
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord

logger = logging.getLogger(__name__)
OURS: Final = "pdrelay"  # an engine's metrics show which connector it has
_OK: Final = 200
_HTTP_5XX: Final = Failure.HTTP_5XX  # looking a member up takes as long as a call
_WRONG_KV: Final = PairFailure.WRONG_KV
_AT_ONCE: Final = LegOrder.CONCURRENT
_DECODE: Final = Role.DECODE
_PREFILL: Final = Role.PREFILL
_PULL: Final = TransferMode.PULL
_PUSH: Final = TransferMode.PUSH


class PairNotes:
    """Tells the matrix what was used, and the registry which pairs fail."""

    def __init__(
        self, registry: Registry, matrix: PairMatrix, modes: PairModes | None = None
    ) -> None:
        self.matrix = matrix
        self.modes: Final = PairModes() if modes is None else modes
        self.health: Final = registry.pairs
        self.find: Final = registry.get  # what is known of an engine
        self._registry = registry
        # at this count of changes
        self._engines_by_id: tuple[int, Mapping[str, Sequence[Instance]]] = -1, {}

    # ---- what requests show

    def request_over(self, record: RequestRecord, prefill: LegRecord, decode: LegRecord) -> None:
        """A request is over that was sent to two engines."""
        if record.status != _OK:
            return  # its legs have been counted
        pair = (prefill.instance, decode.instance)
        matrix = self.matrix
        ttft_s = None
        if matrix.most or self.modes.has_any:
            if record.ttft_s is not None and (ms := decode.ms) is not None:
                if record.push is _AT_ONCE and prefill.ms is not None:
                    ms -= prefill.ms  # they are handed over with the prefill engine's answer
                ttft_s = ms / 1000 if ms > 0 else 0.0
            now = record.began_at + record.duration_s
            if matrix.most:
                matrix.used(pair, ttft_s, now, record.began_at)
            if self.modes.has_any and ttft_s is not None and record.push in (None, _AT_ONCE):
                self.modes.served(pair, _PULL if record.push is None else _PUSH, ttft_s, now=now)
        if (
            self.health.has_any
            and self.health.worked(pair, only=PairFailure.ENGINE_ERROR) is not None
        ):
            self._healed(pair)

    def leg_failed(
        self, prefill: InstanceId, decode: InstanceId, failure: Failure, now: float
    ) -> None:
        """A decode leg has failed whose prefill engine had answered."""
        if is_engines(failure):  # not a client's mistake
            self.matrix.failed((prefill, decode), failure, now)

    def blamed(self, record: RequestRecord, decode: InstanceId, now: float) -> None:
        """Another engine has answered well what this one answered with 5xx; our connector's engines
        say why themselves.

        It may be the engine's fault: the next failures count if both engines have worked with
        others since the first.
        """
        if self._registry.facts_of(decode).connector == OURS:
            return
        for retry in record.retries:
            if retry.role is _DECODE and retry.reason is _HTTP_5XX and retry.leg.instance == decode:
                for leg, role in record.past:
                    if role is _PREFILL and leg.name == retry.leg.name:
                        self._blame((leg.instance, decode), now)

    def _blame(self, pair: Pair, now: float) -> None:
        before = self.health.get(pair)
        if before is None or self.matrix.works_elsewhere(pair, before.since):
            self._failed(pair, {PairFailure.ENGINE_ERROR: 1}, PairFailure.ENGINE_ERROR, 1, now)

    # ---- what decode engines show

    def loads(self, decode: Instance, news: Sequence[PeerNews], now: float) -> list[str]:
        """Take in what became of the loads of a decode engine; return ids of prefill engines that
        are not known.
        """
        unknown = list[str]()
        by_peer = self._lenders() if news else dict[str, Sequence[Instance]]()
        for each in news:
            prefills = by_peer.get(each.peer, ())
            if not prefills:
                unknown.append(each.peer)
            for prefill in prefills:
                pair = prefill.id, decode.id
                if each.loaded and not each.has_wrong_kv:  # most loads are not compared
                    self._worked(pair)
                    self._count(each.failed)
                elif each.worst is not None:
                    self._failed(pair, each.failed, each.worst, each.count, now)
                else:
                    self._count(each.failed)
        return unknown

    def troubles(self, decode: Instance, shown: Mapping[str, PairTrouble]) -> None:
        """Take in why a decode engine's loads fail, by the prefill engines' ids; log what lasts,
        once.
        """
        if not shown and not self.health.troubles:
            return
        by_peer = self._lenders()
        pairs = {
            (one.id, decode.id): each
            for peer, each in shown.items()
            for one in by_peer.get(peer, ())
        }
        for pair in self.health.shown(decode.id, pairs):
            if (trouble := pairs[pair]).reason in LASTING:
                logger.warning(
                    "%s loads no KV of %s (%s): %s", pair[1], pair[0], trouble.reason, trouble.why
                )

    def moved(
        self, engine: Instance, rates: Mapping[str, float], *, writes: bool
    ) -> tuple[list[InstanceId], int]:
        """Take in at how many bytes a second KV moved between an engine and others, by the ids that
        they go by there.

        Returns:
            Those others, and how many are not known.

        ``writes``: it is the prefill engine, which writes; else it is the decode engine, which
            reads.
        """
        if not self.matrix.most or not rates:
            return [], 0
        by_peer = self._lenders()
        found = [
            (other.id, rate) for peer, rate in rates.items() for other in by_peer.get(peer, ())
        ]
        for other, rate in found:
            self.matrix.moved((engine.id, other) if writes else (other, engine.id), rate)
        return [other for other, _ in found], sum([peer not in by_peer for peer in rates])

    def restarted(self, decode: Instance) -> None:
        """A decode engine counts from zero again: it may be able to meet all others."""
        self._forget(decode.id)

    def is_another(self, prefill: InstanceId) -> None:
        """Another prefill engine is at the address of one."""
        self._forget(prefill)

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget the pairs of engines that were removed."""
        self.matrix.keep(instances)
        self.health.keep(instances)
        self.modes.keep(instances)
        for decode in self._registry.known(_DECODE):
            self._registry.settle_rests(decode.id)

    # ---- what follows

    def _lenders(self) -> Mapping[str, Sequence[Instance]]:
        """Return the engines by the ids under which those know them that load from them.

        A decode engine is among them when streams leave it (requests/stream_moves.py).
        """
        changes, known = self._engines_by_id
        if changes == self._registry.changes.count:
            return known
        found = dict[str, list[Instance]]()
        for member in self._registry.members():
            one = member.instance
            name = member.facts.engine_id
            if name is not None:
                known_as = name if one.rank is None else f"{name}_dp{one.rank}"
                found.setdefault(known_as, []).append(one)
        self._engines_by_id = self._registry.changes.count, found
        return found

    def _failed(
        self,
        pair: Pair,
        failed: Mapping[PairFailure, int],
        reason: PairFailure,
        count: int,
        now: float,
    ) -> None:
        prefill, decode = pair
        self._count(failed)
        rests = self.health.failed(pair, reason, count, now=now)
        if rests is not None and rests.reason is _WRONG_KV:
            self._warn_of_wrong_kv(pair, rests)
        elif rests is not None:
            logger.warning(
                "%s and %s cannot meet: %d transfers in a row have failed (%s), so the pair rests "
                "for %g s",
                prefill,
                decode,
                rests.in_a_row,
                reason,
                rests.rest_s,
            )
        self._registry.settle_rests(decode)

    def _warn_of_wrong_kv(self, pair: Pair, rests: FailingPair) -> None:
        logger.warning(
            "KV of %s arrives wrong at %s (%s), so the pair rests for %g s",
            *pair,
            rests.reason,
            rests.rest_s,
        )

    def _worked(self, pair: Pair) -> None:
        if self.health.worked(pair) is not None:
            self._healed(pair)

    def _healed(self, pair: Pair) -> None:
        logger.info("%s and %s have met again: the pair gets requests", *pair)
        self._registry.settle_rests(pair[1])

    def _forget(self, engine: InstanceId) -> None:
        self.modes.forget(engine)
        for _, decode in self.health.forget(engine):
            self._registry.settle_rests(decode)

    def _count(self, failed: Mapping[PairFailure, int]) -> None:
        for reason, count in failed.items():
            self.health.failures[(reason.value,)] += count
