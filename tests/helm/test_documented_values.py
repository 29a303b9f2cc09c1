"""Values and objects that the documents show are taken: the chart renders them, and their schemas allow them."""

import pytest
import yaml

from support.documents import PAGES, ROOT, blocks
from support.helm_chart import Chart
from support.helm_schemas import wrong

pytestmark = pytest.mark.processes


SHOWN = [
    pytest.param(text, id=f"{page.relative_to(ROOT)} {n}")
    for page in PAGES
    for n, text in enumerate(blocks(page.read_text(), "yaml"))
]


@pytest.mark.parametrize("text", SHOWN)
def test_a_yaml_block_is_taken(text):
    """By the chart, beside the least that it needs; an object by the schema of its kind."""
    shown = yaml.safe_load(text)

    if "kind" in shown:
        assert wrong(shown, "1.33.0") == []
    else:
        assert Chart().objects(shown, ci="minimal")


def test_the_quick_start_needs_nothing_else():
    """docs/kubernetes.md begins with a whole file of values."""
    text = blocks((ROOT / "docs/kubernetes.md").read_text(), "yaml")[0]

    assert Chart().objects(yaml.safe_load(text))
