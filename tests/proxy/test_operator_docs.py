"""What operators are told: metrics, alerts, values, links and commands that exist."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from support.cluster import ROOT
from xpyd_connector.core.counters import COUNTERS, GAUGES
from xpyd_proxy.cli import build_parser
from xpyd_proxy.core.request_record import RequestOutcome
from xpyd_proxy.settings import Settings

PAGES = [ROOT / "docs" / name for name in ("scaling.md", "runbook.md", "kubernetes.md", "kubernetes-operations.md")]
CHART = ROOT / "helm/xpyd"
ALERTS = re.findall(r"(?m)^- alert: (\w+)", (CHART / "files/alerts.yaml").read_text())
PARTS = ["Symptom", "Means", "Look", "Do", "Sure"]
SUFFIXES = re.compile(r"_(total|bucket|sum|count)$")


def _sections(page):
    return dict(re.findall(r"(?ms)^## (.*?)$\n(.*?)(?=^## |\Z)", page.read_text()))


def _anchors(page):
    text = page.read_text()
    titles = [title.lower() for title in re.findall(r"(?m)^#+ (.*)$", text)]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles} | set(
        re.findall(r'<a id="(.*?)">', text)
    )


def _router_metrics():
    found = set()
    for source in (ROOT / "proxy/xpyd_proxy/io").rglob("*.py"):
        found |= set(re.findall(r'"(xpyd_\w+)"', source.read_text()))
    return found


def _connector_metrics():
    shell = (ROOT / "connector/xpyd_connector/shell/vllm_stats.py").read_text()
    more = re.findall(r'"(bytes_transferred|descriptors|posting_seconds)":', shell)
    return {f"xpyd_{name}" for name in (*COUNTERS, *GAUGES, *more)} | set(re.findall(r'"vllm:(xpyd_\w+)"', shell))


def _vllm_metrics():
    if (vllm := importlib.util.find_spec("vllm")) is None:
        pytest.skip("vLLM is not installed")
    return set(re.findall(r'"vllm:(\w+)"', (Path(vllm.origin).parent / "v1/metrics/loggers.py").read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_metric_exists(page):
    """Whoever is woken up at night pastes them."""
    text = page.read_text()
    ours = {SUFFIXES.sub("", name) for name in re.findall(r"(?<![\w:.-])(xpyd_[a-z_]+[a-z])", text)} - {"xpyd_io_role"}
    engines = {SUFFIXES.sub("", name) for name in re.findall(r"vllm:([a-z_]+[a-z])", text)}

    assert ours
    assert ours <= _router_metrics()
    connectors = {name for name in engines if name.startswith("xpyd_")}
    assert connectors <= _connector_metrics()
    assert engines - connectors - {"xpyd"} <= {SUFFIXES.sub("", name) for name in _vllm_metrics()}


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_section_with_all_five_parts(alert):
    """What is seen, what it means, where to look, what to do, how to be sure: in this order."""
    section = _sections(ROOT / "docs/runbook.md")[alert]

    assert re.findall(r"(?m)^\*\*(\w+)\.\*\* \S", section) == PARTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    """A file, and a heading in it."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), target


def test_settings_that_the_runbook_names_exist():
    """In backquotes, as in a configuration file: `name: value`."""
    text = "".join(page.read_text() for page in PAGES)
    words = r"`((?:max|retry|prefill|decode|reuse|resume|health|circuit|min|stream|first|log)_[a-z_]+)(?:: [^`]*)?`"
    named = set(re.findall(words, text))

    assert len(named) > 8
    others = {"max_leases", "max_held_share"} | {*RequestOutcome}  # settings of the connector, values of labels
    assert named - others <= set(Settings.__dataclass_fields__)


def test_every_command_of_ours_is_one():
    """`xpyd instances ...`, and `every ...` of the runbook, go through the real parser."""
    text = "".join(page.read_text() for page in PAGES)
    found = set(re.findall(r"(?:xpyd instances|`every) ((?:--json )?(?:list|add|drain|undrain)[^`\n#;|]*)", text))

    assert len(found) > 4
    for arguments in found:
        words = ["instances", *re.sub(r"--wait(?! S)", "--wait 5", arguments).split()]
        build_parser(words).parse_args(words)


def test_the_shell_functions_of_the_runbook_are_shell():
    """Whoever pastes them gets functions and no error."""
    block = re.search(r"(?s)```\n(NS=.*?)```", (ROOT / "docs/runbook.md").read_text())[1]
    names = " ".join(re.findall(r"(?m)^(\w+)\(\)", block))
    done = subprocess.run(
        ["bash", "-euc", f"{block}\ntype {names} >/dev/null"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert names == "pods logs m every out back"
