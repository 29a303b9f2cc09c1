"""Which metrics there really are, and which ones a PromQL expression names."""

import importlib.util
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pdrelay_connector.core.counters import COUNTERS, GAUGES
from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.discovery.sources import Freshness
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features import FEATURES
from pdrelay_proxy.io.metrics import Metrics
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.settings import Settings
from support.helm_chart import ROOT

# What Prometheus and its operator add: targets, and (podTargetLabels) the pod's own labels; a site: clusters.
TARGET = {"cluster", "namespace", "pod", "job", "instance", "container", "endpoint", "service", "le"}
ENGINE_TARGET = TARGET | {"pdrelay_release", "pdrelay_role", "pdrelay_revision"}
WORDS = {
    "absent", "and", "by", "count", "histogram_quantile", "increase", "max", "max_over_time", "min", "min_over_time",
    "offset", "on", "or", "rate", "sum", "unless", "m", "s", "h", "e", "bool",
}  # fmt: skip
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def router_metrics():
    """Scrape a router's metrics, each with something in it: {name: its labels}."""
    return _labels(router_exposition())


def router_exposition():
    """Return the text of a scrape of a router, with something in each metric."""
    registry = Registry(Settings())
    counters = Counters(frozenset({"/v1/completions"}))
    prefill, decode = (registry.add(role, Address("http", "h", port)) for port, role in enumerate(Role, start=1))
    counters.requests["/v1/completions", "ok"] += 1
    counters.routed["push", "none"] += 1
    counters.retries["prefill", "bad_response"] += 1
    counters.legs[prefill.id, "prefill", "ok"] += 1
    counters.releases[prefill.id, "freed"] += 1
    counters.transfers[decode.id, "arrived"] += 1
    counters.transfers_missing[(decode.id,)] += 1
    counters.cache_misses[(decode.id,)] += 1
    counters.mismatches[prefill.id, decode.id] += 1
    counters.return_kv_legs[("named",)] += 1
    counters.durations.observe(("/v1/completions", "ok"), 0.1)
    for times in (counters.ttft, counters.inter_token, counters.queue_times):
        times.observe(("/v1/completions",), 0.1)
    for instance in (prefill, decode):
        counters.answer_times(instance).observe(0.1)
    counters.handoff.observe(0.1)
    registry.learn(decode.id, EngineCapabilities(slice="rack1"))
    counters.admin["add", "ok"] += 1
    counters.unreachable_hosts[(prefill.id,)] += 1
    counters.connections_refused[("malformed",)] += 1
    queue = Admission(Settings(max_concurrency=0, max_queue=0))
    telemetry = Telemetry(counters, lambda: 0.0)
    queue.arrive("-", 0, 1, now=0.0)
    families = {
        "pairs": lambda: _pair_families(registry),
        "roles": _role_families,
        "slices": lambda: _slice_families(registry),
    }
    metrics = Metrics(
        telemetry,
        registry,
        queue,
        lambda: [Freshness(EngineSource.PODS, True, 0.0, 1, 2)],
        [make for name, make in families.items() if name in FEATURES],
    )
    pieces, _ = metrics.pieces("")
    return b"".join(pieces).decode()


def _pair_families(registry):
    """Yield the metrics of pairs."""
    from pdrelay_proxy.features.pairs.core.pair_matrix import PairMatrix
    from pdrelay_proxy.features.pairs.feature import pair_families
    from pdrelay_proxy.features.pairs.io.pair_notes import PairNotes

    notes = PairNotes(registry, PairMatrix(1))
    notes.health.failures[("handshake",)] += 1
    return pair_families(notes)


def _role_families():
    """Yield the metrics of the controller of roles."""
    from pdrelay_proxy.features.roles import role_board, role_controller, role_split, settings

    board = role_board.RoleBoard(settings.RolesMode.DRY_RUN, 6, lambda: 0.0)
    engines, wanted = role_split.Split(1, 1), role_split.Split(3, 1)
    verdict = role_controller.Verdict.BALANCED
    board.decided(role_controller.RoleDecision(verdict, "", engines, None, None, wanted, 0))
    return board.families()


def _slice_families(registry):
    """Yield the metrics of slices."""
    from pdrelay_proxy.features.slices.core.slice_preference import SlicePreference
    from pdrelay_proxy.features.slices.feature import slice_families

    preference = SlicePreference(registry)
    preference.counted[("full",)] += 1
    return slice_families(registry, preference)


def _labels(exposition):
    found = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def engine_metrics():
    """Read vLLM's source and the connector's tables: {name: its labels}. Importing vLLM would take 20 s."""
    package = importlib.util.find_spec("vllm")
    source = (Path(package.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py").read_text()
    found = {}
    for made in re.finditer(
        r'self\._(gauge|counter|histogram)_cls\(\s*name="([^"]+)"(.*?)labelnames=([^\n]*)', source, re.S
    ):
        more = set(re.findall(r'"(\w+)"', made[4]))
        for suffix in SUFFIXES[made[1]]:
            found[made[2] + suffix] = {"model_name", "engine"} | more
    stats = (ROOT / "connector" / "pdrelay_connector" / "shell" / "vllm_stats.py").read_text()
    own = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    own |= {name: "counter" for name in ("bytes_transferred", "descriptors", "posting_seconds") if f'"{name}"' in stats}
    own |= {"transfer_seconds": "histogram"} if '"vllm:pdrelay_transfer_seconds"' in stats else {}
    for name, kind in own.items():
        for suffix in SUFFIXES[kind]:
            found[f"vllm:pdrelay_{name}{suffix}"] = {"model_name", "engine"}
    return found


def named(expression):
    """Return what an expression selects and groups by: ([(metric, its label names)], [label names])."""
    selected = [
        (name, re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        for name, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expression)
    ]
    grouped = [
        label
        for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
        for label in re.split(r"\s*,\s*", labels.strip())
        if label
    ]
    return selected, grouped


def loose(expression):
    """Return words that are neither selected with labels nor PromQL: a metric without the release's labels, a typo."""
    rest = re.sub(r"[a-zA-Z_:][\w:]*\{[^}]*\}", "", expression)
    rest = re.sub(r"\b(?:by|on)\s*\([^)]*\)|\$__rate_interval|\b[0-9.]+[smh]?\b|\"[^\"]*\"", "", rest)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", rest)) - WORDS
