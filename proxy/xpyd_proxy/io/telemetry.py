"""What the router sees of itself: reads the clock, and tells the counters and the rings."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from xpyd_proxy.core.counters import Counters, Histogram, usual_decode
from xpyd_proxy.core.model import Instance, InstanceId, RequestId
from xpyd_proxy.core.recent_stats import RecentStats, RollingSeries
from xpyd_proxy.core.request_record import Outcome, RequestOutcome, RequestRecord
from xpyd_proxy.core.retries import Failure
from xpyd_proxy.io.later import Later
from xpyd_proxy.io.logs import lines_together

logger = logging.getLogger(__name__)
# The words are said of the engine, and here of the leg.
_SAID: Final = {
    Failure.UNREACHABLE: "did not reach it",
    Failure.BUSY: "was turned away: the engine is busy",
    Failure.ERRED: "was answered with 5xx",
}


class _Engine:
    """What is counted of one engine whose legs end well: added up here, and told the counters when they are read."""

    __slots__ = ("answered", "answers", "instance", "legs", "ok")

    def __init__(self, instance: Instance, recent: RecentStats) -> None:
        self.instance = instance
        self.ok = 0  # legs
        self.legs = recent.legs[instance.id]
        self.answered: Histogram | None = None  # these since it has answered
        self.answers: RollingSeries | None = None


class _Way:
    """The same of the usual requests for one path that end at one decode engine."""

    __slots__ = ("decode", "ok", "path", "ttft")

    def __init__(self, path: str, decode: InstanceId) -> None:
        self.path = path
        self.decode = decode
        self.ok = 0  # requests
        self.ttft: Histogram | None = None  # since there was a stream


class Telemetry:
    """Takes in what happens to requests and their legs, and adds it up."""

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._recent = RecentStats()
        self.transfers_expected: Counter[InstanceId] = Counter()  # by decode engine, ever
        self.legs_under_way: Callable[[], Iterable[InstanceId]] = tuple  # the engine of each
        self._clock = clock  # seconds; only differences count
        self.later = Later(lines_together)
        self._engines: dict[InstanceId, _Engine] = {}
        self._ways: dict[tuple[str, InstanceId], _Way] = {}

    @property
    def counters(self) -> Counters:
        """The counters, with all that has happened."""
        self.later.settle()
        self._add_up()
        return self._counters

    def _add_up(self) -> None:
        """Tell the counters what was added up beside them."""
        for engine in self._engines.values():
            if engine.ok:
                self._counters.good_legs(engine.instance, engine.ok)
                engine.ok = 0
        for way in self._ways.values():
            if way.ok:
                self._counters.usual(way.path, way.decode, way.ok)
                way.ok = 0

    def _engine(self, instance: Instance) -> _Engine:
        found = self._engines.get(instance.id)
        if found is None:
            found = self._engines[instance.id] = _Engine(instance, self._recent)
        return found

    def _way(self, path: str, decode: InstanceId) -> _Way:
        found = self._ways.get((path, decode))
        if found is None:
            found = self._ways[path, decode] = _Way(self._counters.label(path), decode)
        return found

    @property
    def in_flight(self) -> Mapping[InstanceId, int]:
        """How many legs each engine has now; engines without one are missing."""
        return Counter(self.legs_under_way())

    @property
    def recent(self) -> RecentStats:
        """The rings, with all that has happened."""
        self.later.settle()
        return self._recent

    # What the legs of a request tell afterwards (requests/attempt.py)

    def leg_answered(self, instance: Instance, seconds: float, at: float) -> None:
        """An engine has given a good answer, or its beginning, so long after it was asked."""
        engine = self._engine(instance)
        answered, answers = engine.answered, engine.answers
        if answered is None or answers is None:
            answered = engine.answered = self._counters.answers_of(instance)
            answers = engine.answers = self._recent.answers[instance.id]
        answered.observe(seconds)
        answers.add(seconds, now=at)

    def leg_ended(
        self, instance: Instance, seconds: float, failure: Failure | None, request: RequestId, at: float
    ) -> None:
        """A leg is over."""
        engine = self._engine(instance)
        if failure is None:
            engine.ok += 1
            engine.legs.add(seconds, now=at)
            return
        self._counters.leg(instance, failure)
        failed = failure is not Failure.REFUSED  # a client's mistake is none of the engine's
        engine.legs.add(seconds, failed=failed, now=at)
        if failed:
            self._recent.failed(request, instance.id, f"a leg {_SAID.get(failure, failure)}", now=at)

    def handed_over(self, seconds: float, at: float) -> None:
        """So long a request hung between its legs."""
        self._counters.gap.observe(seconds)
        self._recent.gaps.add(seconds, now=at)

    def transfer_expected(self, decode: InstanceId) -> None:
        """A decode engine has begun to answer a leg that followed its prefill leg: it should have got KV cache."""
        self.transfers_expected[decode] += 1

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """A prefill engine was asked to free blocks that nobody will read."""
        self._counters.released(prefill, freed=freed)

    def differed(self, prefill: InstanceId, decode: InstanceId, /) -> None:
        """The two engines of a request made different prompts of it (this is an Auditor)."""
        self._counters.differed(prefill, decode)

    def dry(self, decode: InstanceId, legs: int) -> None:
        """By its own counters a decode engine got no KV cache for so many legs."""
        self._counters.dry(decode, legs)
        reason = f"no KV cache arrived for {legs} legs"
        self._recent.failed(RequestId("-"), decode, reason, now=self._clock())

    def admin_action(self, action: str, outcome: str) -> None:
        """An operator has done something, or somebody has tried to."""
        self._counters.admin_action(action, outcome)

    def replaced_host(self, prefill: Instance, said: str) -> None:
        """A prefill engine's answer named a host where nobody can reach it."""
        if not self._counters.unreachable_hosts[(prefill.id,)]:
            logger.warning(
                "%s names %r as the host of its KV cache, where no decode engine can reach it: %s is put in its place. "
                "Set VLLM_NIXL_SIDE_CHANNEL_HOST there",
                prefill.id,
                said[:100],
                prefill.address.host,
            )
        self._counters.replaced_host(prefill.id)

    def stalled_client(self) -> None:
        """The connection of a client that reads nothing was closed."""
        self._counters.stalled_client()

    def refused_connection(self, reason: str) -> None:
        """A connection was closed before its request was served."""
        self._counters.refused_connection(reason)

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget the instances that are no longer known: in a fleet that breathes there is no end of them."""
        self._add_up()
        self._engines.clear()
        self._ways.clear()
        self._counters.keep(instances)
        self._recent.keep(instances)
        for gone in self.transfers_expected.keys() - instances:
            del self.transfers_expected[gone]

    def request_over(self, record: RequestRecord, outcome: Outcome) -> None:
        """A request is over."""
        now = self._clock()
        decode = usual_decode(record, outcome)
        if decode is not None:
            self._usual(self._way(outcome.path, decode), outcome, now)
            return
        self._counters.request(record, outcome)
        ending = outcome.ending(record)
        failed = ending in (RequestOutcome.SERVER, RequestOutcome.FAULTY)
        self._recent.requests.add(outcome.seconds, failed=failed, now=now)
        if outcome.first_s is not None:
            self._recent.ttft.add(outcome.first_s, now=now)
        if failed:
            said = f"answered with {outcome.status}" + (", and then a fault" if ending is RequestOutcome.FAULTY else "")
            self._recent.failed(record.request_id, self._counters.label(outcome.path), said, now=now)

    def _usual(self, way: _Way, outcome: Outcome, now: float) -> None:
        way.ok += 1
        self._recent.requests.add(outcome.seconds, now=now)
        if outcome.first_s is not None:
            ttft = way.ttft
            if ttft is None:
                ttft = way.ttft = self._counters.ttft.of((way.path,))
            ttft.observe(outcome.first_s)
            self._recent.ttft.add(outcome.first_s, now=now)
