"""The examples are run as their readers run them; only ports and addresses are the tests' own."""

import os
import re
import subprocess
import sys

import pytest

from pdrelay_tools.local.recipe import SECRET_VARIABLES
from support.cluster import ROOT, base_url, port_flags, router_command, run_example, wait_until
from support.fixtures import ADMIN_KEY

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


# It is the steps of ``pdrelay up``, each of which ``test_up.py`` takes with real engines: two more take 40 s to start.
@pytest.mark.parametrize("engine", ["sim", pytest.param("vllm", marks=pytest.mark.thorough)])
def test_quickstart(model, engine):
    """Engines come up, answer over two legs, and are gone afterwards; here the prefill engine pushes."""
    flags = port_flags("--port", "--prefill-port", "--decode-port", "--side-channel-port")
    chosen = ("--engine", engine, "--model", model, "--kv-transfer-mode", "push")
    printed = run_example("01-quickstart/quickstart.py", *flags, *chosen)

    assert "prefill-0" in printed
    assert "decode-0" in printed
    moved = "unknown" if engine == "sim" else r"[1-9]\d*"
    assert re.search(rf"^KV moved: {moved} bytes", printed, re.MULTILINE)


def test_openai_client(one_pair):
    """Chat, completion and stream with the official client."""
    printed = run_example("02-openai-client/client.py", "--base-url", f"{one_pair}/v1")

    assert all(re.search(rf"^{kind}: +\S", printed, re.MULTILINE) for kind in ("chat", "completion", "stream"))


def test_add_an_instance(engines, fleet):
    """1P1D becomes 1P2D while it runs, and both decode engines serve."""
    command = router_command("router-grows", [engines.p0], [engines.d0], env={"ADMIN_API_KEY": ADMIN_KEY})
    fleet.wait_ready([fleet.start(command)], timeout_s=30)
    args = ("--router", base_url(command), "--instance", engines.d1.address)
    printed = run_example("03-add-an-instance/add_instance.py", *args, env={"ADMIN_API_KEY": ADMIN_KEY})

    assert f"Added {engines.d1.address} to decode_instances." in printed
    assert "decode-0" in printed
    assert "decode-1" in printed


def test_an_instance_is_added_beside_up_as_it_comes(tmp_path):
    """Two terminals in one folder, and nothing exported: the new engine has the fleet's secret and mode, and KV moves.

    It had neither, so it computed every prompt itself, and the example called that a success.
    """
    flags = port_flags("--port", "--prefill-port", "--decode-port", "--side-channel-port")
    clean = {name: value for name, value in os.environ.items() if name not in ("ADMIN_API_KEY", *SECRET_VARIABLES)}
    argv = [sys.executable, "-m", "pdrelay_proxy.cli", "up", "--model", "tiny", *map(str, flags)]
    with (tmp_path / "output").open("w+") as output:
        up = subprocess.Popen(argv, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, env=clean)
        try:
            wait_until(
                lambda: up.poll() is not None or "Ctrl-C stops" in (tmp_path / "output").read_text(),
                seconds=300,
                what="pdrelay up",
            )
            new = port_flags("--port", "--side-channel-port")
            router = f"http://127.0.0.1:{flags[1]}"
            example = ROOT / "examples/03-add-an-instance/add_instance.py"
            added = subprocess.run(
                [sys.executable, str(example), "--router", router, *map(str, new), "--once"],
                cwd=tmp_path, env=clean, capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            up.terminate()
            up.wait(60)

    assert (added.returncode, added.stderr) == (0, ""), (tmp_path / "output").read_text()
    assert re.search(r"^ok +prefill-0 to decode-0: [1-9][0-9,]* bytes moved", added.stdout, re.MULTILINE)
    assert re.search(r"^decode-1 decoded [1-9] of 6 requests$", added.stdout, re.MULTILINE)
    secret = tmp_path / ".pdrelay/connector-secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert re.search(r"^ +secret +in \.pdrelay/connector-secret; ", (tmp_path / "output").read_text(), re.MULTILINE)
    assert secret.read_text().strip() not in (tmp_path / "output").read_text()
