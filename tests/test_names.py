"""A name stands for one thing: whoever reads a class name anywhere knows which one it is."""

import ast
import collections
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["proxy/pdrelay_proxy", "connector/pdrelay_connector", "tools/pdrelay_tools"]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_name_occurs_twice(package):
    places = collections.defaultdict(list)
    for path in (ROOT / package).glob("**/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))

    assert {name: found for name, found in places.items() if len(found) > 1} == {}
