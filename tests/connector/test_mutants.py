"""Each rule that is turned off in the source is missed by a test."""

import subprocess
import sys

import pytest

from support.source_mutants import MUTANTS, ROOT


def test_every_rule_is_in_the_source_once():
    """Else what stands there instead would never have been tried."""
    found = {name: (ROOT / mutant.file).read_text().count(mutant.rule) for name, mutant in MUTANTS.items()}

    assert {name: count for name, count in found.items() if count != 1} == {}


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_broken_rule_is_noticed():
    """Two minutes: each rule has its tests run against a copy of the source without it."""
    argv = [sys.executable, "-P", ROOT / "tests/support/source_mutants.py"]
    tried = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)

    assert (tried.stdout, tried.returncode) == ("", 0)
