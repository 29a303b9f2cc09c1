"""What documents and examples tell people to type is closed, and what SECURITY.md claims can be looked up."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOLD = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.*")]
SECURITY = (ROOT / "SECURITY.md").read_text()
FINDINGS = [f"{level}{n}" for level, last in (("C", 2), ("H", 8), ("M", 9), ("L", 8)) for n in range(1, last + 1)]


@pytest.mark.parametrize(
    "path", [p for p in TOLD if p.suffix in (".md", ".py")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_example_listens_on_every_address(path):
    """An address of one's own, or loopback: a copied line is how most openings come about."""
    assert not re.search(r"(--host[ =]|_HOST=)(0\.0\.0\.0|::)", path.read_text())


def test_the_engines_of_the_readme_have_a_secret_and_a_key():
    """And the router its clients' keys; the warning is in the first paragraph."""
    section = (ROOT / "README.md").read_text().partition("## Your own GPU engines")[2].partition("\n## ")[0]
    first, _, rest = section.strip().partition("\n\n")

    assert first.startswith("**The engines' network must be closed.**")
    assert "SECURITY.md" in first
    for name in (
        "XPYD_CONNECTOR_SECRET=",
        "VLLM_API_KEY=",
        "XPYD_PREFILL_API_KEY=",
        "XPYD_DECODE_API_KEY=",
        "--api-keys-file",
    ):
        assert name in rest


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
    told = [p for p in TOLD if p.suffix == ".md"]
    links = [(p, link) for p in told for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", p.read_text())]

    assert [f"{p.relative_to(ROOT)}: {link}" for p, link in links if not (p.parent / link).exists()] == []
