"""What operators are told: metrics that exist, and each reason for which one engine serves a request."""

import importlib.util
import re
from pathlib import Path

import pytest

from pdrelay_connector.core.counters import COUNTERS, GAUGES
from pdrelay_connector.shell import kv_event_metrics
from pdrelay_proxy.core.model import SingleEngineReason
from support.documents import PAGES, ROOT

pytestmark = pytest.mark.processes


OTHERS = {  # what is no metric: a package, a plugin, labels of Prometheus, members of kv_transfer_params
    "pdrelay_slow_requests",  # of the example of a feature
    *("pdrelay_connector", "pdrelay_tools", "pdrelay_timelines", "pdrelay_role", "pdrelay_release"),
    *(
        "pdrelay_expires_at",
        "pdrelay_signature",
        "pdrelay_first_token",
        "pdrelay_cached_on",
        "pdrelay_cached_share",
        "pdrelay_lease",
        "pdrelay_looks_back",
    ),
}
SUFFIXES = re.compile(r"_(total|bucket|sum|count)$")


def _router_metrics():
    found = set()
    package = ROOT / "proxy/pdrelay_proxy"
    for source in [*(package / "io").rglob("*.py"), *(package / "features").rglob("*.py")]:
        found |= set(re.findall(r'"(pdrelay_\w+)"', source.read_text()))
    return found


def _connector_metrics():
    shell = "".join(path.read_text() for path in (ROOT / "connector/pdrelay_connector/shell").glob("*.py"))
    more = re.findall(r'"(bytes_transferred|descriptors|posting_seconds)":', shell)
    events = [f"kv_events_{name}" for name in (*kv_event_metrics.COUNTERS, "blocks", "readers")]
    found = {f"pdrelay_{name}" for name in (*COUNTERS, *GAUGES, *more, *events, "kv_events")}  # what those begin with
    return found | set(re.findall(r'"vllm:(pdrelay_\w+)"', shell))


def _vllm_metrics():
    if (vllm := importlib.util.find_spec("vllm")) is None:
        pytest.skip("vLLM is not installed")
    folder = Path(vllm.origin).parent
    sources = (folder / "v1/metrics/loggers.py", folder / "distributed/kv_transfer/kv_connector/v1/nixl/stats.py")
    return {name for path in sources for name in re.findall(r'"vllm:(\w+)"', path.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_metric_exists(page):
    """Operators paste them into Prometheus, and one that is gone is silent there."""
    text = page.read_text()
    ours = {SUFFIXES.sub("", name) for name in re.findall(r"(?<![\w:./-])(pdrelay_[a-z_]+[a-z])(?!\w|/)", text)}
    engines = {SUFFIXES.sub("", name) for name in re.findall(r"vllm:([a-z_]+[a-z])", text)}

    assert ours <= _router_metrics() | OTHERS
    connectors = {name for name in engines if name.startswith("pdrelay_")}
    assert connectors <= _connector_metrics()
    assert engines - connectors - {"pdrelay", "nixl"} <= {SUFFIXES.sub("", name) for name in _vllm_metrics()}


def test_every_reason_for_one_engine_is_explained():
    """An operator looks for the word of the header, the log or the metric."""
    section = (ROOT / "docs/router.md").read_text().split("## One engine for a request")[1].split("\n## ")[0]

    assert {*SingleEngineReason} <= {*re.findall(r"`([a-z_]+)`", section)}
