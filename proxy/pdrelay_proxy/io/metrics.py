"""The counters in Prometheus' text format. prometheus_client is imported here and in
metric_families.py alone.

Requests and legs add to plain numbers (core/counters.py); they become metrics only at a scrape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, cast

from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.discovery.sources import Freshness
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.core.routing.fleet_groups import unpaired_in_steps
from pdrelay_proxy.io.metric_families import (
    SERIES_AT_ONCE,
    CountedFamilies,
    Family,
    counter_family,
    parts_of,
)
from pdrelay_proxy.io.request_path.telemetry import Telemetry

_END: Final = b"# EOF\n"  # of OpenMetrics


class Metrics:
    """The content of ``GET /metrics``. Every router has its own; nothing is global."""

    def __init__(
        self,
        telemetry: Telemetry,
        engines: Registry,
        admission: Admission,
        sources: Callable[[], Sequence[Freshness]] = tuple,
        features: Sequence[Callable[[], Iterator[Family | None]]] = (),
    ) -> None:
        self._features = features
        self._telemetry = telemetry
        self._engines = engines
        self._admission = admission
        self._sources = sources

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type, which ``Accept`` chooses."""
        pieces, content_type = self.pieces(accept)
        return b"".join(pieces), content_type

    def pieces(self, accept: str) -> tuple[Iterator[bytes], str]:
        """Return the same in pieces, some of which are empty: each is a step of a few milliseconds
        at most.

        Thousands of engines have megabytes of metrics. A later piece may include what was counted
        meanwhile.
        """
        encode, content_type = choose_encoder(accept)
        return _joined(
            self._families(), lambda family: _exposition_of(family, encode)
        ), content_type

    def _families(self) -> Iterator[Family | None]:
        counters = yield from self._telemetry.counters_in_steps()
        yield None
        running = self._telemetry.in_flight
        collector = _Collector(counters, self._engines, self._admission, self._sources(), running)
        yield None
        yield from collector.collect()
        for families in self._features:
            yield from families()
        yield from cast("Iterator[Family]", ProcessCollector(registry=None).collect())


class _Single:
    """A registry of one family, or of a part of it."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        """Return the family."""
        yield self._family


def _exposition_of(family: Family, encode: Callable[[_Single], bytes]) -> bytes:
    """Write a family byte for byte as the library does, which takes five times as long for sample
    lines.

    Our samples have neither time stamps nor exemplars, and names that need no escaping.
    """
    samples = family.samples
    family.samples = []
    heading = encode(_Single(family))
    lines = "".join(map(_line, samples))
    end = _END if heading.endswith(_END) else b""
    return b"".join((heading.removesuffix(_END), lines.encode(), end))


def _line(sample: Sample) -> str:
    if not sample.labels:
        return f"{sample.name} {_number(sample.value)}\n"
    labels = ",".join(
        [f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items())]
    )
    return f"{sample.name}{{{labels}}} {_number(sample.value)}\n"


@lru_cache(4096)  # most values are small counts or bounds
def _number(value: float) -> str:
    return str(floatToGoString(value))


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value


def _joined(
    families: Iterator[Family | None], encode: Callable[[Family], bytes]
) -> Iterator[bytes]:
    """Join the parts of families: each family has one heading, and OpenMetrics one end."""
    previous_name = ""
    end = b""
    for family in families:
        if family is None:
            yield b""
            continue
        text = encode(family)
        if text.endswith(_END):
            text = text[: -len(_END)]
            end = _END
        while family.name == previous_name and text.startswith(b"# "):
            text = text[text.index(b"\n") + 1 :]
        previous_name = family.name
        yield text
    yield end


class _Collector:
    """Builds metrics from the numbers, in the order in which an operator reads them; None: a
    pause.
    """

    def __init__(
        self,
        counters: Counters,
        engines: Registry,
        admission: Admission,
        sources: Sequence[Freshness],
        running: Mapping[InstanceId, int],
    ) -> None:
        self._engines = engines
        self._admission = admission
        self._sources = sources
        self._running = running  # legs, by engine
        known = frozenset([member.instance.id for member in engines.members()])
        self._counted = CountedFamilies(counters, known)

    def collect(self) -> Iterator[Family | None]:
        """Read everything once."""
        yield from self._requests()
        yield from self._legs()
        yield from self._transfers()
        yield from self._instances()
        yield from self._queue()
        yield from _discovery(self._sources)

    def _requests(self) -> Iterator[Family | None]:
        text = "Requests that are over, by path and by how they ended for the client."
        yield from self._counted.counter("pdrelay_requests", text, ("path", "outcome"), "requests")
        text = (
            "Requests, or each of their prompts, by the way of the KV cache; single: no transfer, "
            "for this reason."
        )
        yield from self._counted.counter(
            "pdrelay_requests_routed", text, ("mode", "reason"), "routed"
        )
        text = "Seconds from a request's head to the end of its answer."
        yield from self._counted.histogram(
            "pdrelay_request_duration_seconds", text, ("path", "outcome"), "durations"
        )
        text = "Seconds that a request waited in the queue before it was served; 0 if it did not."
        yield from self._counted.histogram(
            "pdrelay_request_queue_time_seconds", text, ("path",), "queue_times"
        )
        text = "Seconds from a request's head to the first event of its stream."
        yield from self._counted.histogram(
            "pdrelay_time_to_first_token_seconds", text, ("path",), "ttft"
        )
        text = "Seconds between two reads of a stream, each of one token or more."
        yield from self._counted.histogram(
            "pdrelay_inter_token_latency_seconds", text, ("path",), "inter_token"
        )
        text = (
            "Connections that were closed because the client had read nothing of its answer for "
            "too long."
        )
        yield from self._counted.counter(
            "pdrelay_client_write_timeouts", text, (), "write_timeouts"
        )
        text = (
            "Lines of the log that were dropped: its reader is too slow, its disk is full, or it "
            "is closed."
        )
        yield from self._counted.counter("pdrelay_log_lines_dropped", text, (), "log_lines_dropped")
        text = "What was asked of the admin API, and what became of it."
        yield from self._counted.counter(
            "pdrelay_admin_actions", text, ("action", "outcome"), "admin"
        )
        text = (
            "Files of certificates or keys that changed and were read again, by result; failed: "
            "the old ones stay."
        )
        yield from self._counted.counter("pdrelay_file_reloads", text, ("result",), "file_reloads")
        text = "Connections of clients that were closed before their request was served, by reason."
        yield from self._counted.counter(
            "pdrelay_connections_refused", text, ("reason",), "connections_refused"
        )
        text = "Legs that failed and were sent again, by the role of the engine and the reason."
        yield from self._counted.counter("pdrelay_retries", text, ("role", "reason"), "retries")
        text = "Turns of engines to a role that are over, or were refused, by what became of them."
        yield from self._counted.counter("pdrelay_turns", text, ("to", "outcome"), "turns")

    def _legs(self) -> Iterator[Family | None]:
        text = (
            "Legs that are over, by engine and by how they ended; ok: also those that were not "
            "needed any more."
        )
        yield from self._counted.counter(
            "pdrelay_legs", text, ("instance", "role", "outcome"), "legs"
        )
        text = (
            "Connections to https engines that TLS did not let be, by reason; probes' among them."
        )
        yield from self._counted.counter(
            "pdrelay_engine_tls_failures", text, ("instance", "reason"), "engine_tls_failures"
        )
        text = "Seconds from sending a prefill leg to the whole answer."
        yield from self._counted.histogram(
            "pdrelay_prefill_seconds", text, ("instance",), "prefill_times"
        )
        text = (
            "Seconds from sending a decode leg to the first event of its stream, or to the whole "
            "answer if it is none."
        )
        yield from self._counted.histogram(
            "pdrelay_decode_ttft_seconds", text, ("instance",), "decode_ttft"
        )

    def _transfers(self) -> Iterator[Family | None]:
        text = "Seconds between a prefill engine's answer and the sending of the decode leg."
        yield from self._counted.histogram("pdrelay_handoff_gap_seconds", text, (), "handoff")
        text = "Attempts to have a prefill engine free blocks that no engine will read."
        yield from self._counted.counter(
            "pdrelay_kv_releases", text, ("instance", "result"), "releases"
        )
        text = (
            "Answers of prefill engines that named a host out of reach: the engine's own was put "
            "in."
        )
        yield from self._counted.counter(
            "pdrelay_prefill_hosts_replaced", text, ("instance",), "unreachable_hosts"
        )
        text = (
            "Good decode legs with a transfer, by whether the KV cache arrived; none: silent "
            "degradation."
        )
        yield from self._counted.counter(
            "pdrelay_kv_transfers", text, ("instance", "result"), "transfers"
        )
        text = (
            "Decode legs that certainly got no KV cache, by their answers or by the engine's own "
            "counters."
        )
        yield from self._counted.counter(
            "pdrelay_kv_transfers_missing", text, ("instance",), "transfers_missing"
        )
        text = (
            "Prompts that a decode engine computed alone, because most of them had been in its "
            "cache before."
        )
        yield from self._counted.counter(
            "pdrelay_prompt_cache_misses", text, ("instance",), "cache_misses"
        )
        text = (
            "Prefill legs with return_kv, by whether they name a decode engine that has KV of "
            "earlier answers."
        )
        yield from self._counted.counter(
            "pdrelay_return_kv_legs", text, ("result",), "return_kv_legs"
        )
        text = (
            "Prompts that a decode engine has nearly all of, and left to others for the sake of "
            "its streams."
        )
        yield from self._counted.counter(
            "pdrelay_lone_prompts_bound", text, ("outcome",), "lone_prompts_bound"
        )
        text = (
            "Requests of which the two engines made different prompts: their answers are not to be "
            "trusted."
        )
        yield from self._counted.counter(
            "pdrelay_prompt_mismatches", text, ("prefill", "decode"), "mismatches"
        )

    def _instances(self) -> Iterator[Family | None]:
        state = GaugeMetricFamily(
            "pdrelay_instance_state",
            "1 for the state an engine is in, 0 for the others.",
            labels=("instance", "role", "state"),
        )
        legs = GaugeMetricFamily(
            "pdrelay_legs_in_flight", "Legs an engine has now.", labels=("instance", "role")
        )
        members = self._engines.members()
        for part in parts_of(members, SERIES_AT_ONCE // len(HealthState)):
            state.samples = []
            for member in part:
                for role in Role:
                    if member.as_role(role) is not None:
                        for state_name in HealthState:
                            state.add_metric(
                                (member.instance.id, role, state_name),
                                state_name is member.life.state,
                            )
            yield state
        for part in parts_of(members, SERIES_AT_ONCE):
            legs.samples = []
            for member in part:
                names = (member.instance.id, member.role)
                legs.add_metric(names, self._running.get(member.instance.id, 0))
            yield legs
        text = "Engines that may serve, and fit no engine of the other role though there are some."
        alone = GaugeMetricFamily("pdrelay_unpaired_instances", text, labels=("role",))
        for role, count in (yield from unpaired_in_steps(self._engines)).items():
            alone.add_metric((role,), count)
        yield alone

    def _queue(self) -> Iterator[Family | None]:
        admission = self._admission
        text = "Requests in the queue of the admission control."
        yield GaugeMetricFamily("pdrelay_requests_waiting", text, value=admission.waiting)
        text = "Requests that are being served."
        yield GaugeMetricFamily("pdrelay_requests_running", text, value=admission.admitted)
        text = "Requests that the admission control refused, by the limit."
        refused = [((limit.value,), count) for limit, count in admission.refused.items()]
        yield from counter_family("pdrelay_requests_refused", text, ("reason",), refused)


def _discovery(sources: Sequence[Freshness]) -> Iterator[Family]:
    synced = GaugeMetricFamily(
        "pdrelay_discovery_synced",
        "1 if a source of engines has been read since the start.",
        labels=("source",),
    )
    text = "Seconds for which nobody has known whether the last view of a source is still so."
    age = GaugeMetricFamily("pdrelay_discovery_age_seconds", text, labels=("source",))
    engines = GaugeMetricFamily(
        "pdrelay_discovery_engines", "Engines that a source names.", labels=("source",)
    )
    for freshness in sources:
        synced.add_metric((freshness.source,), freshness.is_synced)
        age.add_metric((freshness.source,), freshness.age_s)
        engines.add_metric((freshness.source,), freshness.engines)
    yield from (synced, age, engines)
