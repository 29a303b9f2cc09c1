"""What a router counts of itself, in plain numbers: cheap to add to, and read only when somebody asks.

Every key comes out of a short list: the ids of known instances, the paths of our own table, the words of our enums. So
what clients send cannot make the counters grow.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from xpyd_proxy.core.journey import Ending, Journey, Outcome
from xpyd_proxy.core.model import Instance, InstanceId, Push
from xpyd_proxy.core.protocol.engine_errors import Failure
from xpyd_proxy.core.protocol.kv_transfer_check import Arrival, arrival

T = TypeVar("T")
Key: TypeAlias = tuple[str, ...]
OTHER: Final = "other"
SPLIT: Final = "prefill first"  # the usual way: one leg after the other
_WORDS: Final[Mapping[str, str]] = {failure.value: failure.name.lower() for failure in Failure}
# Seconds. Legs and first tokens: from an idle engine with a short prompt to the longest prompts on a busy one.
LONG: Final[tuple[float, ...]] = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# The gap is the router's own doing, and the engines' lease on the KV cache is 30 s.
SHORT: Final[tuple[float, ...]] = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 25.0)


@dataclass(slots=True)
class Histogram:
    """Values by size. ``counts`` has one place more than ``bounds``: what is above all of them."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list[int])
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value; a bound belongs to the place below it, as Prometheus has it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histograms:
    """Histograms by key."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._make: Callable[[], Histogram] = lambda: Histogram(bounds)
        self.by_key: dict[Key, Histogram] = {}

    def observe(self, key: Key, value: float) -> None:
        """Count a value of a key."""
        self.of(key).observe(value)

    def of(self, key: Key) -> Histogram:
        """Return the histogram of a key; a new one is empty."""
        if key not in self.by_key:
            self.by_key[key] = self._make()
        return self.by_key[key]


@dataclass(slots=True)
class Measures:
    """The counters of one router, since its start. Durations are seconds."""

    paths: frozenset[str]  # those that are told apart
    requests: Counter[Key] = field(default_factory=Counter)  # path, ending
    routes: Counter[Key] = field(default_factory=Counter)
    retries: Counter[Key] = field(default_factory=Counter)  # role of the leg that failed, reason
    legs: Counter[Key] = field(default_factory=Counter)  # instance, role, outcome
    releases: Counter[Key] = field(default_factory=Counter)  # prefill instance, outcome
    arrivals: Counter[Key] = field(default_factory=Counter)  # decode instance, Arrival
    without_kv: Counter[Key] = field(default_factory=Counter)  # decode instance
    mismatches: Counter[Key] = field(default_factory=Counter)  # prefill instance, decode instance
    admin: Counter[Key] = field(default_factory=Counter)  # action, outcome
    unreachable_hosts: Counter[Key] = field(default_factory=Counter)  # prefill engine: replaced in its answers
    stalled: Counter[Key] = field(default_factory=lambda: Counter[Key]({(): 0}))  # connections of clients
    connections_refused: Counter[Key] = field(
        default_factory=Counter
    )  # why a connection was closed, as core/http/framing.py names it
    ttft: Histograms = field(default_factory=lambda: Histograms(LONG))  # path
    answers: Histograms = field(default_factory=lambda: Histograms(LONG))  # instance, role
    gap: Histogram = field(default_factory=lambda: Histogram(SHORT))

    def request(self, journey: Journey, outcome: Outcome) -> None:
        """Count a request that is over."""
        path = self.label(outcome.path)
        if outcome.first_s is not None:
            self.ttft.observe((path,), outcome.first_s)
        decode = usual_decode(journey, outcome)
        if decode is not None:
            self.usual(path, decode, 1)
            return
        self.requests[path, outcome.ending(journey)] += 1
        for retry in journey.retries:
            self.retries[retry.role, _WORDS.get(retry.reason, OTHER)] += 1
        if journey.decode is not None:
            self.routes[(journey.route or SPLIT,)] += 1
            if journey.prefill is not None and outcome.status == 200:
                said = arrival(outcome.said) if journey.push is Push.AT_ONCE else Arrival.UNKNOWN
                self.arrivals[journey.decode.instance, said] += 1
                if said is Arrival.NONE:
                    self.dry(journey.decode.instance, 1)

    def usual(self, path: str, decode: InstanceId, count: int) -> None:
        """Count so many requests of which there is nothing to say but where they went; their path as ``label`` says."""
        self.requests[path, Ending.OK] += count
        self.routes[(SPLIT,)] += count
        self.arrivals[decode, Arrival.UNKNOWN] += count

    def label(self, path: str) -> str:
        """Return a path if it is one that is told apart: clients can think of others without end."""
        return path if path in self.paths else OTHER

    def leg(self, instance: Instance, failure: Failure | None) -> None:
        """Count a leg that is over."""
        if failure is None:
            self.good_legs(instance, 1)
        else:
            self.legs[instance.id, instance.role, _WORDS[failure]] += 1

    def good_legs(self, instance: Instance, count: int) -> None:
        """Count so many legs that ended well."""
        self.legs[instance.id, instance.role, "ok"] += count

    def answers_of(self, instance: Instance) -> Histogram:
        """Return what takes the times an engine needed for its answer (prefill) or the first event of it (decode)."""
        return self.answers.of((instance.id, instance.role))

    def released(self, prefill: Instance, *, freed: bool) -> None:
        """Count an attempt to have a prefill engine free the blocks of a request that will not be decoded."""
        self.releases[prefill.id, "freed" if freed else "failed"] += 1

    def dry(self, decode: InstanceId, legs: int) -> None:
        """Count decode legs that got no KV cache."""
        self.without_kv[(decode,)] += legs

    def differed(self, prefill: InstanceId, decode: InstanceId) -> None:
        """Count a request of which the two engines made different prompts."""
        self.mismatches[prefill, decode] += 1

    def admin_action(self, action: str, outcome: str) -> None:
        """Count what an operator has done, or somebody has tried."""
        self.admin[action, outcome] += 1

    def replaced_host(self, prefill: InstanceId) -> None:
        """Count an answer of a prefill engine that named a host where nobody can reach it."""
        self.unreachable_hosts[(prefill,)] += 1

    def stalled_client(self) -> None:
        """Count a connection that was closed because its client read nothing of its answer for too long."""
        self.stalled[()] += 1

    def refused_connection(self, reason: str) -> None:
        """Count a connection that was closed before its request was served."""
        self.connections_refused[(reason,)] += 1

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget the instances that are no longer known: in a fleet that breathes there is no end of them."""
        _forget(self.legs, instances)
        _forget(self.releases, instances)
        _forget(self.arrivals, instances)
        _forget(self.without_kv, instances)
        _forget(self.mismatches, instances, names=2)
        _forget(self.unreachable_hosts, instances)
        _forget(self.answers.by_key, instances)


def usual_decode(journey: Journey, outcome: Outcome) -> InstanceId | None:
    """Return the decode engine of a request that went the usual way and well; None: there is more to say of it."""
    if outcome.status != 200 or journey.prefill is None or journey.decode is None or not journey.is_usual:
        return None
    return journey.decode.instance


def _forget(by_instance: dict[Key, T], known: frozenset[InstanceId], *, names: int = 1) -> None:
    for key in [key for key in by_instance if not known.issuperset(key[:names])]:
        del by_instance[key]
