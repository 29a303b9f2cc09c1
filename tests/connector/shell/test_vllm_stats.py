"""Our numbers on their way through vLLM: between processes, into a log line, into Prometheus."""

import pickle
import tracemalloc
import warnings
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

    from pdrelay_connector.shell.nixl_metrics import COUNTERS as NIXL_COUNTERS
    from pdrelay_connector.shell.peer_names import MOST_NAMED, PEERS_SHOWN, PeerNames
    from pdrelay_connector.shell.vllm_stats import PDRelayPromMetrics, PDRelayStats

from pdrelay_connector.core.counters import COUNTERS, FAILURES, GAUGES, StatsReport, TransferSample
from pdrelay_connector.core.timeline import TimelineEvent, TimelineStep

INFO = {"protocol": "3", "fingerprint": "0123456789abcdef", "mode": "pull"}
pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
REPORT = StatsReport(
    {"loads": 2}, {"leases_held": 3.0}, [TransferSample(0.002, 1_000_000, 8, 0.001), TransferSample(0.004, 500_000, 4)]
)


def test_stats_travel_between_processes():
    """As plain data, pickled or packed."""
    stats = pickle.loads(pickle.dumps(PDRelayStats(REPORT)))

    assert stats.data == PDRelayStats(REPORT).data
    assert not stats.is_empty()


def test_stats_of_ranks_and_intervals_add_up():
    """Counters and transfers do; of a gauge the latest is true."""
    later = PDRelayStats(StatsReport({"loads": 1, "leases_lost": 1}, {"leases_held": 1.0}))
    sum_ = PDRelayStats(REPORT).aggregate(later).reduce()

    assert (sum_["loads"], sum_["leases_lost"], sum_["leases_held"], sum_["transfers"]) == (3, 1, 1.0, 2)


def test_the_numbers_of_a_step_are_added_without_a_copy_of_those_before():
    """VLLM adds each step's to ten seconds' of them, in the API server's event loop: 16 reads a step took all of it."""
    interval, step = PDRelayStats(StatsReport(transfers=REPORT.transfers * 5000)), PDRelayStats(REPORT)
    tracemalloc.start()
    interval.aggregate(step)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 20 * 10_000  # a list of so many names what it has in 8 bytes each


def test_one_log_line_shows_what_matters():
    """An operator looks for megabytes and milliseconds."""
    assert PDRelayStats(REPORT).reduce() == {
        "loads": 2, "leases_held": 3.0, "transfers": 2, "MB moved": 1.5, "mean transfer ms": 3.0,
        "descriptors": 12, "mean posting ms": 0.5,
    }  # fmt: skip
    assert PDRelayStats(StatsReport({"loads": 1})).reduce() == {"loads": 1}


def test_stats_can_be_reset():
    """vLLM does, after each log line."""
    stats = PDRelayStats(REPORT)
    stats.reset()

    assert stats.is_empty()
    assert stats.reduce() == {}


@pytest.fixture
def metrics():
    """Two engines of one API server, and nothing left in the process's registry."""
    yield from made()


@pytest.fixture
def metrics_of_both():
    """The same, with those of vLLM's connector."""
    yield from made(shows_nixl=True)


def made(**options):
    before = set(REGISTRY._collector_to_names)
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    yield PDRelayPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}, INFO, **options)
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def nixl_shapes(registered):
    """Names, kinds, labels and buckets of vLLM's metrics among these."""
    return {
        (name, type(made).__name__, tuple(made._labelnames), tuple(getattr(made, "_upper_bounds", ())))
        for name, made in registered.items()
        if name.startswith("vllm:nixl_") and hasattr(made, "_labelnames") and name == made._name
    }


def test_the_metrics_of_vllms_connector_are_the_same_by_name_kind_and_bucket(fresh):
    """Dashboards and alerts go on; that vLLM has another one in a new version fails here.

    Ours has the one of 0.32 in all versions.
    """
    counts_late = hasattr(NixlKVConnectorStats, "record_notification_after_expiry")
    later = set() if counts_late else {"vllm:nixl_num_notifications_after_expiry"}
    theirs = fresh(NixlPromMetrics)
    ours = fresh(PDRelayPromMetrics, INFO, shows_nixl=True)

    assert len(theirs | later) == 8
    assert theirs <= ours
    assert {name for name, *_ in ours - theirs} == later
    assert fresh(PDRelayPromMetrics, INFO) == set()


@pytest.fixture
def fresh():
    """Return what makes metrics, tells those of vLLM's connector, and takes them back."""

    def make(kind, *args, **options):
        before = set(REGISTRY._collector_to_names)
        types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
        kind(
            SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], {0: ["m", "0"]}, *args, **options
        )
        shapes = nixl_shapes(REGISTRY._names_to_collectors)
        for collector in set(REGISTRY._collector_to_names) - before:
            REGISTRY.unregister(collector)
        return shapes

    return make


def test_they_count_what_ours_count(metrics_of_both):
    """Transfers as such, and failures by what vLLM's connector would call them."""
    counters = {"loads_failed_handshake": 1, "loads_failed_timeout": 2, "leases_expired": 3, "loads_failed_lease": 9}
    metrics_of_both.observe(PDRelayStats(StatsReport(counters, transfers=REPORT.transfers)).data, 1)

    assert (
        value("vllm:nixl_bytes_transferred_sum", "1") == value("vllm:pdrelay_bytes_transferred_total", "1") == 1_500_000
    )
    assert value("vllm:nixl_num_descriptors_count", "1") == 2
    assert value("vllm:nixl_xfer_time_seconds_sum", "1") == pytest.approx(0.006)
    assert value("vllm:nixl_post_time_seconds_sum", "1") == pytest.approx(0.001)
    assert value("vllm:nixl_num_failed_transfers_total", "1") == 3
    assert value("vllm:nixl_num_kv_expired_reqs_total", "1") == 3
    assert value("vllm:nixl_num_failed_notifications_total", "1") == 0
    assert {name for each in NIXL_COUNTERS.values() for name in each.counts} <= COUNTERS.keys()


def value(name, engine):
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": engine})


def test_prometheus_shows_each_engine_by_itself(metrics):
    """Counters grow, gauges are replaced, transfers make a histogram."""
    metrics.observe(PDRelayStats(REPORT).data, 1)
    metrics.observe(PDRelayStats(StatsReport({"loads": 1}, {"leases_held": 0.0})).data, 1)

    assert value("vllm:pdrelay_loads_total", "1") == 3
    assert value("vllm:pdrelay_loads_total", "0") == 0
    assert value("vllm:pdrelay_leases_held", "1") == 0
    assert value("vllm:pdrelay_bytes_transferred_total", "1") == 1_500_000
    assert value("vllm:pdrelay_descriptors_total", "1") == 12
    assert value("vllm:pdrelay_posting_seconds_total", "1") == 0.001
    assert value("vllm:pdrelay_transfer_seconds_count", "1") == 2


def test_who_may_be_paired_with_whom_is_known_from_the_start(metrics):
    """A router asks before it sends the first request, when there is nothing to observe yet."""
    for engine in ("0", "1"):
        labels = {"model_name": "m", "engine": engine, **INFO}
        assert REGISTRY.get_sample_value("vllm:pdrelay_connector_info", labels) == 1


def test_engines_that_differ_are_shown_by_their_ids(metrics):
    """A router keeps them apart."""
    metrics.observe(PDRelayStats(StatsReport(incompatible=["p1"])).data, 1)
    labels = {"model_name": "m", "engine": "1", "peer": "p1"}

    assert REGISTRY.get_sample_value("vllm:pdrelay_incompatible_peer", labels) == 1
    later = [f"p{number}" for number in range(2, PEERS_SHOWN + 2)]
    metrics.observe(PDRelayStats(StatsReport(incompatible=later)).data, 1)
    assert REGISTRY.get_sample_value("vllm:pdrelay_incompatible_peer", labels) is None
    assert REGISTRY.get_sample_value("vllm:pdrelay_incompatible_peer", labels | {"peer": later[0]}) == 1


def test_the_rate_of_each_peer_is_shown_and_of_those_that_move_least_lately_none(metrics):
    """An engine that pulls over plain TCP from one prefill engine and over RDMA from another shows which."""
    report = StatsReport(transfers=[TransferSample(0.5, 100, 1, peer="p1")] * 2)
    metrics.observe(PDRelayStats(report).data, 1)
    labels = {"model_name": "m", "engine": "1", "peer": "p1"}

    assert REGISTRY.get_sample_value("vllm:pdrelay_peer_bytes_total", labels) == 200
    assert REGISTRY.get_sample_value("vllm:pdrelay_peer_transfer_seconds_total", labels) == 1.0
    later = [TransferSample(0.5, 100, 1, peer=f"p{number}") for number in range(2, PEERS_SHOWN + 2)]
    metrics.observe(PDRelayStats(StatsReport(transfers=later)).data, 1)
    assert REGISTRY.get_sample_value("vllm:pdrelay_peer_bytes_total", labels) is None
    assert REGISTRY.get_sample_value("vllm:pdrelay_peer_bytes_total", labels | {"peer": "p2"}) == 100


def test_everything_that_can_be_reported_is_registered(metrics):
    """A name that is missing would fail at the first event, in the API server."""
    metrics.observe(PDRelayStats(StatsReport(dict.fromkeys(COUNTERS, 1), dict.fromkeys(GAUGES, 1.0))).data)

    assert all(value(f"vllm:pdrelay_{name}_total", "0") == 1 for name in COUNTERS)
    assert all(value(f"vllm:pdrelay_{name}", "0") == 1 for name in GAUGES)


def test_the_log_line_leaves_the_events_of_timelines_alone():
    """It adds up the reports of ten seconds, with each step; only the route of timelines wants them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
        from pdrelay_connector.shell.connector import PDRelayConnector
    event = TimelineEvent("a", TimelineStep.READ, 1.0)
    report = StatsReport({"loads": 2}, events=[event])
    logged = PDRelayConnector.build_kv_connector_stats(PDRelayStats(report).data)

    assert (logged.reduce(), logged.data["events"]) == ({"loads": 2}, [])


def peer_loads(peer, outcome, engine="0"):
    return REGISTRY.get_sample_value(
        "vllm:pdrelay_peer_loads_total", {"model_name": "m", "engine": engine, "peer": peer, "outcome": outcome}
    )


def test_loads_are_shown_by_prefill_engine_from_its_first_failure_on(metrics):
    """An engine that has met thousands without a failure shows none of them."""
    for loads in ({"loaded": 5}, {"handshake": 1}, {"loaded": 2}):
        metrics.observe(PDRelayStats(StatsReport(peer_loads={"p": loads})).data)
    metrics.observe(PDRelayStats(StatsReport(peer_loads={"q": {"loaded": 9}})).data, 1)

    assert (peer_loads("p", "handshake"), peer_loads("p", "loaded")) == (1, 2)
    assert peer_loads("q", "loaded", "1") is None


def test_an_engine_that_started_again_under_its_id_is_shown_as_refused_no_more(metrics):
    """A router keeps two engines apart for as long as one shows it; ids may be an operator's."""
    labels = {"model_name": "m", "engine": "0", "peer": "p"}
    metrics.observe(PDRelayStats(StatsReport(incompatible=["p"])).data)
    assert REGISTRY.get_sample_value("vllm:pdrelay_incompatible_peer", labels) == 1
    metrics.observe(PDRelayStats(StatsReport(compatible=["p", "q"])).data)

    assert REGISTRY.get_sample_value("vllm:pdrelay_incompatible_peer", labels) is None


def test_an_engine_that_another_api_server_shows_as_refused_is_shown_so_no_more(metrics_of_shared_files):
    """VLLM tells each report to one API server, and of the files that they share the latest value counts."""
    metrics_of_shared_files.observe(PDRelayStats(StatsReport(compatible=["p"])).data)

    labels = {"model_name": "m", "engine": "0", "peer": "p"}
    assert REGISTRY.get_sample_value("vllm:pdrelay_incompatible_peer", labels) == 0


@pytest.fixture
def metrics_of_shared_files(monkeypatch, tmp_path):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    yield from made()


def peer_failure(peer, outcome, engine="0"):
    labels = {"model_name": "m", "engine": engine, "peer": peer, "outcome": outcome, "reason": FAILURES[outcome]}
    return REGISTRY.get_sample_value("vllm:pdrelay_peer_failure", labels)


def test_the_reason_of_the_latest_failure_is_shown_until_a_load_has_not_failed(metrics):
    """A router reads there what no answer tells."""
    report = StatsReport(peer_loads={"p": {"secret": 1}}, failures={"p": "secret"})
    metrics.observe(PDRelayStats(report).data)
    assert peer_failure("p", "secret") == 1
    report = StatsReport(peer_loads={"p": {"timeout": 1}}, failures={"p": "timeout"})
    metrics.observe(PDRelayStats(report).data)
    assert (peer_failure("p", "secret"), peer_failure("p", "timeout")) == (None, 1)
    metrics.observe(PDRelayStats(StatsReport({"leases_granted": 1})).data)
    assert peer_failure("p", "timeout") == 1
    metrics.observe(PDRelayStats(StatsReport(peer_loads={"p": {"loaded": 1}})).data)

    assert peer_failure("p", "timeout") is None


def test_where_no_series_can_be_forgotten_few_engines_are_named(monkeypatch):
    """Who reaches the port of a decode engine can name prefill engines without end, in forged offers."""
    peers = [f"p{number}" for number in range(MOST_NAMED + 9)]
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    shared = PeerNames(Counter("pdrelay_test_shared", "", ["peer"], registry=None))
    assert [peer for peer in peers * 2 if shared.admit(peer)] == peers[:MOST_NAMED] * 2
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")

    assert all(map(PeerNames(Counter("pdrelay_test_own", "", ["peer"], registry=None)).admit, peers))
    assert not all(map(PeerNames(object()).admit, peers))  # Ray's


def test_reasons_are_shown_of_few_engines(metrics):
    """Each restarts under another id."""
    for number in range(PEERS_SHOWN + 1):
        name = f"p{number}"
        report = StatsReport(peer_loads={name: {"secret": 1}}, failures={name: "secret"})
        metrics.observe(PDRelayStats(report).data)

    assert (peer_failure("p0", "secret"), peer_failure("p1", "secret")) == (None, 1)


def test_of_too_many_failing_engines_the_same_ones_keep_their_counts_and_their_reasons(metrics):
    """A reason without counts would stay when the engine works again: its loads are not looked at."""
    for name in (*(f"p{number}" for number in range(PEERS_SHOWN)), "p0", "q"):
        report = StatsReport(peer_loads={name: {"secret": 1}}, failures={name: "secret"})
        metrics.observe(PDRelayStats(report).data)

    assert (peer_failure("p0", "secret"), peer_loads("p0", "secret")) == (1, 2)
    assert (peer_failure("p1", "secret"), peer_loads("p1", "secret")) == (None, None)


def test_prefill_engines_that_failed_long_ago_are_shown_no_more(metrics):
    """Each restarts under another id."""
    for number in range(PEERS_SHOWN + 1):
        metrics.observe(PDRelayStats(StatsReport(peer_loads={f"p{number}": {"timeout": 1}})).data)
        metrics.observe(PDRelayStats(StatsReport(peer_loads={"p0": {"timeout": 1, "loaded": 1}})).data)

    assert peer_loads("p0", "timeout") == PEERS_SHOWN + 2
    assert (peer_loads("p1", "timeout"), peer_loads("p2", "timeout")) == (None, 1)
