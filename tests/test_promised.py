"""The tests that promises.md names are there: what shows a promise does not go unnoticed."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = re.findall(r"(?m)^\| (?!promise|-|\*\*)(.+?) \| (`.+`) \|$", (HERE / "promises.md").read_text())


@pytest.mark.parametrize(("promise", "tests"), ROWS, ids=[promise for promise, _ in ROWS])
def test_a_promise_has_its_test(promise, tests):
    """A promise without a test is a hope."""
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", tests):
        tree = ast.parse((HERE / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

        assert f"test_{name}" in names, f"{file} has no test_{name}"
