"""Examples 01 to 04 in the environment that ``make up ENGINE=sim`` makes, which has no vLLM, numpy or openai."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import Sim
from support.cluster import free_ports, port_flags
from support.sim import cluster, serving

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


def own_ports(*more):
    """Ports of this test alone: another fleet may have those that examples take by themselves."""
    return map(str, port_flags("--port", "--prefill-port", "--decode-port", *more))


def test_the_quickstart_runs_with_simulated_engines(tmp_path):
    """As its page says."""
    done = example(tmp_path, "01-quickstart/quickstart.py", "--engine", "sim", *own_ports())

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
        at_end = httpx.get(f"http://{running.router}/status", timeout=20)

    assert (done.returncode, done.stderr) == (0, "")
    assert "after:  1 prefill, 2 decode" in done.stdout
    assert at_end.json()["decode_node_count"] == 1, "it is taken out before it ends"


def test_an_instance_to_which_no_kv_moves_is_not_added(tmp_path):
    """It answers as well as others, for it computes the prompts itself: that was called a success."""
    new = Sim("decode")
    with cluster(1, 1, Settings(admin_key="sesame")) as running, serving(new) as address:
        prefill = running.engines["p0"]
        prefill.loads.are_shown = new.loads.are_shown = True
        new.loads.unmet[prefill.engine_id] = "secret"
        words = ("--router", f"http://{running.router}", "--instance", address)
        done = example(tmp_path, "03-add-an-instance/add_instance.py", *words, env={"ADMIN_API_KEY": "sesame"})
        at_end = httpx.get(f"http://{running.router}/status", timeout=20)

    assert done.returncode == 1
    assert done.stderr.startswith(f"add_instance: {address} was not added, because no KV reaches it: ")
    assert "was not met: secret" in done.stderr
    assert at_end.json()["decode_node_count"] == 1


@pytest.mark.parametrize(
    ("script", "ports", "says"),
    [
        (
            "01-quickstart/quickstart.py",
            ("--side-channel-port",),
            "quickstart: the Python package nixl is not installed: `make install` installs it",
        ),
        (
            "02-openai-client/client.py",
            None,
            "client: the Python package openai is not installed here: make install has it",
        ),
        (
            "04-stock-engines/stock.py",
            ("--side-channel-port",),
            "stock: the Python package nixl is not installed: `make install` installs it",
        ),
    ],
)
def test_what_is_missing_is_named_in_a_sentence(tmp_path, script, ports, says):
    """It was a traceback."""
    done = example(tmp_path, script, *(() if ports is None else own_ports(*ports)))

    assert done.returncode == 1
    assert done.stderr.startswith(says)
    assert "Traceback" not in done.stderr


def test_no_example_makes_a_model_in_a_folder_of_another_name(tmp_path):
    """As little as pdrelay up does."""
    words = ("--engine", "sim", "--model", "Qwen/Qwen3-0.6B", *own_ports())
    done = example(tmp_path, "01-quickstart/quickstart.py", *words)

    assert done.returncode == 1
    assert done.stderr.startswith("quickstart: there is no model in Qwen/Qwen3-0.6B")
    assert not (tmp_path / "Qwen").exists()
