"""The examples are run as their readers run them; only ports and addresses are the tests' own."""

import re

import pytest

from support.cluster import base_url, port_flags, router_command, run_example
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
