"""A router whose log goes nowhere serves as every other one."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from support.cluster import free_ports
from support.router_process import KEY
from support.sim import fleet, until

pytestmark = pytest.mark.processes


PROMPT = {"prompt": "hello " * 30, "max_tokens": 2}
LONG_ID = "x" * 128  # the client's own id, which its line repeats
ENOUGH = 300  # requests whose lines are more than the 64 KiB of a pipe


@contextmanager
def ended(kind, folder):
    """Yield a descriptor for standard error; None: there is none."""
    if kind == "closed":
        yield None
        return
    if kind == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
        reading = None
    else:
        reading, descriptor = os.pipe()
        if kind == "reader gone":
            os.close(reading)
            reading = None
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        if reading is not None:
            os.close(reading)


@pytest.mark.parametrize("kind", ["nobody reads", "reader gone", "full disk", "closed"])
@pytest.mark.slow  # megabytes of log lines for each case
def test_a_log_that_goes_nowhere_stops_nobody(tmp_path, kind):
    """Requests, operators' actions and the end go on; lines that are lost are counted."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with fleet() as (_, _, flags), ended(kind, tmp_path) as error:
        argv = [sys.executable, "-m", "pdrelay_proxy.cli", "serve", "--port", str(port), *flags]
        if error is None:
            argv = ["sh", "-c", 'exec "$@" 2>&-', "sh", *argv]
        environment = {**os.environ, "ADMIN_API_KEY": KEY["X-Api-Key"]}
        with subprocess.Popen(argv, stderr=error, stdout=subprocess.DEVNULL, env=environment) as router:
            try:
                until(lambda: serves(url) or router.poll() is not None, seconds=60)
                with httpx.Client(base_url=url, headers={"X-Request-Id": LONG_ID}, timeout=30) as client:
                    for _ in range(ENOUGH):
                        assert client.post("/v1/completions", json=PROMPT).status_code == 200
                    assert client.post("/instances/drain", headers=KEY, json={"instance": "p9"}).status_code == 404
                    if kind == "nobody reads":
                        assert dropped(client) < ENOUGH
                    else:
                        until(lambda: dropped(client) >= ENOUGH)  # the thread that writes counts them
                router.send_signal(signal.SIGTERM)
                assert router.wait(30) == 0
            finally:
                router.kill()


def dropped(client):
    metrics = client.get("/metrics").text
    return float(metrics.partition("\npdrelay_log_lines_dropped_total ")[2].partition("\n")[0])


def serves(url):
    try:
        return httpx.get(f"{url}/health", timeout=20).status_code == 200
    except httpx.TransportError:
        return False
