"""What the router sees of itself: reads the clock, and tells the counters and the rings."""

import logging
from collections.abc import Callable
from typing import Final

from xpyd_proxy.core.journey import Ending, Journey, Outcome
from xpyd_proxy.core.legs import Legs
from xpyd_proxy.core.measures import Histogram, Measures, usual_decode
from xpyd_proxy.core.model import Instance, InstanceId, RequestId
from xpyd_proxy.core.protocol.engine_errors import Failure
from xpyd_proxy.core.pulse import Pulse, Ring
from xpyd_proxy.io.logs import lines_together
from xpyd_proxy.io.request_path.deferred import Later

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

    def __init__(self, instance: Instance, pulse: Pulse) -> None:
        self.instance = instance
        self.ok = 0  # legs
        self.legs = pulse.legs[instance.id]
        self.answered: Histogram | None = None  # these since it has answered
        self.answers: Ring | None = None


class _Way:
    """The same of the usual requests for one path that end at one decode engine."""

    __slots__ = ("decode", "ok", "path", "ttft")

    def __init__(self, path: str, decode: InstanceId) -> None:
        self.path = path
        self.decode = decode
        self.ok = 0  # requests
        self.ttft: Histogram | None = None  # since there was a stream


class Sight:
    """Is told of every leg (it is a Watcher), of every release, and of every request that is over."""

    def __init__(self, measures: Measures, clock: Callable[[], float]) -> None:
        self._measures = measures
        self._pulse = Pulse()
        self.legs = Legs()
        self._clock = clock  # seconds; only differences count
        self.later = Later(lines_together)
        self._engines: dict[InstanceId, _Engine] = {}
        self._ways: dict[tuple[str, InstanceId], _Way] = {}

    @property
    def measures(self) -> Measures:
        """The counters, with all that has happened."""
        self.later.settle()
        self._add_up()
        return self._measures

    def _add_up(self) -> None:
        """Tell the counters what was added up beside them."""
        for engine in self._engines.values():
            if engine.ok:
                self._measures.good_legs(engine.instance, engine.ok)
                engine.ok = 0
        for way in self._ways.values():
            if way.ok:
                self._measures.usual(way.path, way.decode, way.ok)
                way.ok = 0

    def _engine(self, instance: Instance) -> _Engine:
        found = self._engines.get(instance.id)
        if found is None:
            found = self._engines[instance.id] = _Engine(instance, self._pulse)
        return found

    def _way(self, path: str, decode: InstanceId) -> _Way:
        found = self._ways.get((path, decode))
        if found is None:
            found = self._ways[path, decode] = _Way(self._measures.label(path), decode)
        return found

    @property
    def pulse(self) -> Pulse:
        """The rings, with all that has happened."""
        self.later.settle()
        return self._pulse

    def began(self, instance: Instance, request: RequestId, /) -> None:
        """A leg is about to be sent."""
        now = self._clock()
        gap = self.legs.began(instance, request, now=now)
        if gap is not None:
            self.handed_over(gap, now)

    def answered(self, instance: Instance, request: RequestId, seconds: float, /) -> None:
        """It has a good answer."""
        now = self._clock()
        self.legs.answered(instance, request, now=now)
        self.said(instance, seconds, now)

    def ended(self, instance: Instance, request: RequestId, failure: Failure | None, /) -> None:
        """It is closed."""
        now = self._clock()
        seconds = self.legs.ended(instance, request, now=now)
        self._ended(instance, request, failure, seconds or 0.0, now)

    def _ended(
        self, instance: Instance, request: RequestId, failure: Failure | None, seconds: float, now: float
    ) -> None:
        self._measures.leg(instance, failure)
        failed = failure not in (None, Failure.REFUSED)  # a client's mistake is none of the engine's
        self._pulse.legs[instance.id].add(seconds, failed=failed, now=now)
        if failure is not None and failed:
            self._pulse.mishap(request, instance.id, f"a leg {_SAID.get(failure, failure)}", now=now)

    # What the legs of a request tell afterwards (requests/attempt.py)

    def rode(self, instance: Instance, seconds: float, failure: Failure | None, request: RequestId, at: float) -> None:
        """A leg is over."""
        if failure is not None:
            self._ended(instance, request, failure, seconds, at)
            return
        engine = self._engine(instance)
        engine.ok += 1
        engine.legs.add(seconds, now=at)

    def said(self, instance: Instance, seconds: float, at: float) -> None:
        """An engine has given a good answer, or its beginning, so long after it was asked."""
        engine = self._engine(instance)
        answered, answers = engine.answered, engine.answers
        if answered is None or answers is None:
            answered = engine.answered = self._measures.answers_of(instance)
            answers = engine.answers = self._pulse.answers[instance.id]
        answered.observe(seconds)
        answers.add(seconds, now=at)

    def handed_over(self, seconds: float, at: float) -> None:
        """So long a request hung between its legs."""
        self._measures.gap.observe(seconds)
        self._pulse.gaps.add(seconds, now=at)

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """A prefill engine was asked to free blocks that nobody will read."""
        self._measures.released(prefill, freed=freed)

    def differed(self, prefill: InstanceId, decode: InstanceId, /) -> None:
        """The two engines of a request made different prompts of it (this is an Auditor)."""
        self._measures.differed(prefill, decode)

    def dry(self, decode: InstanceId, legs: int) -> None:
        """By its own counters a decode engine got no KV cache for so many legs."""
        self._measures.dry(decode, legs)
        reason = f"no KV cache arrived for {legs} legs"
        self._pulse.mishap(RequestId("-"), decode, reason, now=self._clock())

    def admin_action(self, action: str, outcome: str) -> None:
        """An operator has done something, or somebody has tried to."""
        self._measures.admin_action(action, outcome)

    def replaced_host(self, prefill: Instance, said: str) -> None:
        """A prefill engine's answer named a host where nobody can reach it."""
        if not self._measures.unreachable_hosts[(prefill.id,)]:
            logger.warning(
                "%s names %r as the host of its KV cache, where no decode engine can reach it: %s is put in its place. "
                "Set VLLM_NIXL_SIDE_CHANNEL_HOST there",
                prefill.id,
                said[:100],
                prefill.address.host,
            )
        self._measures.replaced_host(prefill.id)

    def stalled_client(self) -> None:
        """The connection of a client that reads nothing was closed."""
        self._measures.stalled_client()

    def refused_connection(self, reason: str) -> None:
        """A connection was closed before its request was served."""
        self._measures.refused_connection(reason)

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget the instances that are no longer known: in a fleet that breathes there is no end of them."""
        self._add_up()
        self._engines.clear()
        self._ways.clear()
        self._measures.keep(instances)
        self._pulse.keep(instances)
        self.legs.keep(instances)

    def finished(self, journey: Journey, outcome: Outcome) -> None:
        """A request is over."""
        now = self._clock()
        decode = usual_decode(journey, outcome)
        if decode is not None:
            self._usual(self._way(outcome.path, decode), outcome, now)
            return
        self._measures.request(journey, outcome)
        ending = outcome.ending(journey)
        failed = ending in (Ending.SERVER, Ending.FAULTY)
        self._pulse.requests.add(outcome.seconds, failed=failed, now=now)
        if outcome.first_s is not None:
            self._pulse.ttft.add(outcome.first_s, now=now)
        if failed:
            said = f"answered with {outcome.status}" + (", and then a fault" if ending is Ending.FAULTY else "")
            self._pulse.mishap(journey.request_id, self._measures.label(outcome.path), said, now=now)

    def _usual(self, way: _Way, outcome: Outcome, now: float) -> None:
        way.ok += 1
        self._pulse.requests.add(outcome.seconds, now=now)
        if outcome.first_s is not None:
            ttft = way.ttft
            if ttft is None:
                ttft = way.ttft = self._measures.ttft.of((way.path,))
            ttft.observe(outcome.first_s)
            self._pulse.ttft.add(outcome.first_s, now=now)
