"""What Prometheus gets."""

import random
import re
from collections import Counter

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from pdrelay_proxy.api.clients import RefusalReason
from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.limits import Limit
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Api, InstanceId, LegOrder, RequestId, Role, SingleEngineReason
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.kv_transfer_check import Arrival
from pdrelay_proxy.core.request_record import LegRecord, RequestOutcome, RequestRecord
from pdrelay_proxy.io.metrics import Metrics, _exposition_of, _Single
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.settings import Settings
from support.helm_metrics import router_exposition
from support.steps import work_of_steps


class World:
    """A registry with so many engines, and the metrics of it."""

    def __init__(self, x=1, y=1, queue=None):
        self.now = 0.0
        self.registry = Registry()
        self.prefill = [self.registry.add(Role.PREFILL, Address("http", "h", port)) for port in range(1, x + 1)]
        self.decode = [self.registry.add(Role.DECODE, Address("http", "h", port)) for port in range(1, y + 1)]
        self.telemetry = Telemetry(Counters(frozenset(Api)), lambda: self.now)
        self.queue = queue or Admission(Settings())
        self.metrics = Metrics(self.telemetry, self.registry, self.queue)

    def exposition(self, accept=""):
        pieces, content_type = self.metrics.pieces(accept)
        return b"".join(pieces), content_type

    def scrape(self):
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(self.exposition()[0].decode())
            for sample in family.samples
            if sample.name.startswith("pdrelay_")
        }


def test_a_leg_shows_while_it_is_open_and_counts_when_it_is_over():
    """Numbers, read at scrape time."""
    world = World()
    (p,), (d,), r = world.prefill, world.decode, RequestId("r")
    world.telemetry.count_legs_of(lambda: [p.id])
    world.telemetry.legs_over(p, [0.2], [], 0.2)
    open_legs = world.scrape()
    world.telemetry.count_legs_of(list)
    world.telemetry.legs_over(p, [], [0.2], 0.2)
    world.telemetry.handed_over(0.003)
    world.telemetry.leg_failed(d, 0.0, Failure.BAD_RESPONSE, r, 0.203)
    over = world.scrape()

    assert open_legs["pdrelay_legs_in_flight", "prefill", "prefill-0"] == 1
    assert over["pdrelay_legs_in_flight", "prefill", "prefill-0"] == 0
    assert over["pdrelay_legs_total", "ok", "prefill", "prefill-0"] == 1
    assert over["pdrelay_legs_total", "bad_response", "decode", "decode-0"] == 1
    assert over["pdrelay_prefill_seconds_bucket", "0.1", "prefill-0"] == 0
    assert over["pdrelay_prefill_seconds_bucket", "0.25", "prefill-0"] == 1
    assert over["pdrelay_prefill_seconds_sum", "prefill-0"] == 0.2
    assert over["pdrelay_handoff_gap_seconds_bucket", "0.0025"] == 0
    assert over["pdrelay_handoff_gap_seconds_bucket", "0.005"] == 1
    assert over["pdrelay_handoff_gap_seconds_count",] == 1


def test_states_are_one_of_a_known_list():
    """An alert on `state="ejected"` needs the series before an engine is."""
    world = World()
    life = world.registry.member(InstanceId("decode-0")).life
    life.seen(now=0.0)
    for _ in range(2):
        life.missed("does not answer", now=1.0)
    seen = world.scrape()

    assert seen["pdrelay_instance_state", "decode", "decode-0", "ejected"] == 1
    assert seen["pdrelay_instance_state", "decode", "decode-0", "starting"] == 0
    assert seen["pdrelay_instance_state", "ejected", "prefill", "prefill-0"] == 0


def test_releases_show():
    """Blocks that could not be freed stay pinned for a lease."""
    world = World()
    for freed in (True, False, False):
        world.telemetry.released(world.prefill[0], freed=freed)
    seen = world.scrape()

    assert seen["pdrelay_kv_releases_total", "freed", "prefill-0"] == 1
    assert seen["pdrelay_kv_releases_total", "failed", "prefill-0"] == 2


def test_two_routers_in_one_process_do_not_share_a_number():
    """Nothing is registered globally."""
    one, other = World(), World()
    one.telemetry.released(one.prefill[0], freed=True)

    assert not any(name == "pdrelay_kv_releases_total" for name, *_ in other.scrape())


def test_both_formats_of_prometheus_are_spoken():
    """The scraper chooses."""
    world = World()
    text, kind = world.exposition("text/plain")
    openmetrics, other_kind = world.exposition("application/openmetrics-text; version=1.0.0")

    assert kind.startswith("text/plain; version=")
    assert other_kind.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")
    assert b"process_resident_memory_bytes" in text


@pytest.mark.parametrize("odd", ["version=abc", "version=1.0.0; escaping=dots", "version=99; q=0.5, text/plain"])
def test_a_scraper_gets_one_version_of_a_format_whatever_it_asks_for(odd):
    """The library fails at a version that is no number, and escapes headings, but not our sample lines."""
    text, kind = World().exposition(f"application/openmetrics-text; {odd}")

    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert b"# TYPE pdrelay_requests counter\n" in text


def test_ten_thousand_odd_requests_do_not_add_a_single_label():
    """What clients send must not make the metrics grow."""
    world = World(3, 3)
    dice = random.Random(1)
    sizes = []
    for turn in range(10_000):
        record = RequestRecord(
            RequestId(f"pdrelay-{turn}"),
            single_reason=dice.choice([None, *SingleEngineReason]),
            push=dice.choice([None, *LegOrder]),
        )
        p, d = dice.choice(world.prefill), dice.choice(world.decode)
        record.prefill, record.decode = dice.choice([None, LegRecord(p.id)]), LegRecord(d.id)
        record.set_aside(Role.DECODE, dice.choice([*Failure]))
        record.error = dice.choice([None, f"odd {turn}"])
        record.path = dice.choice([*Api, f"/v1/{turn}", f'/v1/"\n{turn}'])
        record.ttft_s, record.queue_s = dice.choice([None, 0.1]), dice.choice([None, 0.0, 0.1])
        record.over(dice.choice([200, 400, 404, 499, 500, 502, 503]), dice.random())
        for instance in (p, d):
            world.telemetry.legs_over(instance, [dice.random()], [dice.random()], 1.0)
            world.telemetry.leg_failed(instance, dice.random(), dice.choice([*Failure]), record.request_id, 1.0)
        world.telemetry.request_over(record)
        if turn in (4999, 9999):
            sizes.append(len(world.scrape()))

    assert sizes[0] == sizes[1] < 2000
    names = Counter(key[0] for key in world.scrape())
    assert names["pdrelay_requests_total"] == (len(Api) + 1) * 5


def test_names_and_labels_follow_the_conventions_of_prometheus():
    """Counters end in _total, times in _seconds; label values are words that PromQL and people can write."""
    kinds = set()
    for family in text_string_to_metric_families(router_exposition()):
        kinds.add(family.type)
        assert re.fullmatch(r"(pdrelay|process)_[a-z_]+[a-z]", family.name)
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_bytes"))
        assert "_milliseconds" not in family.name
        for sample in family.samples:
            counts = sample.name.endswith("_total")
            assert counts == (family.type == "counter"), sample
            for name, value in sample.labels.items():
                assert re.fullmatch(r"[a-z][a-z_]*", name), sample
                assert re.fullmatch(r"[A-Za-z0-9_./+-]+", value), sample
    assert kinds >= {"counter", "gauge", "histogram"}


def test_every_word_that_can_be_the_value_of_a_label_is_one():
    """Without spaces, commas and colons, also those that no test happens to count."""
    for word in (
        *SingleEngineReason,
        *LegOrder,
        *Failure,
        *RequestOutcome,
        *Arrival,
        *Limit,
        *RefusalReason,
        *HealthState,
    ):
        assert re.fullmatch(r"[a-z0-9_]+", word), word


def fleet_metrics(count, *, busy):
    """The pieces of a scrape of so many engines, some of which have had legs."""
    world = World(count // 2, count // 2)
    for instance in (*world.prefill, *world.decode)[:busy]:
        world.telemetry.legs_over(instance, [0.2], [0.2], 0.2)
    world.telemetry.later.settle()
    return world.metrics.pieces("text/plain")[0]


@pytest.mark.parametrize(("engines", "busy", "most"), [(10_000, 0, 9_000), (400, 400, 15_000)])
def test_no_step_of_a_scrape_grows_with_the_fleet(engines, busy, most):
    """The loop serves requests between two steps: 15,000 calls take some 2 ms, and a call for each engine is too many.

    Engines whose first legs are added up cost most: some 600 calls each, for the rings of the status page.
    """
    work = work_of_steps(fleet_metrics(engines, busy=busy))

    assert max(work) <= most
    assert len(work) > engines / 20


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_a_scrape_of_many_engines_is_made_in_pieces(accept):
    """One of 1,000 engines took 170 ms, in which no request was served; together the pieces are one exposition."""
    world = World(150, 150)
    for instance in (*world.prefill, *world.decode):
        world.telemetry.legs_over(instance, [0.2], [0.2], 0.2)
    world.telemetry.later.settle()
    pieces, _ = world.metrics.pieces(accept)
    texts = list(pieces)
    lines = [piece.count(b"\n") for piece in texts]

    assert max(lines) <= 400
    assert len([one for one in lines if one]) > 60
    text = b"".join(texts).decode()
    headings = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(headings) == len(set(headings))
    parse = openmetrics_families if "openmetrics" in accept else text_string_to_metric_families
    families = {family.name: family for family in parse(text)}
    assert len([s for s in families["pdrelay_instance_state"].samples if s.value]) == 300
    assert {s.labels["instance"] for s in families["pdrelay_prefill_seconds"].samples} == {p.id for p in world.prefill}


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_samples_are_written_as_the_library_writes_them(accept):
    """Byte for byte: names that must be escaped, large and small numbers, infinity, none at all."""
    encode, _ = choose_encoder(accept)
    made = [
        CounterMetricFamily("pdrelay_a", 'with "quotes" and \\', labels=("model", "instance")),
        GaugeMetricFamily("pdrelay_b", "text", labels=("x",)),
        GaugeMetricFamily("pdrelay_c", "without labels", value=1.5),
        HistogramMetricFamily("pdrelay_d", "text", labels=("instance",)),
        GaugeMetricFamily("pdrelay_e", "empty", labels=("x",)),
    ]
    for number, name in enumerate(("plain", 'a "b"', "a\\b", "a\nb", "\u00e4\u4e2d", HealthState.HEALTHY)):
        made[0].add_metric((name, "z"), 10.0**number)
    for value in (0, 1, True, 0.1, 1e-9, 12345678.5, 1e16, float("inf"), float("-inf"), float("nan")):
        made[1].add_metric((str(value),), value)
    made[3].add_metric(("decode-0",), [("0.1", 1), ("+Inf", 1234567)], 17.25)
    wanted = [encode(_Single(family)) for family in made]

    assert [_exposition_of(family, encode) for family in made] == wanted
