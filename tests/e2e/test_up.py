"""``xpyd up``, as ``make up`` runs it: an answer that was prefilled on one real engine and decoded on another."""

import contextlib
import ipaddress
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from support.cluster import ROOT, free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_up_answers_a_request_over_real_engines(model, tmp_path):
    """It says where the prompt was prefilled and decoded, the bytes that moved, the time each leg took; and ends.

    All the while, its engines and its router listen on loopback only: HTTP, the side channel, NIXL, and vLLM's own.
    """
    flags = ("--port", "--prefill-port", "--decode-port", "--side-channel-port")
    chosen = [text for flag, port in zip(flags, free_ports(4), strict=True) for text in (flag, str(port))]
    argv = [sys.executable, "-m", "xpyd_proxy.cli", "up", "--once", *chosen, "--model", str(model)]
    heard = set()
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 300
            while process.poll() is None and time.monotonic() < end:
                heard |= listening(process.pid)
                time.sleep(0.2)
        finally:
            process.terminate()
            code = process.wait(60)
        output.seek(0)
        done = SimpleNamespace(returncode=code, stdout=output.read())

    assert done.returncode == 0, done.stdout
    assert {int(port) for port in chosen[1::2]} <= {port for _, port in heard}
    assert [ip for ip, _ in heard if not ipaddress.ip_address(ip).is_loopback] == []
    assert re.search(r"answer +\S", done.stdout)
    assert re.search(r"prefill +prefill-0 in [0-9.]+ ms", done.stdout)
    assert re.search(r"decode +decode-0 in [0-9.]+ ms", done.stdout)
    assert re.search(r"KV moved +[1-9][0-9.,]* ", done.stdout)


def listening(pid):
    """Return the addresses at which a process and its descendants listen for TCP."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                found |= {tuple(each.laddr) for each in process.net_connections("tcp") if each.status == "LISTEN"}
    return found
