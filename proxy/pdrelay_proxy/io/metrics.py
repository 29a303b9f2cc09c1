"""The counters in Prometheus' text format. prometheus_client is imported here and in
metric_families.py alone.

Requests and legs add to plain numbers (core/counters.py); they become metrics only at a scrape.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final, cast

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.discovery.sources import Freshness
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.routing.fleet_groups import unpaired_in_steps
from pdrelay_proxy.io.counted_metrics import COUNTED
from pdrelay_proxy.io.metric_families import (
    SERIES_AT_ONCE,
    CountedFamilies,
    Family,
    counter_family,
    gauge_family,
    parts_of,
)
from pdrelay_proxy.io.request_path.telemetry import Telemetry

_OPENMETRICS: Final = "application/openmetrics-text"
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

    def pieces(self, accept: str) -> tuple[Iterator[bytes], str]:
        """Return all metrics and their content type: ``Accept`` chooses between the two formats.

        They come in pieces, some of which are empty: each is a step of a few milliseconds at most.
        Thousands of engines have megabytes of metrics. A later piece may include what was counted
        meanwhile.
        """
        # Its versions and escapings are for names of other characters than ours.
        encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
        return _joined(
            self._families(), lambda family: _exposition_of(family, encode)
        ), content_type

    def _families(self) -> Iterator[Family | None]:
        """Yield all families in an operator's order; None: a pause."""
        counters = yield from self._telemetry.counters_in_steps()
        yield None
        known = frozenset([member.instance.id for member in self._engines.members()])
        counted = CountedFamilies(counters, known)
        yield None
        for metric in COUNTED:
            yield from counted.family(metric)
        yield from self._instances()
        yield from self._queue()
        yield from _discovery(self._sources())
        for families in self._features:
            yield from families()
        yield from cast("Iterator[Family]", ProcessCollector(registry=None).collect())

    def _instances(self) -> Iterator[Family | None]:
        members = self._engines.members()
        text = "1 for the state an engine is in, 0 for the others."
        labels = "instance", "role", "state"
        for part in parts_of(members, SERIES_AT_ONCE // len(HealthState)):
            yield gauge_family(
                "pdrelay_instance_state",
                text,
                labels,
                [
                    ((member.instance.id, role, state), state is member.life.state)
                    for member in part
                    for role in Role
                    if member.as_role(role) is not None
                    for state in HealthState
                ],
            )
        running = self._telemetry.in_flight
        text = "Legs an engine has now."
        for part in parts_of(members, SERIES_AT_ONCE):
            legs = [
                ((member.instance.id, member.role), running.get(member.instance.id, 0))
                for member in part
            ]
            yield gauge_family("pdrelay_legs_in_flight", text, ("instance", "role"), legs)
        text = "Engines that may serve, and fit no engine of the other role though there are some."
        unpaired = yield from unpaired_in_steps(self._engines)
        alone = [((role,), count) for role, count in unpaired.items()]
        yield gauge_family("pdrelay_unpaired_instances", text, ("role",), alone)

    def _queue(self) -> Iterator[Family]:
        admission = self._admission
        text = "Requests in the queue of the admission control."
        yield gauge_family("pdrelay_requests_waiting", text, (), [((), admission.waiting)])
        text = "Requests that are being served."
        yield gauge_family("pdrelay_requests_running", text, (), [((), admission.admitted)])
        text = "Requests that the admission control refused, by the limit."
        refused = [((limit.value,), count) for limit, count in admission.refused.items()]
        yield from counter_family("pdrelay_requests_refused", text, ("reason",), refused)


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


def _discovery(sources: Sequence[Freshness]) -> Iterator[Family]:
    labels = ("source",)
    text = "1 if a source of engines has been read since the start."
    synced = [((view.source,), view.is_synced) for view in sources]
    yield gauge_family("pdrelay_discovery_synced", text, labels, synced)
    text = "Seconds for which nobody has known whether the last view of a source is still so."
    age = [((view.source,), view.age_s) for view in sources]
    yield gauge_family("pdrelay_discovery_age_seconds", text, labels, age)
    text = "Engines that a source names."
    engines = [((view.source,), view.engines) for view in sources]
    yield gauge_family("pdrelay_discovery_engines", text, labels, engines)
