"""The product has one name, and nobody is sent to a package of somebody else."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BEFORE = "x" + "pyd"  # on PyPI it is another router; xPyD, the topology, is another word

pytestmark = pytest.mark.processes


def test_the_name_of_before_is_nowhere():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = listed.rstrip("\0").split("\0")
    found = [name for name in names if BEFORE in name.lower()]
    for name in names:
        text = (ROOT / name).read_bytes().decode(errors="replace").replace("xPyD", "")
        if BEFORE in text.lower():
            found.append(name)

    assert found == []
