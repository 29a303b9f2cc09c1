"""The documents: commands that listen on closed addresses only, links that lead somewhere, names that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
SOURCES = [
    path.as_posix()
    for part in ("proxy", "connector", "tools", "tests", "benchmarks")
    for path in (ROOT / part).rglob("*.py")
]
SOURCES += [path.as_posix() for path in ROOT.glob("*.py")]
SECURITY = (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize(
    "path", [p for p in PAGES if p.suffix in (".md", ".py")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_example_listens_on_every_address(path):
    """An address of one's own, or loopback: a copied line is how most openings come about."""
    assert not re.search(r"(--host[ =]|_HOST=)(0\.0\.0\.0|::)", path.read_text())


def test_every_link_of_the_documents_leads_to_a_file():
    """Those within the repository."""
    pages = [p for p in PAGES if p.suffix == ".md"]
    links = [(p, link) for p in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", p.read_text())]

    assert [f"{p.relative_to(ROOT)}: {link}" for p, link in links if not (p.parent / link).exists()] == []
