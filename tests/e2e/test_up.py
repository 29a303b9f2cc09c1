"""``pdrelay up``, as ``make up`` runs it: an answer that was prefilled on one real engine and decoded on another."""

import contextlib
import ipaddress
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest

from support.cluster import ROOT, free_ports, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_up_answers_a_request_over_real_engines(model, tmp_path):
    """It says where the prompt was prefilled and decoded, the bytes that moved, the time each leg took; and ends.

    All the while, its engines and its router listen on loopback only: HTTP, the side channel, NIXL, and vLLM's own.
    """
    flags = ("--port", "--prefill-port", "--decode-port", "--side-channel-port")
    chosen = [text for flag, port in zip(flags, free_ports(4), strict=True) for text in (flag, str(port))]
    argv = [sys.executable, "-m", "pdrelay_proxy.cli", "up", "--once", *chosen, "--model", str(model)]
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


class Up:
    """``pdrelay up --kv-events`` with its default of one engine of each role, and what it and its router say."""

    def __init__(self, model, folder):
        self.ports = free_ports(4)
        flags = ("--port", "--prefill-port", "--decode-port", "--side-channel-port")
        chosen = [text for flag, port in zip(flags, self.ports, strict=True) for text in (flag, str(port))]
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self._output = folder / "output"
        self._environment = {**os.environ, "ADMIN_API_KEY": "only-for-this-test", "PYTHONUNBUFFERED": "1"}
        argv = [sys.executable, "-m", "pdrelay_proxy.cli", "up", "--kv-events", *chosen, "--model", str(model)]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._process.terminate()
        self._process.wait(60)

    def output(self):
        return self._output.read_text()

    def metrics(self):
        return httpx.get(f"{self.url}/metrics", timeout=10).text

    def explain(self, body):
        argv = [sys.executable, "-m", "pdrelay_proxy.cli", "instances", "--router", self.url, "explain", "-"]
        done = subprocess.run(
            argv, input=json.dumps(body), env=self._environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def wait(self, says, *lines, seconds):
        """Wait until what ``says()`` returns has all lines."""

        def has_all():
            assert self._process.poll() is None, self.output()
            text = says()
            return all(line in text for line in lines)

        wait_until(has_all, seconds=seconds, what=lines)


# Its engines are no forks of the nursery: a minute and more on two busy cores. The parts have tests of their own.
@pytest.mark.thorough
def test_up_with_kv_events_knows_what_its_engines_have_cached(model, tmp_path):
    """With one flag: the router follows both engines and says how much of a prompt each has, and vLLM agrees."""
    body = {"model": "tiny", "prompt": [20 + n * n % 470 for n in range(100)], "max_tokens": 4, "temperature": 0}
    following = [f'_connections{{instance="{name}-0",state="following"}} 1' for name in ("prefill", "decode")]
    with Up(model, tmp_path) as up:
        up.wait(up.output, "Ctrl-C stops everything", seconds=300)
        up.wait(
            up.metrics, *following, seconds=60
        )  # the router asks an engine that was not there every 37.5 s at least
        before = up.explain(body)
        answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60)
        known = ["cached:   96 tokens at prefill-0", "cached:   96 tokens at decode-0"]
        up.wait(lambda: up.explain(body), *known, seconds=20)
        hits = [httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) for port in up.ports[1:3]]

    assert "cached:   0 tokens at prefill-0" in before
    assert answer.status_code == 200, answer.text
    assert [hit.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for hit in hits] == [96, 96]


def listening(pid):
    """Return the addresses at which a process and its descendants listen for TCP."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                found |= {tuple(each.laddr) for each in process.net_connections("tcp") if each.status == "LISTEN"}
    return found
