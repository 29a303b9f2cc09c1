"""``xpyd up``, as ``make up`` runs it: an answer that was prefilled on one real engine and decoded on another."""

import re
import subprocess
import sys

import pytest

from support.cluster import ROOT, free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_up_answers_a_request_over_real_engines(model):
    """It says where the prompt was prefilled and decoded, the bytes that moved, the time each leg took; and ends."""
    flags = ("--port", "--prefill-port", "--decode-port", "--side-channel-port")
    chosen = [text for flag, port in zip(flags, free_ports(4), strict=True) for text in (flag, str(port))]
    argv = [sys.executable, "-m", "xpyd_proxy.cli", "up", "--once", *chosen, "--model", str(model)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"answer +\S", done.stdout)
    assert re.search(r"prefill +prefill-0 in [0-9.]+ ms", done.stdout)
    assert re.search(r"decode +decode-0 in [0-9.]+ ms", done.stdout)
    assert re.search(r"KV moved +[1-9][0-9.,]* ", done.stdout)
