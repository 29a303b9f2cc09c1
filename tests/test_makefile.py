"""What ``make up`` installs."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("Makefile", "pyproject.toml", "helm", *(path.name for path in ROOT.glob("requirements-*.txt")))


def steps(folder, *words):
    """What make would do in a bare checkout."""
    done = subprocess.run(["make", "-n", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.fixture
def checkout(tmp_path):
    """A checkout in which nothing has been installed."""
    for name in FILES:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_simulated_engines_need_no_vllm(checkout):
    """PyTorch and vLLM are 4 GB, and simulated engines import neither."""
    found = steps(checkout, "up", "ENGINE=sim")

    assert "PyTorch" not in found
    assert ".venv-sim/bin/xpyd up" in found
    assert ".venv/" not in found


def test_simulated_engines_use_what_is_installed(checkout):
    """A second environment would be of no use."""
    (checkout / ".venv/.stamps").mkdir(parents=True)
    (checkout / ".venv/.stamps/package").touch()

    assert "\n.venv/bin/xpyd up" in steps(checkout, "up", "ENGINE=sim")


@pytest.mark.parametrize("words", [["up"], ["up", "ENGINE=vllm"], ["install", "ENGINE=sim"]])
def test_everything_else_installs_all_of_it(checkout, words):
    """Into the one environment that the pages name."""
    found = steps(checkout, *words)

    assert "PyTorch" in found
    assert ".venv-sim" not in found
