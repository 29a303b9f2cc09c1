"""Passes what requests and engines show of pairs to the parts that remember it."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.pair_history import Pair, PairHistory, PairTrouble
from pdrelay_proxy.core.fleet.peer_metrics import PairFailure
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, LegOrder, Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure, is_engines
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord
from pdrelay_proxy.features.pairs.core.pair_health import (
    FailingPair,
    PairHealth,
    PairState,
)
from pdrelay_proxy.features.pairs.core.pair_matrix import PairMatrix
from pdrelay_proxy.features.pairs.core.pair_modes import PairModes
from pdrelay_proxy.features.pairs.core.pair_trials import PairTrials
from pdrelay_proxy.features.pairs.core.peer_loads import PeerNews

logger = logging.getLogger(__name__)
OURS: Final = "pdrelay"  # an engine's metrics show which connector it has
_OK: Final = 200
_HTTP_5XX: Final = Failure.HTTP_5XX
_WRONG_KV: Final = PairFailure.WRONG_KV
_AT_ONCE: Final = LegOrder.CONCURRENT
_DECODE: Final = Role.DECODE
_PREFILL: Final = Role.PREFILL
_PULL: Final = TransferMode.PULL
_PUSH: Final = TransferMode.PUSH


class PairNotes(PairHistory):
    """Of one router: what was used, which pairs fail, and which way of their KV is faster."""

    def __init__(
        self, registry: Registry, matrix: PairMatrix, modes: PairModes | None = None
    ) -> None:
        self.matrix: Final = matrix
        self.modes: Final = PairModes() if modes is None else modes
        self.health: Final = PairHealth(registry.troubles)
        self.find: Final = registry.get  # what is known of an engine
        self._registry = registry
        self._trials: Final = PairTrials(registry, self.health)
        # At this count of changes.
        self._engines_by_id: tuple[int, Mapping[str, Sequence[Instance]]] = -1, {}
        registry.tell_departures(self._left)

    # ---- what requests ask

    @property
    def trial_at(self) -> float:
        """When the next request is to try a pair that rests."""
        return self.health.next_at

    def pair_to_try(
        self,
        prefill: Sequence[Instance],
        decode: Sequence[Instance],
        hints: RoutingHints,
        /,
        *,
        now: float,
        counts: bool,
    ) -> tuple[Instance, Instance] | None:
        """Return two of these engines that this request is to try."""
        return self._trials.pair(prefill, decode, hints, now=now, counts=counts)

    def reader_to_try(
        self, lender: Instance, decode: Sequence[Instance], /, *, now: float
    ) -> Instance | None:
        """Return a decode engine that is to try to read from one that a stream leaves."""
        return self._trials.reader(lender, decode, now=now)

    def mode(self, pair: Pair, /, *, now: float, counts: bool) -> TransferMode:
        """Return how the KV of a pair moves next."""
        if counts:
            return self.modes.next_way(pair, now=now)
        return self.modes.expected_way(pair, now=now)

    # ---- what requests show

    def ended(self, records: Sequence[RequestRecord]) -> None:
        """Requests are over."""
        for record in records:
            prefill = record.prefill
            decode = record.decode
            # The legs of requests that failed have been counted.
            if record.status == _OK and prefill is not None and decode is not None:
                self._served(record, prefill, decode)

    def failed(self, pair: Pair, failure: Failure, now: float, /) -> None:
        """A decode leg has failed whose prefill engine had answered."""
        if is_engines(failure):  # not a client's mistake
            self.matrix.failed(pair, failure, now)

    def blamed(self, record: RequestRecord, decode: InstanceId, /, *, now: float) -> None:
        """Other engines have answered well what this one answered with 5xx.

        Our connector's engines say why themselves. It may be the engine's fault: the next failures
        count if both engines have worked with others since the first.
        """
        member = self._registry.get(decode)
        if member is not None and member.facts.connector == OURS:
            return
        for retry in record.retries:
            if retry.role is _DECODE and retry.reason is _HTTP_5XX and retry.leg.instance == decode:
                for leg, role in record.past:
                    if role is _PREFILL and leg.name == retry.leg.name:
                        self._blame((leg.instance, decode), now)

    def _served(self, record: RequestRecord, prefill: LegRecord, decode: LegRecord) -> None:
        pair = prefill.instance, decode.instance
        matrix = self.matrix
        modes = self.modes
        health = self.health
        if matrix.most or modes.has_any:
            ttft_s = None
            ms = decode.ms
            if record.ttft_s is not None and ms is not None:
                if record.push is _AT_ONCE and prefill.ms is not None:
                    ms -= prefill.ms  # they are handed over with the prefill engine's answer
                ttft_s = ms / 1000 if ms > 0 else 0.0
            now = record.began_at + record.duration_s
            if matrix.most:
                matrix.used(pair, ttft_s, now, record.began_at)
            if modes.has_any and ttft_s is not None and record.push in (None, _AT_ONCE):
                modes.served(pair, _PULL if record.push is None else _PUSH, ttft_s, now=now)
        if health.has_any and health.worked(pair, only=PairFailure.ENGINE_ERROR) is not None:
            self._healed(pair)

    def _blame(self, pair: Pair, now: float) -> None:
        before = self.health.get(pair)
        if before is None or self.matrix.works_elsewhere(pair, before.since):
            self._loads_failed(
                pair, {PairFailure.ENGINE_ERROR: 1}, PairFailure.ENGINE_ERROR, 1, now
            )

    # ---- what engines show

    def loads(self, decode: Instance, news: Sequence[PeerNews], now: float) -> list[str]:
        """Take in what became of the loads of a decode engine.

        Returns:
            The ids of prefill engines that are not known.
        """
        unknown = list[str]()
        by_peer = self._lenders() if news else dict[str, Sequence[Instance]]()
        for shown in news:
            prefills = by_peer.get(shown.peer, ())
            if not prefills:
                unknown.append(shown.peer)
            for prefill in prefills:
                pair = prefill.id, decode.id
                if shown.loaded and not shown.has_wrong_kv:  # most loads are not compared
                    self._worked(pair)
                    self._count(shown.failed)
                elif shown.worst is not None:
                    self._loads_failed(pair, shown.failed, shown.worst, shown.count, now)
                else:
                    self._count(shown.failed)
        return unknown

    def take_troubles(self, decode: Instance, shown: Mapping[str, PairTrouble]) -> None:
        """Take in why a decode engine's loads fail, by the prefill engines' ids.

        What lasts is logged, once.
        """
        if not shown and not self.health.troubles:
            return
        by_peer = self._lenders()
        pairs = {
            (lender.id, decode.id): trouble
            for peer, trouble in shown.items()
            for lender in by_peer.get(peer, ())
        }
        for pair in self.health.shown(decode.id, pairs):
            trouble = pairs[pair]
            if trouble.lasts:
                logger.warning(
                    "%s loads no KV of %s (%s): %s", pair[1], pair[0], trouble.reason, trouble.why
                )

    def moved(
        self, engine: Instance, rates: Mapping[str, float], *, writes: bool
    ) -> tuple[list[InstanceId], int]:
        """Take in at how many bytes a second KV moved between an engine and others.

        Returns:
            Those others, and how many are not known.

        ``rates``: by the ids that the others go by there. ``writes``: it is the prefill engine,
        which writes; else it is the decode engine, which reads.
        """
        if not self.matrix.most or not rates:
            return [], 0
        by_peer = self._lenders()
        moves = [
            (other.id, rate) for peer, rate in rates.items() for other in by_peer.get(peer, ())
        ]
        for other, rate in moves:
            self.matrix.moved((engine.id, other) if writes else (other, engine.id), rate)
        return [other for other, _ in moves], sum([peer not in by_peer for peer in rates])

    def restarted(self, decode: Instance) -> None:
        """A decode engine counts from zero again: it may be able to meet all others."""
        self._start_over(decode.id)

    def is_another(self, prefill: InstanceId) -> None:
        """Another prefill engine is at the address of one."""
        self._start_over(prefill)

    def keep(self) -> None:
        """Forget the pairs of engines that were removed."""
        engines = frozenset([member.instance.id for member in self._registry.members()])
        self.matrix.keep(engines)
        self.health.keep(engines)
        self.modes.keep(engines)
        for decode in self._registry.known(_DECODE):
            self._settle(decode.id)

    # ---- what follows

    def _lenders(self) -> Mapping[str, Sequence[Instance]]:
        """Return the engines by the ids under which those know them that load from them.

        A decode engine is among them when streams leave it (features/moving_streams).
        """
        changes, known = self._engines_by_id
        if changes == self._registry.changes.count:
            return known
        lenders = dict[str, list[Instance]]()
        for member in self._registry.members():
            instance = member.instance
            name = member.facts.engine_id
            if name is not None:
                known_as = name if instance.rank is None else f"{name}_dp{instance.rank}"
                lenders.setdefault(known_as, []).append(instance)
        self._engines_by_id = self._registry.changes.count, lenders
        return lenders

    def _loads_failed(
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
                "%s and %s cannot meet: %d transfers in a row have failed (%s), "
                "so the pair rests for %g s",
                prefill,
                decode,
                rests.in_a_row,
                reason,
                rests.rest_s,
            )
        self._settle(decode)

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
        self._settle(pair[1])

    def _start_over(self, engine: InstanceId) -> None:
        self.modes.forget(engine)
        self._forget(engine)

    def _left(self, engine: InstanceId) -> None:
        """Forget an engine that is removed, or serves another role from now on."""
        self._forget(engine)
        self._settle(engine)

    def _forget(self, engine: InstanceId) -> None:
        for _, decode in self.health.forget(engine):
            self._settle(decode)

    def _settle(self, decode: InstanceId) -> None:
        """Have the facts of a decode engine say which prefill engines it avoids."""
        member = self.find(decode)
        avoided = self.health.avoided(decode)
        if member is not None and (member.facts.resting or frozenset()) != avoided:
            self._registry.learn(decode, EngineCapabilities(resting=avoided))

    def _count(self, failed: Mapping[PairFailure, int]) -> None:
        for reason, count in failed.items():
            self.health.failures[(reason.value,)] += count

    # ---- what pages show

    def reason(self, pair: Pair, /) -> str | None:
        """Return why the transfers of a pair fail."""
        failing = self.health.get(pair)
        return None if failing is None else failing.reason

    def resting(self) -> Sequence[tuple[Pair, str]]:
        """List the pairs that get no requests."""
        failing = self.health.pairs()
        return [
            (pair, health.reason)
            for pair, health in failing
            if health.state is not PairState.FAILING
        ]
