"""Examples 01 to 04 in the environment that ``make up ENGINE=sim`` makes, which has no vLLM, numpy or openai."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdrelay_proxy.settings import Settings
from support.cluster import free_ports
from support.sim import cluster

pytestmark = pytest.mark.processes


EXAMPLES = Path(__file__).parents[2] / "examples"
MISSING = ("numpy", "openai", "tokenizers", "torch", "nixl", "vllm")
HIDES = """
import importlib.machinery, importlib.util, runpy, sys
missing = set({missing!r})
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in missing else find(name, *more)
sys.modules.update(dict.fromkeys(missing))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def example(folder, script, *arguments, env=None):
    code = HIDES.format(missing=MISSING)
    argv = [sys.executable, "-c", code, str(EXAMPLES / script), *arguments]
    clean = {name: value for name, value in os.environ.items() if name != "ADMIN_API_KEY"}
    return subprocess.run(
        argv, cwd=folder, env={**clean, **(env or {})}, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_quickstart_runs_with_simulated_engines(tmp_path):
    """As its page says."""
    router, prefill, decode = map(str, free_ports(3))
    ports = ("--port", router, "--prefill-port", prefill, "--decode-port", decode)
    done = example(tmp_path, "01-quickstart/quickstart.py", "--engine", "sim", *ports)

    assert (done.returncode, done.stderr) == (0, "")
    assert "decode:  decode-0" in done.stdout


def test_an_instance_is_added_with_the_key_that_up_has_drawn(tmp_path):
    """In the folder where `make up` runs; nothing has to be exported first."""
    (tmp_path / ".pdrelay").mkdir()
    (tmp_path / ".pdrelay/admin-key").write_text("sesame\n")
    (port,) = free_ports(1)
    with cluster(1, 1, Settings(admin_key="sesame"), model="tiny") as running:
        words = ("--router", f"http://{running.router}", "--engine", "sim", "--port", str(port), "--once")
        done = example(tmp_path, "03-add-an-instance/add_instance.py", *words)

    assert (done.returncode, done.stderr) == (0, "")
    assert "after:  1 prefill, 2 decode" in done.stdout


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "01-quickstart/quickstart.py",
            "quickstart: the Python package nixl is not installed: `make install` installs it",
        ),
        ("02-openai-client/client.py", "client: the Python package openai is not installed here: make install has it"),
        ("04-stock-engines/stock.py", "stock: the Python package nixl is not installed: `make install` installs it"),
    ],
)
def test_what_is_missing_is_named_in_a_sentence(tmp_path, script, says):
    """It was a traceback."""
    done = example(tmp_path, script)

    assert done.returncode == 1
    assert done.stderr.startswith(says)
    assert "Traceback" not in done.stderr


def test_no_example_makes_a_model_in_a_folder_of_another_name(tmp_path):
    """As little as pdrelay up does."""
    done = example(tmp_path, "01-quickstart/quickstart.py", "--engine", "sim", "--model", "Qwen/Qwen3-0.6B")

    assert done.returncode == 1
    assert done.stderr.startswith("quickstart: there is no model in Qwen/Qwen3-0.6B")
    assert not (tmp_path / "Qwen").exists()
