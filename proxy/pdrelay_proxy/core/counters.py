"""The router's own counters, in plain numbers: cheap to add to, and read only on request.

Every key comes from a short list: ids of known instances, paths of our own table, members of our
enums. So clients cannot make the counters grow. io/request_path/telemetry.py adds to them,
io/metrics.py writes them.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# sum() of floats fails where this is compiled: mypyc takes its result for an int
from math import fsum
from typing import Final, TypeAlias, TypeVar

from pdrelay_proxy.core.model import Instance, InstanceId, Role

T = TypeVar("T")
Key: TypeAlias = tuple[str, ...]
OTHER: Final = "other"
_SEVERAL: Final = 8  # values; fewer are sorted into the bounds one by one
# Seconds: vLLM's own bounds for the same quantities (vllm/v1/metrics/buckets.py:
# REQUEST_LATENCY_BUCKETS, TIME_TO_FIRST_TOKEN_BUCKETS, INTER_TOKEN_LATENCY_BUCKETS), so that
# quantiles of routers and engines compare.
REQUEST_LATENCY: Final[tuple[float, ...]] = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN: Final[tuple[float, ...]] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN: Final[tuple[float, ...]] = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
# The gap between the legs is the router's own doing, and the engines' lease on the KV cache is 30
# s.
HANDOFF: Final[tuple[float, ...]] = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.5,
    1.0,
    5.0,
    10.0,
    25.0,
)


class Histogram:
    """Values by size. ``counts`` has one more entry than ``bounds``: what is above all of them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; one equal to a bound counts below it, as in Prometheus."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count some values. Of many, the bounds are searched in the sorted values, most of which
        are below the first few bounds.
        """
        if len(values) < _SEVERAL:
            for value in values:
                self.observe(value)
            return
        counts = self.counts
        ordered = sorted(values)
        below = 0
        for place, bound in enumerate(self.bounds):
            if below == len(ordered):
                break
            end = bisect_right(ordered, bound, below)
            counts[place] += end - below
            below = end
        counts[-1] += len(ordered) - below
        self.total += fsum(values)


class Histograms:
    """Histograms by key."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._make: Callable[[], Histogram] = lambda: Histogram(bounds)
        self.by_key: dict[Key, Histogram] = {}

    def observe(self, key: Key, value: float) -> None:
        """Count a value of a key."""
        self.histogram(key).observe(value)

    def histogram(self, key: Key) -> Histogram:
        """Return the histogram of a key; a new one is empty."""
        if key not in self.by_key:
            self.by_key[key] = self._make()
        return self.by_key[key]


@dataclass(slots=True)
class Counters:
    """The counters of one router, since its start. Durations are seconds."""

    paths: frozenset[str]  # with counters of their own; all others are counted as ``other``
    requests: Counter[Key] = field(default_factory=Counter)  # path, RequestOutcome
    routed: Counter[Key] = field(default_factory=Counter)  # mode, reason
    retries: Counter[Key] = field(default_factory=Counter)  # role of the leg that failed, Failure
    legs: Counter[Key] = field(default_factory=Counter)  # instance, role, Failure or ok
    releases: Counter[Key] = field(default_factory=Counter)  # prefill instance, result
    transfers: Counter[Key] = field(default_factory=Counter)  # decode instance, Arrival
    transfers_missing: Counter[Key] = field(default_factory=Counter)  # decode instance
    cache_misses: Counter[Key] = field(default_factory=Counter)  # decode instance
    # BoundOutcome of core/routing/alone_bound.py
    lone_prompts_bound: Counter[Key] = field(default_factory=Counter)
    mismatches: Counter[Key] = field(default_factory=Counter)  # prefill instance, decode instance
    return_kv_legs: Counter[Key] = field(default_factory=Counter)  # named, unknown
    # EngineRole, TurnState of core/fleet/turns.py or refused
    turns: Counter[Key] = field(default_factory=Counter)
    admin: Counter[Key] = field(default_factory=Counter)  # action, outcome
    # of changed files, by result
    file_reloads: Counter[Key] = field(
        default_factory=lambda: Counter[Key]({("ok",): 0, ("failed",): 0})
    )
    # instance, TlsFailure of io/wire/engine_tls.py
    engine_tls_failures: Counter[Key] = field(default_factory=Counter)
    # prefill engine: replaced in its answers
    unreachable_hosts: Counter[Key] = field(default_factory=Counter)
    log_lines_dropped: Counter[Key] = field(default_factory=lambda: Counter[Key]({(): 0}))
    # connections of clients
    write_timeouts: Counter[Key] = field(default_factory=lambda: Counter[Key]({(): 0}))
    # RefusalReason of api/clients.py
    connections_refused: Counter[Key] = field(default_factory=Counter)
    # path, RequestOutcome
    durations: Histograms = field(default_factory=lambda: Histograms(REQUEST_LATENCY))
    queue_times: Histograms = field(default_factory=lambda: Histograms(REQUEST_LATENCY))  # path
    ttft: Histograms = field(default_factory=lambda: Histograms(FIRST_TOKEN))  # path
    inter_token: Histograms = field(default_factory=lambda: Histograms(INTER_TOKEN))  # path
    # prefill instance
    prefill_times: Histograms = field(default_factory=lambda: Histograms(FIRST_TOKEN))
    # decode instance
    decode_ttft: Histograms = field(default_factory=lambda: Histograms(FIRST_TOKEN))
    handoff: Histogram = field(default_factory=lambda: Histogram(HANDOFF))

    def label(self, path: str) -> str:
        """Return a path with counters of its own, or ``other``: clients send any path."""
        return path if path in self.paths else OTHER

    def answer_times(self, instance: Instance) -> Histogram:
        """Return the times to an engine's whole answer (prefill) or first event (decode)."""
        by_role = self.prefill_times if instance.role is Role.PREFILL else self.decode_ttft
        return by_role.histogram((instance.id,))

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Drop the series of removed instances: a changing fleet must not grow the counters."""
        of_transfers = self.releases, self.transfers, self.transfers_missing, self.unreachable_hosts
        for counter in (self.legs, *of_transfers, self.cache_misses, self.engine_tls_failures):
            forget(counter, instances)
        forget(self.mismatches, instances, names=2)
        forget(self.prefill_times.by_key, instances)
        forget(self.decode_ttft.by_key, instances)


def forget(by_instance: dict[Key, T], known: frozenset[InstanceId], *, names: int = 1) -> None:
    """Drop the keys whose first names are of unknown instances."""
    for key in [key for key in by_instance if not known.issuperset(key[:names])]:
        del by_instance[key]
