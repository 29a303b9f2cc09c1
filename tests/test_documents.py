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


def test_the_engines_on_two_hosts_have_a_secret_and_a_key():
    """And the router its clients' keys; the warning is in the first paragraph."""
    section = (ROOT / "docs/two-hosts.md").read_text().partition("\n")[2]
    first, _, rest = section.strip().partition("\n\n")

    assert first.startswith("**The engines' network must be closed.**")
    assert "SECURITY.md" in first
    for name in (
        "PDRELAY_CONNECTOR_SECRET=",
        "VLLM_API_KEY=",
        "PDRELAY_PREFILL_API_KEY=",
        "PDRELAY_DECODE_API_KEY=",
        "--api-keys-file",
    ):
        assert name in rest


def _measured():
    """Yield each row of the numbers: what is shown, and the text of the page that it links to."""
    for name in ("README.md", "docs/supported.md"):
        page = ROOT / name
        for what, ours, theirs, link in re.findall(
            r"(?m)^\| ([^|]*) \| ([^|]*) \| ([^|]*) \| \[.*\]\(([^)#]*).*\) \|$", page.read_text()
        ):
            yield pytest.param(f"{ours} {theirs}", (page.parent / link).read_text(), id=f"{name}: {what}")


@pytest.mark.parametrize(("shown", "page"), [*_measured()])
def test_what_the_readme_measures_is_on_the_page_behind_it(shown, page):
    """As many digits of it as the README shows: pages are measured anew, and the README is not."""
    number = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![.\d])"
    there = [float(found.replace(",", "")) for found in re.findall(number, page)]
    numbers = [found.replace(",", "") for found in re.findall(number, shown)]

    assert numbers
    for one in numbers:
        digits = len(one.partition(".")[2])
        assert any(f"{value:.{digits}f}" == one for value in there), one


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


def test_every_part_of_the_tree_in_the_architecture_is_there():
    """The names at the beginning of a line of the tree: modules, or folders that end in a slash."""
    tree = re.search(r"(?s)```\n(proxy/.*?)```", (ROOT / "docs/architecture.md").read_text())[1]
    missing, above = [], []
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent > 4:
            continue  # the explanation goes on
        above = [(deep, path) for deep, path in above if deep < indent]
        folder = above[-1][1] if above else ROOT
        for name in re.split(r" {3,}", line.strip())[0].split():
            path = folder / name
            if not (path.is_dir() or (not name.endswith("/") and path.with_suffix(".py").is_file())):
                missing.append(f"{path.relative_to(ROOT)}")
            if path.is_dir():
                above.append((indent, path))

    assert missing == []


def test_the_index_names_every_page():
    """Readers find pages through the index."""
    index = (ROOT / "docs/README.md").read_text()

    assert [str(p.relative_to(ROOT / "docs")) for p in DOCS if f"]({p.relative_to(ROOT / 'docs')})" not in index] == [
        "README.md"
    ]
