"""A name stands for one thing: whoever reads a class name anywhere knows which one it is."""

import ast
import collections
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["proxy/xpyd_proxy", "connector/xpyd_connector"]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_name_occurs_twice(package):
    places = collections.defaultdict(list)
    for path in (ROOT / package).glob("**/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))

    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_has_more_than_twenty_attributes(package):
    """What is assigned to ``self``: a class that keeps more is several classes."""
    many = {}
    for path in (ROOT / package).glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and len(found := _attributes(node)) > 20:
                many[f"{path.relative_to(ROOT)} {node.name}"] = len(found)

    assert many == {}


def _attributes(node):
    """Return the names that the methods of a class assign to ``self``."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
