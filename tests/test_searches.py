"""Tests that search orders of events try the same ones whatever else is loaded."""

import importlib.util
import sys

from hypothesis import given, settings
from hypothesis import strategies as st


def searched():
    """Return what a search of 500 examples draws."""
    drawn = []

    @settings(max_examples=500, derandomize=True, database=None, deadline=None)
    @given(st.integers(), st.text())
    def draw(number, text):
        drawn.append((number, text))

    draw()
    return drawn


def test_a_search_does_not_depend_on_the_modules_that_are_loaded(tmp_path, monkeypatch):
    """Where it did, a broken rule was noticed alone and not beside other tests."""
    before = searched()
    source = tmp_path / "constants_of_its_own.py"  # as Hypothesis reads them from a module of ours
    source.write_text("\n".join(f"value_{each} = ({977_000_000_001 + each}, 'constant {each}')" for each in range(200)))
    spec = importlib.util.spec_from_file_location(source.stem, source)
    monkeypatch.setitem(sys.modules, source.stem, importlib.util.module_from_spec(spec))

    assert searched() == before
