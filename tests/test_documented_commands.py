"""What the documents tell people to type exists: commands, flags, make targets, keys of files, values of the chart."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from pdrelay_connector.settings import Settings as ConnectorSettings
from pdrelay_proxy.core.fleet.peer_metrics import PairFailure
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.request_record import RequestOutcome
from pdrelay_proxy.known_settings import OPTIONS
from support.documents import OURS, PAGES, ROOT, block_lines, blocks, commands, flags_of, spans, words

FOREIGN = {  # flags of kubectl, helm and other programs, and words of other projects, that stand alone in backquotes
    "--previous", "--force", "--exclusive", "--grace-period", "device_ownership_from_security_context", "ibv_devices",
    "container_cpu_cfs_throttled_periods_total", "load_inplace", "max_new_tokens", "--key",
    "--atomic", "--rollback-on-failure", "--server-side", "cpu_bytes_to_use", "offload_prompt_only",
}  # fmt: skip


MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"(?m)^([a-z][\w-]*):", MAKEFILE)) | set(
    " ".join(re.findall(r"\.PHONY: (.*)", MAKEFILE)).split()
)
VARIABLES = set(re.findall(r"\$\(([A-Z]+)\)", MAKEFILE))
VALUES = yaml.safe_load((ROOT / "helm/pdrelay/values.yaml").read_text())
POOLS = ("prefill", "decode")  # each may have every value of `engine`, besides its own
SOURCES = [
    path
    for folder in ("proxy", "connector", "tools", "helm")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".yaml", ".tpl", ".json", ".sh") and path != ROOT / "helm/pdrelay/values.schema.json"
]
WORDS = set(re.findall(r"\w+", " ".join(path.read_text() for path in SOURCES)))
WORDS |= {
    str(value) for words in (Failure, PairFailure, RequestOutcome) for value in words
}  # of labels; auto() writes them nowhere


@pytest.fixture(scope="module")
def vllm():
    """The flags of ``vllm serve`` and ``vllm bench serve``, out of their sources: importing them takes a minute."""
    if (package := importlib.util.find_spec("vllm")) is None:
        pytest.skip("vLLM is not installed")
    folder = Path(package.origin).parent
    serve = [folder / "engine/arg_utils.py", *(folder / "entrypoints").rglob("cli_args.py")]
    bench = [*(folder / "benchmarks").rglob("*.py")]
    return {name: _flags_in(paths) for name, paths in (("serve", serve), ("bench", bench))}


def _flags_in(paths):
    """Arguments that are declared, and fields of dataclasses, of which vLLM makes arguments."""
    text = "".join(path.read_text() for path in paths)
    fields = {f"--{name.replace('_', '-')}" for name in re.findall(r"(?m)^    ([a-z]\w+): ", text)}
    return fields | {flag.replace("_", "-") for flag in re.findall(r'"(--[a-z][\w-]*)"', text)}


def scripts_of(page):
    """What the programs beside a page, or those that wrote it, take."""
    paths = (ROOT / "benchmarks").rglob("*.py") if page.parent.name == "benchmarks" else page.parent.glob("*.py")
    return set() if page.parent == ROOT else {flag for path in paths for flag in _in_script(path)}


def mistakes(text, page, vllm):
    """Return what a page names and nobody knows."""
    found = []
    anything = {*FOREIGN, *scripts_of(page), *vllm["serve"], *(flag for flags in OURS.values() for flag in flags)}
    for line in (*block_lines(text), *spans(text)):
        judged = [*commands(line)]
        for kind, name, arguments in judged:
            if kind == "make":
                found += [f"make {w}" for w in arguments if re.fullmatch(r"[a-z][a-z-]*", w) and w not in TARGETS]
                variables = [re.match(r"([A-Z]+)=", word) for word in arguments]
                found += [f"make {m[0]}" for m in variables if m and m[1] not in VARIABLES]
                continue
            takes = {"pdrelay": OURS, "vllm": vllm}[kind][name] if kind != "script" else _in_script(name)
            found += [f"{name} {flag}" for flag in sorted(flags_of(arguments) - takes - {"--help"})]
            if name == "instances":
                verb = next((w for w in arguments if re.fullmatch(r"[a-z|]+", w)), "list")
                found += [f"instances {one}" for one in verb.split("|") if one not in takes]
        if not judged and line.startswith("--"):
            found += sorted(flags_of(words(line)) - anything)
        if word := re.fullmatch(r"([a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?:: .*|=.*)?", line):
            own = word[1].startswith(("pdrelay_", "test_"))  # metrics: test_operator_docs.py; tests: promises.md
            found += [word[1]] if word[1] not in WORDS | FOREIGN and not own else []
        if key := re.fullmatch(r"([a-z][a-z0-9_]*) = (?:[\d\[\"'].*|true|false)", line):
            is_known = key[1] in {*OPTIONS, *ConnectorSettings.__dataclass_fields__}
            found += [] if is_known else [f"{key[1]} ="]
    for block in blocks(text, "toml"):
        found += [f"{key} =" for key in tomllib.loads(block) if key not in OPTIONS]
    return found + [path for path in _values(text) if not has_value(path)]


def without_theirs(text):
    """Leave out the first cells of tables headed "there": they name what other programs have."""
    tables = re.compile(r"(?m)^\| there \|.*\n(?:\|.*\n)+")
    return tables.sub(lambda table: re.sub(r"(?m)^\|[^|]*\|", "|", table[0]), text)


def _in_script(path):
    return set(re.findall(r'"(--[a-z][\w-]*)"', (ROOT / path).read_text()))


def _values(text):
    """Yield what looks like a value of the chart."""
    heads = "|".join(key for key, value in VALUES.items() if isinstance(value, dict))
    for path in re.findall(rf"(?<![\w./-])((?:{heads})(?:\.[a-zA-Z_]+)+)(?!\w|/|\.\w)", text):
        if not path.endswith((".md", ".txt", ".yaml", ".json", ".svg", ".Dockerfile", ".py", ".sh", ".service")):
            yield path


def has_value(path):
    """Tell whether the chart takes a value; a map that is empty by default takes any key, settings only theirs."""
    if path.startswith("router.settings."):
        return path.removeprefix("router.settings.") in OPTIONS
    head, _, rest = path.partition(".")
    if head in POOLS and has_value(f"engine.{rest}"):
        return True
    values = VALUES
    for key in path.split("."):
        if values in ({}, None):
            return True
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page, vllm):
    """People paste it."""
    assert mistakes(without_theirs(page.read_text()), page, vllm) == []


def test_where_the_chart_sets_an_option_is_a_value_of_it():
    """The declarations say so, and docs/options.md shows it."""
    assert [s.option.chart for s in OPTIONS.values() if s.option.chart and not has_value(s.option.chart)] == []
