"""Measures how many engines of each role the traffic keeps busy, as ``pdrelay plan`` computes it.

Work is measured in engines that would be busy all the time (the utilisation law, as in
planning/sizing.py). Prefill: arriving prompt tokens a second over those that an engine computes.
Decode: generated tokens a second over those of an engine with the largest batch that keeps the ITL
target; or the number of full KV caches, if that is more.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import Final

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.features.roles.engine_rates import DecodeLine, PrefillRate
from pdrelay_proxy.features.roles.engine_totals import EngineReading, EngineTotals
from pdrelay_proxy.features.roles.traffic_change import TrafficSteps

WINDOW_S: Final = 60.0  # of the means, unless the traffic has changed since
_KNOWN_S: Final = 25.0  # an engine must be sampled for so long before its numbers count
_STALE_S: Final = 25.0  # after which the last sample of an engine is too old
_TOKENS: Final = 10.0  # of streams in a sample, from which on their ITL counts
_MOST_INFLOW: Final = 3.0
_TTFT_SHARE: Final = 0.5  # of the TTFT target: a prompt may queue for so long
_PATIENCE_S: Final = 600.0  # a longer queue must shrink within this time, or the role lacks engines


@dataclass(frozen=True, slots=True)
class RoleTargets:
    """The targets, as those of ``pdrelay plan``."""

    ttft_s: float  # time to first token
    itl_s: float  # mean time between two tokens
    utilisation: float = 0.7  # share of a role's engines that may be busy
    slots: int | None = None  # most streams of a decode engine


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The work of the prefill engines. Tokens are uncached prompt tokens."""

    tokens_per_s: float  # computed
    arriving_per_s: float
    queued_tokens: float  # waiting in the engines' queues, and in this router's
    rate: float  # tokens a second of one busy engine
    is_late: bool  # the queue is too long for the TTFT target, and does not shrink
    busy: float  # engines that the traffic keeps busy; at least all, if it is late


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The work of the decode engines."""

    tokens_per_s: float
    batch: float  # streams, of all engines
    waiting: float  # requests in the engines' queues
    itl_s: float  # mean; 0: no stream
    rate: float  # tokens a second of one engine within the target
    kv_engines: float  # full KV caches
    # engines that the traffic keeps busy; at least all, if their ITL is over the target
    busy: float


@dataclass(slots=True)
class _Track:
    """The samples of one engine in its role, the oldest first."""

    role: Role
    samples: deque[EngineTotals]
    since: float  # the time of the first sample, which may be dropped by now
    # seconds of work that the metrics have shown at its end, and that are not counted yet
    owed_s: float = 0.0

    def is_known(self, now: float) -> bool:
        return (
            self.samples[-1].at - self.since >= _KNOWN_S and now - self.samples[-1].at <= _STALE_S
        )

    @property
    def elapsed_s(self) -> float:
        return self.samples[-1].at - self.samples[0].at

    def worked_s(self, before: EngineTotals, now: EngineTotals) -> float:
        """Return how long a prefill engine was busy between its last two samples.

        vLLM's gauges are those after its last step, so they miss prompts that take one step. It
        also has the time of prompts from their first step to their first token
        (vllm/v1/metrics/stats.py). That is the busy time, except that prompts share steps: those
        with the same last step count once, and the sum is limited to the elapsed time.
        """
        elapsed_s = now.at - before.at
        if now.prefill_s is None or before.prefill_s is None:
            return elapsed_s * (_is_busy(before) + _is_busy(now)) / 2
        took_s = now.prefill_s - before.prefill_s
        prompts = now.prompts - before.prompts
        steps = prompts if now.steps is None or before.steps is None else now.steps - before.steps
        together = max(1.0, prompts / steps) if steps > 0 else 1.0
        most_s = max(self.owed_s, elapsed_s, took_s / prompts if prompts > 0 else 0.0)
        self.owed_s = min(self.owed_s + took_s / together, most_s)
        worked_s = min(self.owed_s, elapsed_s)
        self.owed_s -= worked_s
        return worked_s


class WorkMeter:
    """Measures work by samples of engines. Times are seconds of a monotonic clock."""

    def __init__(self, targets: RoleTargets) -> None:
        self._targets = targets
        self._tracks: dict[InstanceId, _Track] = {}
        self._prefill_rate = PrefillRate()
        self._decode_line = DecodeLine()
        self._traffic = {role: TrafficSteps(WINDOW_S) for role in Role}

    def add_readings(self, readings: Sequence[EngineReading]) -> None:
        """Add samples of all engines, and forget other engines."""
        names = {reading.name for reading in readings}
        for gone in self._tracks.keys() - names:
            del self._tracks[gone]
        steps = [
            (reading, step) for reading in readings if (step := self._step(reading)) is not None
        ]
        self._learn_prefill(
            [
                (self._tracks[reading.name], *step)
                for reading, step in steps
                if reading.role is Role.PREFILL
            ]
        )
        self._learn_decode([step for reading, step in steps if reading.role is Role.DECODE])
        for role in Role:
            self._forget_other_traffic(
                role, [step for reading, step in steps if reading.role is role]
            )

    def unknown(self, readings: Iterable[EngineReading], now: float) -> Sequence[InstanceId]:
        """Return the engines that were not sampled for long enough, or not lately."""
        tracks = self._tracks
        return [
            reading.name
            for reading in readings
            if reading.name not in tracks or not tracks[reading.name].is_known(now)
        ]

    def prefill(self, queued_requests: int) -> PrefillWork | None:
        """Return the work of prefill engines; ``queued_requests``: in this router.

        None: their rate is unknown.
        """
        tracks = self._tracks_of(Role.PREFILL)
        rate = self._prefill_rate.per_s
        if rate is None or not tracks:
            return None
        served = _per_s(tracks, lambda totals: totals.computed_tokens)
        prompt = self._prompt_tokens(tracks)
        queued = prompt * (queued_requests + fsum([track.samples[-1].waiting for track in tracks]))
        grown = prompt * fsum([_growth(track) for track in tracks])
        arriving = max(0.0, served + grown)
        allowed = rate * len(tracks) * self._targets.ttft_s * _TTFT_SHARE
        is_late = queued > allowed and queued + grown * _PATIENCE_S > allowed
        busy = max(arriving / rate, float(len(tracks)) if is_late else 0.0)
        return PrefillWork(served, arriving, queued, rate, is_late, busy)

    def decode(self, prefill: PrefillWork | None) -> DecodeWork | None:
        """Return the work of decode engines; None: their rate is unknown.

        It includes prompts that queue at prefill engines: with more of these they come next.
        """
        tracks = self._tracks_of(Role.DECODE)
        itl_s = self._targets.itl_s
        rate = self._decode_line.tokens_per_s(itl_s, self._targets.slots)
        if rate is None or not tracks:
            return None
        tokens_per_s = _per_s(tracks, lambda totals: totals.itl_count)
        seconds = _per_s(tracks, lambda totals: totals.itl_sum_s)
        waiting = fsum([_mean(track, lambda totals: totals.waiting) for track in tracks])
        seen_s = seconds / tokens_per_s if tokens_per_s else 0.0
        caches = fsum([_kv(track) for track in tracks])
        busy = max(tokens_per_s / rate, caches) * _inflow(prefill)
        busy = max(busy, float(len(tracks)) if seen_s > itl_s else 0.0)
        return DecodeWork(tokens_per_s, seconds, waiting, seen_s, rate, caches, busy)

    def _tracks_of(self, role: Role) -> list[_Track]:
        return [
            track
            for track in self._tracks.values()
            if track.role is role and len(track.samples) > 1
        ]

    def _step(self, reading: EngineReading) -> tuple[EngineTotals, EngineTotals] | None:
        """Add a sample; return the one before, and this one.

        An engine with a new role, or after a restart, begins anew.
        """
        now = reading.totals
        if now is None:
            return None
        track = self._tracks.get(reading.name)
        if track is None or track.role is not reading.role or _is_restarted(track.samples[-1], now):
            self._tracks[reading.name] = _Track(reading.role, deque([now]), now.at)
            return None
        before = track.samples[-1]
        looks = track.samples
        if now.at <= before.at:
            return None
        looks.append(now)
        while len(looks) > 2 and looks[1].at <= now.at - WINDOW_S:
            looks.popleft()
        return before, now

    def _learn_prefill(self, steps: Sequence[tuple[_Track, EngineTotals, EngineTotals]]) -> None:
        # Streams from before a role change keep an engine busy without computing prompts: skip it
        # until they end.
        steps = [
            (track, before, now)
            for track, before, now in steps
            if now.itl_count <= before.itl_count
        ]
        if not steps:
            return
        tokens = fsum([now.computed_tokens - before.computed_tokens for _, before, now in steps])
        busy_s = fsum([track.worked_s(before, now) for track, before, now in steps])
        self._prefill_rate.add(tokens, busy_s, max(now.at - before.at for _, before, now in steps))

    def _learn_decode(self, steps: Sequence[tuple[EngineTotals, EngineTotals]]) -> None:
        shown = list[tuple[float, float]]()
        for before, now in steps:
            tokens = now.itl_count - before.itl_count
            seconds = now.itl_sum_s - before.itl_sum_s
            # stream seconds in a second are the number of streams (Little's law)
            if tokens >= _TOKENS and seconds > 0:
                shown.append((seconds / (now.at - before.at), seconds / tokens))
        if shown:
            self._decode_line.fade(max(now.at - before.at for before, now in steps))
        for batch, itl_s in shown:
            self._decode_line.add(batch, itl_s)

    def _forget_other_traffic(
        self, role: Role, steps: Sequence[tuple[EngineTotals, EngineTotals]]
    ) -> None:
        """Drop the samples of a role's engines from before its traffic changed."""
        if not steps:
            return
        tokens, requests = (
            fsum([total(now) - total(before) for before, now in steps])
            for total in (_TOKENS_OF[role], _prompts)
        )
        since = self._traffic[role].add(
            max(now.at - before.at for before, now in steps), tokens, requests
        )
        if since is None:
            return
        for track in self._tracks_of(role):
            while len(track.samples) > since + 1:
                track.samples.popleft()

    def _prompt_tokens(self, tracks: Sequence[_Track]) -> float:
        """Return how many tokens of a prompt engines compute, on average."""
        tokens = fsum(
            [
                track.samples[-1].computed_tokens - track.samples[0].computed_tokens
                for track in tracks
            ]
        )
        prompts = fsum([track.samples[-1].prompts - track.samples[0].prompts for track in tracks])
        return tokens / prompts if prompts else 0.0


_TOKENS_OF: Final[dict[Role, Callable[[EngineTotals], float]]] = {
    Role.PREFILL: lambda totals: totals.computed_tokens,
    Role.DECODE: lambda totals: totals.itl_count,
}


def _prompts(totals: EngineTotals) -> float:
    return totals.prompts


def _is_restarted(before: EngineTotals, now: EngineTotals) -> bool:
    """Tell whether any total is lower than it was: others may be higher again by now."""
    return any(
        later < earlier for earlier, later in zip(_totals(before), _totals(now), strict=True)
    )


def _totals(sample: EngineTotals) -> tuple[float, ...]:
    return (
        sample.computed_tokens,
        sample.prompts,
        sample.itl_count,
        sample.itl_sum_s,
        sample.prefill_s or 0.0,
        sample.steps or 0.0,
    )


def _is_busy(totals: EngineTotals) -> bool:
    return totals.running + totals.waiting > 0


def _per_s(tracks: Sequence[_Track], total: Callable[[EngineTotals], float]) -> float:
    """Return by how much a total grows in a second, summed over all engines."""
    return fsum(
        [(total(track.samples[-1]) - total(track.samples[0])) / track.elapsed_s for track in tracks]
    )


def _mean(track: _Track, value: Callable[[EngineTotals], float]) -> float:
    """Return the mean of a gauge over the time of the samples."""
    return fsum(
        [
            (value(earlier) + value(later)) / 2 * (later.at - earlier.at)
            for earlier, later in pairwise(track.samples)
        ]
    ) / (track.elapsed_s)


def _growth(track: _Track) -> float:
    """Return by how many requests a queue grows in a second."""
    return (track.samples[-1].waiting - track.samples[0].waiting) / track.elapsed_s


def _kv(track: _Track) -> float:
    """Return the share of its KV cache that an engine needs, for running and waiting requests."""
    used = _mean(track, lambda totals: totals.kv_usage or 0.0)
    running = _mean(track, lambda totals: totals.running)
    waiting = _mean(track, lambda totals: totals.waiting)
    return used * (1.0 + waiting / running) if running >= 1.0 else used


def _inflow(prefill: PrefillWork | None) -> float:
    """Return by which factor the decode load would grow if no prompt queued; 1: it is not late."""
    if prefill is None or prefill.tokens_per_s <= 0 or not prefill.is_late:
        return 1.0
    return min(max(1.0, prefill.arriving_per_s / prefill.tokens_per_s), _MOST_INFLOW)
