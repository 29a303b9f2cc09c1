"""What happens to requests and their legs, as one stream of events: counters, histograms, recent
stats and the log.

The request calls this at the transitions of its life (requests/lifecycle.py); nothing else counts
requests. Nearly all calls are deferred (io/request_path/deferred.py): they cost least when they are
made for many requests at a time. Spans get the same events from the request itself, for they have
to be opened before a leg is sent (features/why/traces.py).
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.model import Instance, InstanceId, LegOrder, RequestId
from pdrelay_proxy.core.one_line import shortened
from pdrelay_proxy.core.protocol.fault_table import Failure, is_engines
from pdrelay_proxy.core.protocol.kv_transfer_check import Arrival, arrival
from pdrelay_proxy.core.recent_stats import RecentStats
from pdrelay_proxy.core.request_record import RequestOutcome, RequestRecord, Retry
from pdrelay_proxy.core.steps import portions
from pdrelay_proxy.io.logs import dropped_lines, lines_together
from pdrelay_proxy.io.request_path.access_log import log_requests
from pdrelay_proxy.io.request_path.deferred import DeferredCalls
from pdrelay_proxy.io.request_path.leg_warnings import LegWarnings
from pdrelay_proxy.io.request_path.request_kinds import RequestKinds

logger = logging.getLogger(__name__)
HearEnded: TypeAlias = Callable[[Sequence[RequestRecord]], None]
_OK: Final = "ok"
_ENGINES_AT_ONCE: Final = 20
_STREAM_ABORTED: Final = RequestOutcome.STREAM_ABORTED
_AT_ONCE: Final = LegOrder.CONCURRENT
_CONNECTION_CLOSED: Final = Failure.CONNECTION_CLOSED
# For the status page: what became of the leg.
_FAILED: Final[Mapping[Failure, str]] = {
    Failure.UNREACHABLE: "did not reach the engine",
    Failure.BAD_RESPONSE: "failed",
    Failure.HTTP_5XX: "was answered with 5xx",
    Failure.TIMEOUT: "timed out",
    Failure.ENGINE_RESTARTED: "met an engine that had restarted",
    Failure.BUSY: "was turned away: the engine is busy",
    Failure.NO_KV_PARAMS: "was answered without KV, or without its model's name",
    Failure.REFUSED: "was refused",
    Failure.UNKNOWN_MODEL: "was refused by an engine that does not know the model",
    Failure.NO_SUCH_PATH: "was refused: the engine has no such path",
    Failure.WRONG_KEY: "was refused: the engine wants another key than the router shows",
    Failure.ANSWER_REFUSED: "had an answer that the router does not pass on",
    Failure.CONNECTION_CLOSED: "met a connection that the engine was closing",
    Failure.ROUTER_LACKS: "was not sent: the router lacks descriptors, ports or memory",
    Failure.NETWORK: "found no way to the engine",
}


def log_calls() -> DeferredCalls:
    """Return what collects calls for later, and writes the lines of a batch together."""
    return DeferredCalls(lines_together)


class Telemetry:
    """Takes in what happens to requests and their legs, and adds it up."""

    def __init__(
        self,
        counters: Counters,
        clock: Callable[[], float],
        *,
        later: DeferredCalls | None = None,
        stepped: Callable[[InstanceId, list[float]], None] | None = None,
        ended: Sequence[HearEnded] = (),
    ) -> None:
        """``later``: what waits to be counted (None: only this object's).

        ``stepped``: gets the seconds between two reads of an engine's streams; None: to count them
        by path will do. ``ended``: hear of requests that are over, once their lines are written.
        """
        self._counters = counters
        self._ended = ended
        self._recent = RecentStats()
        self._warnings = LegWarnings()
        self.transfers_expected: Counter[InstanceId] = Counter()  # by decode engine, ever
        self._legs_under_way: Callable[[], Iterable[InstanceId]] = tuple  # the engine of each
        self._clock = clock  # seconds; only differences count
        self.later = log_calls() if later is None else later
        self.later.end_batches_with(self._finish)
        self._over: list[RequestRecord] = []  # whose lines are to be written
        self._kinds = RequestKinds()
        # seconds between a prefill answer and its decode leg, to be counted
        self._handoffs: list[float] = []
        # By path, and by engine where that is wanted: seconds between two reads of a stream, to be
        # counted.
        self._gaps: dict[tuple[str, InstanceId | None], list[float]] = {}
        self._stepped = stepped

    @property
    def counters(self) -> Counters:
        """The counters, with all that has happened."""
        self.later.settle()
        self._add_up()
        return self._counters

    @property
    def recent(self) -> RecentStats:
        """The last five minutes, with all that has happened."""
        self.later.settle()
        self._add_up()
        return self._recent

    def count_legs_of(self, engines: Callable[[], Iterable[InstanceId]]) -> None:
        """Have the legs under way counted: ``engines`` returns the engine of each.

        The requests say so themselves: they are built later, because each of them tells this object
        what it does.
        """
        self._legs_under_way = engines

    @property
    def in_flight(self) -> Mapping[InstanceId, int]:
        """How many legs each engine has now; engines without one are missing."""
        return Counter(self._legs_under_way())

    def counters_in_steps(self) -> Generator[None, None, Counters]:
        """Return the counters after steps of a millisecond or so: thousands of engines may have had
        streams.

        What happens between two steps may be missing: the next scrape has it.
        """
        self.later.settle()
        for gaps in portions(list(self._gaps.items()), _ENGINES_AT_ONCE):
            self._count_gaps(gaps)
            yield
        self._add_up_requests()
        return self._counters

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Drop what is kept of removed instances: a fleet that changes must not grow it."""
        self._add_up()
        self._kinds.clear()
        for key in [key for key in self._gaps if key[1] is not None and key[1] not in instances]:
            del self._gaps[key]  # what a stream there still adds is nobody's
        self._counters.keep(instances)
        self._recent.keep(instances)
        self._warnings.keep(instances)
        for gone in self.transfers_expected.keys() - instances:
            del self.transfers_expected[gone]

    # ---- legs

    def legs_over(
        self, instance: Instance, answered_s: list[float], over_s: list[float], at: float
    ) -> None:
        """Good legs of an engine were answered, and were over, so long after they were sent."""
        name = instance.id
        if answered_s:
            self._counters.answer_times(instance).observe_all(answered_s)
            self._recent.answers[name].add_all(answered_s, now=at)
        if over_s:
            self._counters.legs[name, instance.role, _OK] += len(over_s)
            self._recent.legs[name].add_all(over_s, now=at)

    def leg_failed(
        self, instance: Instance, seconds: float, failure: Failure, request: RequestId, at: float
    ) -> None:
        """A leg has failed, so long after it was sent."""
        self._counters.legs[instance.id, instance.role, failure] += 1
        self._warnings.leg_failed(instance, failure, at)
        failed = is_engines(failure)  # a client's mistake is none of the engine's
        self._recent.legs[instance.id].add_all([seconds], failed=failed, now=at)
        if failed:
            self._recent.failed(request, instance.id, f"a leg {_FAILED[failure]}", now=at)

    def handed_over(self, seconds: float) -> None:
        """The decode leg of a request was sent so long after its prefill leg was answered."""
        self._handoffs.append(seconds)

    def transfer_expected(self, decode: InstanceId) -> None:
        """A decode engine has begun to answer a leg that followed its prefill leg: it should have
        got KV cache.
        """
        self.transfers_expected[decode] += 1

    def gaps(self, path: str, instance: InstanceId | None = None) -> list[float]:
        """Return what takes the seconds between a stream's reads; see ``count_gaps``."""
        label = self._counters.label(path)
        gaps = self._gaps.get((label, instance))
        if gaps is None:
            gaps = self._gaps[label, instance] = []
            self._counters.inter_token.histogram((label,))
        return gaps

    def count_gaps(self) -> None:
        """Put the times between reads into histograms: many at once cost a fraction."""
        self._count_gaps(self._gaps.items())

    def _count_gaps(
        self, by_stream: Iterable[tuple[tuple[str, InstanceId | None], list[float]]]
    ) -> None:
        for (label, instance), gaps in by_stream:
            if gaps:
                self._counters.inter_token.histogram((label,)).observe_all(gaps)
                if instance is not None and self._stepped is not None:
                    self._stepped(instance, gaps)
                gaps.clear()

    # ---- requests

    def request_over(self, record: RequestRecord) -> None:
        """A request is over."""
        kind = self._kinds.kind_of(record, self._counters.label(record.path))
        kind.durations.append(record.duration_s)
        if record.queue_s == 0:
            kind.unqueued += 1
        elif record.queue_s is not None:
            self._counters.queue_times.observe((kind.path,), record.queue_s)
        if record.ttft_s is not None:
            kind.ttft.append(record.ttft_s)
        if record.push is _AT_ONCE:
            self._push_over(record)
        if record.retries:
            self._count_retries(record.retries)
        if record.cache_missed_at is not None:
            self._counters.cache_misses[(record.cache_missed_at,)] += 1
        if kind.is_failed:
            aborted = ", and the stream was aborted" if kind.outcome is _STREAM_ABORTED else ""
            reason = f"answered with {record.status}{aborted}"
            self._recent.failed(record.request_id, kind.path, reason, now=self._clock())
        self._over.append(record)
        if not self.later.is_settling:
            self._log()

    def _count_retries(self, retries: Sequence[Retry]) -> None:
        for retry in retries:
            # it says nothing about an engine, or the request
            if retry.reason is not _CONNECTION_CLOSED:
                self._counters.retries[retry.role, retry.reason] += 1

    def _finish(self) -> None:
        """End a batch of events."""
        self._add_up()
        self._log()

    def _log(self) -> None:
        if self._over:
            over = self._over
            self._over = []
            log_requests(over)
            for hear in self._ended:
                hear(over)

    def _push_over(self, record: RequestRecord) -> None:
        """Count whether the KV cache of a push arrived; its answer may tell."""
        end = record.pop_end()
        decode = record.decode
        if record.status != 200 or record.prefill is None or decode is None:
            return
        result = arrival(end if decode.own_usage is None else decode.own_usage)
        self._counters.transfers[decode.instance, result] += 1
        if result is Arrival.NONE:
            self._counters.transfers_missing[(decode.instance,)] += 1

    # ---- other events

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """A prefill engine was asked to free blocks that nobody will read."""
        self._counters.releases[prefill.id, "freed" if freed else "failed"] += 1

    def differed(self, prefill: InstanceId, decode: InstanceId, /) -> None:
        """The two engines of a request made different prompts of it."""
        self._counters.mismatches[prefill, decode] += 1

    def kv_return_looked_up(self, *, named: bool) -> None:
        """A prefill leg was sent that names a decode engine with KV of earlier answers, or for
        which none is known.
        """
        self._counters.return_kv_legs[("named" if named else "unknown",)] += 1

    def transfers_missing(self, decode: InstanceId, legs: int) -> None:
        """By its own counters a decode engine got no KV cache for so many legs."""
        self._counters.transfers_missing[(decode,)] += legs
        reason = f"no KV cache arrived for {legs} legs"
        self._recent.failed(RequestId("-"), decode, reason, now=self._clock())

    def admin_action(self, action: str, outcome: str) -> None:
        """An operator did something, or somebody tried to."""
        self._counters.admin[action, outcome] += 1

    def replaced_host(self, prefill: Instance, named: str) -> None:
        """A prefill engine's answer named a host that no decode engine can reach."""
        if not self._counters.unreachable_hosts[(prefill.id,)]:
            logger.warning(
                "%s names %r as the host of its KV cache, where no decode engine can reach it: %s "
                "is put in its place. "
                "Set VLLM_NIXL_SIDE_CHANNEL_HOST there",
                prefill.id,
                shortened(named, 100),
                prefill.address.host,
            )
        self._counters.unreachable_hosts[(prefill.id,)] += 1

    def stalled_client(self) -> None:
        """The connection of a client that reads nothing was closed."""
        self._counters.write_timeouts[()] += 1

    def refused_connection(self, reason: str) -> None:
        """A connection was closed before its request was served."""
        self._counters.connections_refused[(reason,)] += 1

    # ---- adding up

    def _add_up(self) -> None:
        """Put what has happened into the counters and the recent stats: many events at once cost a
        fraction of each.
        """
        self.count_gaps()
        self._add_up_requests()

    def _add_up_requests(self) -> None:
        counters = self._counters
        recent = self._recent
        now = self._clock()
        counters.log_lines_dropped[()] = dropped_lines()
        self._kinds.add_up(counters, recent, now=now)
        if self._handoffs:
            counters.handoff.observe_all(self._handoffs)
            recent.gaps.add_all(self._handoffs, now=now)
            self._handoffs.clear()
