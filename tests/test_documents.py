"""The documents: commands that listen on closed addresses only, links that lead somewhere, names that exist."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
SOURCES = [
    path.as_posix()
    for part in ("proxy", "connector", "tools", "tests", "benchmarks")
    for path in (ROOT / part).rglob("*.py")
]
SOURCES += [path.as_posix() for path in ROOT.glob("*.py")]
OF_VLLM = ("vllm/", "examples/online_serving/", "examples/disaggregated/")  # the latter are in its repository only
SECURITY = (ROOT / "SECURITY.md").read_text()
FINDINGS = [f"{level}{n}" for level, last in (("C", 2), ("H", 8), ("M", 9), ("L", 8)) for n in range(1, last + 1)]


@pytest.mark.parametrize(
    "path", [p for p in PAGES if p.suffix in (".md", ".py")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_example_listens_on_every_address(path):
    """An address of one's own, or loopback: a copied line is how most openings come about."""
    assert not re.search(r"(--host[ =]|_HOST=)(0\.0\.0\.0|::)", path.read_text())


@pytest.mark.parametrize("finding", FINDINGS)
def test_every_finding_of_the_audit_has_a_row(finding):
    """What was done, what shows it, and what stays."""
    rows = re.findall(rf"(?m)^\| {finding} \|(.*)\|$", SECURITY)

    assert len(rows) == 1
    assert len(re.split(r"(?<!\\)\|", rows[0])) == 4


def test_every_test_that_is_named_is_there():
    """A claim without its test is only a claim."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", SECURITY)
    missing = []
    for file, name in named:
        path = ROOT / file
        names = (
            {
                node.name
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            if path.exists()
            else set()
        )
        if not names or (name and name not in names):
            missing.append(f"{file}::{name}")

    assert len(named) >= 6
    assert missing == []


def test_every_link_of_the_documents_leads_to_a_file():
    """Those within the repository."""
    pages = [p for p in PAGES if p.suffix == ".md"]
    links = [(p, link) for p in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", p.read_text())]

    assert [f"{p.relative_to(ROOT)}: {link}" for p, link in links if not (p.parent / link).exists()] == []


def test_every_link_to_a_heading_leads_to_one():
    """A page that was split takes its headings along."""
    missing = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]:
        for name, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", page.read_text()):
            titles = re.findall(r"(?m)^#+ (.*)$", (page.parent / name if name else page).read_text())
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            missing += [f"{page.relative_to(ROOT)}: {name}#{anchor}"] if anchor not in anchors else []

    assert missing == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_a_page_names_is_there(page):
    """Modules move, and a path that is gone sends readers nowhere."""
    named = [name for name in re.findall(r"`([\w/]+\.py)\b", page.read_text()) if not name.startswith(OF_VLLM)]

    assert [name for name in named if not any(source.endswith(f"/{name}") for source in SOURCES)] == []


def test_every_file_of_vllm_that_a_page_cites_is_there():
    """In the version that is installed: a rule stands with its source."""
    if (package := importlib.util.find_spec("vllm")) is None:
        pytest.skip("vLLM is not installed")
    cited = {name for page in DOCS for name in re.findall(r"`vllm/([\w/]+\.py)`", page.read_text())}

    assert len(cited) > 5
    assert {name for name in cited if not (Path(package.origin).parent / name).is_file()} == set()


def test_the_index_names_every_page():
    """Readers find pages through the index."""
    index = (ROOT / "docs/README.md").read_text()

    assert [str(p.relative_to(ROOT / "docs")) for p in DOCS if f"]({p.relative_to(ROOT / 'docs')})" not in index] == [
        "README.md"
    ]
