"""How many engines of each role the traffic keeps busy, measured at the engines: the numbers of
``pdrelay plan``.

Work is in engines that would be busy all the time (the utilisation law, as planning/sizing.py).
Prefill: prompt tokens that arrive in a second over those that an engine computes in one. Decode:
tokens that are made in a second over those that an engine makes with the largest batch that keeps
the target between tokens; or the KV caches that are full.
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

WINDOW_S: Final = 60.0  # that numbers are the mean of, unless the traffic has changed since
_KNOWN_S: Final = 25.0  # for which an engine was looked at, before its numbers count
_STALE_S: Final = 25.0  # after which the last look at an engine is too old
_TOKENS: Final = 10.0  # of streams in a look, from which on their time between tokens counts
_MOST_INFLOW: Final = 3.0
_TTFT_SHARE: Final = 0.5  # of the TTFT target that a prompt may wait in a queue
_PATIENCE_S: Final = 600.0  # in which a longer queue is worked off, or the role lacks an engine


@dataclass(frozen=True, slots=True)
class RoleTargets:
    """What is wanted, as the aims of ``pdrelay plan``."""

    ttft_s: float  # time to first token
    itl_s: float  # mean time between two tokens
    utilisation: float = 0.7  # share of a role's engines that may be busy
    slots: int | None = None  # most streams of a decode engine


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The prefill engines. Tokens are those of prompts that no cache had."""

    tokens_per_s: float  # computed
    arriving_per_s: float
    queued_tokens: float  # waiting in the engines' queues, and in this router's
    rate: float  # that one engine computes in a second
    is_late: bool  # the queue is too long for the TTFT target, and does not become shorter
    busy: float  # engines that this keeps busy; all of them, if it is late


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The decode engines."""

    tokens_per_s: float
    batch: float  # streams, of all engines
    waiting: float  # requests in the engines' queues
    itl_s: float  # mean; 0: no stream
    rate: float  # tokens that one engine makes in a second within the target
    kv_engines: float  # caches that are full
    # engines that this keeps busy; all of them, if their time between tokens is over the target
    busy: float


@dataclass(slots=True)
class _Track:
    """The looks at one engine in its role, the oldest first."""

    role: Role
    looks: deque[EngineTotals]
    since: float  # the first look, which may be older than those that are kept
    # of work that ended lately, and was done before the look at which it showed
    owed_s: float = 0.0

    def is_known(self, now: float) -> bool:
        return self.looks[-1].at - self.since >= _KNOWN_S and now - self.looks[-1].at <= _STALE_S

    @property
    def elapsed_s(self) -> float:
        return self.looks[-1].at - self.looks[0].at

    def worked_s(self, before: EngineTotals, now: EngineTotals) -> float:
        """Return for how long a prefill engine had something to do between its last two looks.

        vLLM's gauges are those behind its last step: prompts that take one step are in none of
        them. It also shows how long prompts took from their first step to their token
        (vllm/v1/metrics/stats.py), which is as long, but for prompts that share steps: those of one
        last step count once, and there is no more time than has passed.
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
    """Takes in looks at the engines. Times are seconds of a clock that only rises."""

    def __init__(self, targets: RoleTargets) -> None:
        self._targets = targets
        self._tracks: dict[InstanceId, _Track] = {}
        self._prefill_rate = PrefillRate()
        self._decode_line = DecodeLine()
        self._traffic = {role: TrafficSteps(WINDOW_S) for role in Role}

    def look(self, readings: Sequence[EngineReading]) -> None:
        """Take in a look at all engines; what is not among them is forgotten."""
        names = {reading.name for reading in readings}
        for gone in self._tracks.keys() - names:
            del self._tracks[gone]
        steps = [
            (reading, step) for reading in readings if (step := self._step(reading)) is not None
        ]
        self._learn_prefill(
            [(self._tracks[one.name], *step) for one, step in steps if one.role is Role.PREFILL]
        )
        self._learn_decode([step for one, step in steps if one.role is Role.DECODE])
        for role in Role:
            self._forget_other_traffic(role, [step for one, step in steps if one.role is role])

    def unknown(self, readings: Iterable[EngineReading], now: float) -> Sequence[InstanceId]:
        """List the engines that were not looked at for long enough, or lately."""
        tracks = self._tracks
        return [
            one.name
            for one in readings
            if one.name not in tracks or not tracks[one.name].is_known(now)
        ]

    def prefill(self, queued_requests: int) -> PrefillWork | None:
        """Return the work of prefill engines; ``queued_requests``: in this router.

        None: their rate is not known.
        """
        tracks = self._of(Role.PREFILL)
        rate = self._prefill_rate.per_s
        if rate is None or not tracks:
            return None
        served = _per_s(tracks, lambda look: look.computed_tokens)
        prompt = self._prompt_tokens(tracks)
        queued = prompt * (queued_requests + fsum([track.looks[-1].waiting for track in tracks]))
        grown = prompt * fsum([_growth(track) for track in tracks])
        arriving = max(0.0, served + grown)
        allowed = rate * len(tracks) * self._targets.ttft_s * _TTFT_SHARE
        is_late = queued > allowed and queued + grown * _PATIENCE_S > allowed
        busy = max(arriving / rate, float(len(tracks)) if is_late else 0.0)
        return PrefillWork(served, arriving, queued, rate, is_late, busy)

    def decode(self, prefill: PrefillWork | None) -> DecodeWork | None:
        """Return the work of decode engines; None: their rate is not known.

        What waits before prefill engines comes to decode engines as soon as there are more of
        those.
        """
        tracks = self._of(Role.DECODE)
        itl_s = self._targets.itl_s
        rate = self._decode_line.tokens_per_s(itl_s, self._targets.slots)
        if rate is None or not tracks:
            return None
        made = _per_s(tracks, lambda look: look.itl_count)
        seconds = _per_s(tracks, lambda look: look.itl_sum_s)
        waiting = fsum([_mean(track, lambda look: look.waiting) for track in tracks])
        seen_s = seconds / made if made else 0.0
        caches = fsum([_kv(track) for track in tracks])
        busy = max(made / rate, caches) * _inflow(prefill)
        busy = max(busy, float(len(tracks)) if seen_s > itl_s else 0.0)
        return DecodeWork(made, seconds, waiting, seen_s, rate, caches, busy)

    def _of(self, role: Role) -> list[_Track]:
        return [
            track for track in self._tracks.values() if track.role is role and len(track.looks) > 1
        ]

    def _step(self, reading: EngineReading) -> tuple[EngineTotals, EngineTotals] | None:
        """Note a look; return it behind the one before.

        An engine that turned or was restarted begins anew.
        """
        now = reading.totals
        if now is None:
            return None
        track = self._tracks.get(reading.name)
        if track is None or track.role is not reading.role or _is_restarted(track.looks[-1], now):
            self._tracks[reading.name] = _Track(reading.role, deque([now]), now.at)
            return None
        before = track.looks[-1]
        looks = track.looks
        if now.at <= before.at:
            return None
        looks.append(now)
        while len(looks) > 2 and looks[1].at <= now.at - WINDOW_S:
            looks.popleft()
        return before, now

    def _learn_prefill(self, steps: Sequence[tuple[_Track, EngineTotals, EngineTotals]]) -> None:
        # Streams that a late turn has left keep an engine busy and compute no prompt: it shows
        # nothing until they end.
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
            # seconds of streams in a second are streams (Little's law)
            if tokens >= _TOKENS and seconds > 0:
                shown.append((seconds / (now.at - before.at), seconds / tokens))
        if shown:
            self._decode_line.fade(max(now.at - before.at for before, now in steps))
        for batch, itl_s in shown:
            self._decode_line.add(batch, itl_s)

    def _forget_other_traffic(
        self, role: Role, steps: Sequence[tuple[EngineTotals, EngineTotals]]
    ) -> None:
        """Drop the looks at a role's engines that are older than its traffic."""
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
        for track in self._of(role):
            while len(track.looks) > since + 1:
                track.looks.popleft()

    def _prompt_tokens(self, tracks: Sequence[_Track]) -> float:
        """Return how many tokens of a prompt an engine computes, on the mean."""
        tokens = fsum(
            [track.looks[-1].computed_tokens - track.looks[0].computed_tokens for track in tracks]
        )
        prompts = fsum([track.looks[-1].prompts - track.looks[0].prompts for track in tracks])
        return tokens / prompts if prompts else 0.0


_TOKENS_OF: Final[dict[Role, Callable[[EngineTotals], float]]] = {
    Role.PREFILL: lambda look: look.computed_tokens,
    Role.DECODE: lambda look: look.itl_count,
}


def _prompts(look: EngineTotals) -> float:
    return look.prompts


def _is_restarted(before: EngineTotals, now: EngineTotals) -> bool:
    return (
        now.computed_tokens < before.computed_tokens
        or now.prompts < before.prompts
        or now.itl_count < before.itl_count
        or now.itl_sum_s < before.itl_sum_s
    )


def _is_busy(look: EngineTotals) -> bool:
    return look.running + look.waiting > 0


def _per_s(tracks: Sequence[_Track], total: Callable[[EngineTotals], float]) -> float:
    """Return how much a total rises in a second, of all engines together."""
    return fsum(
        [(total(track.looks[-1]) - total(track.looks[0])) / track.elapsed_s for track in tracks]
    )


def _mean(track: _Track, value: Callable[[EngineTotals], float]) -> float:
    """Return the mean of a gauge over the time that the looks span."""
    return fsum(
        [(value(one) + value(two)) / 2 * (two.at - one.at) for one, two in pairwise(track.looks)]
    ) / (track.elapsed_s)


def _growth(track: _Track) -> float:
    """Return how many requests a second a queue grows by."""
    return (track.looks[-1].waiting - track.looks[0].waiting) / track.elapsed_s


def _kv(track: _Track) -> float:
    """Return the share of its KV cache that an engine needs: what waits needs as much as what
    runs.
    """
    used = _mean(track, lambda look: look.kv_usage or 0.0)
    running = _mean(track, lambda look: look.running)
    waiting = _mean(track, lambda look: look.waiting)
    return used * (1.0 + waiting / running) if running >= 1.0 else used


def _inflow(prefill: PrefillWork | None) -> float:
    """Return how many times as much would come to decode engines if no prompt waited; 1 unless the
    queue is late.
    """
    if prefill is None or prefill.tokens_per_s <= 0 or not prefill.is_late:
        return 1.0
    return min(max(1.0, prefill.arriving_per_s / prefill.tokens_per_s), _MOST_INFLOW)
