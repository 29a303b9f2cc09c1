"""The router's liveness probe without an admin port, as the kubelet runs it, against routers that are full or stuck."""

import os
import signal
import ssl
import subprocess
from contextlib import ExitStack, contextmanager

import pytest

from support.certificates import Authority
from support.helm_chart import Chart
from support.helm_objects import container, router, templates
from support.raw_http import RawClient
from support.router_process import RouterProcess

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
]  # each test starts a router, has helm write the chart, and waits for a probe
LIMIT = 16
VALUES = {
    "plain": {},
    "keys": {"apiKeys": {"secretName": "k"}},
    "tls": {"tls": {"secretName": "t"}},
    "client certificates": {"tls": {"secretName": "t", "clientCaSecretName": "c"}},
}


@contextmanager
def running(folder, kind):
    """Run a router of this kind, and yield it with its port and what its clients need for TLS."""
    tls = None
    flags = ["--prefill", "127.0.0.1:9", "--decode", "127.0.0.1:9", "--max-connections", str(LIMIT)]
    if kind == "keys":
        (folder / "keys").write_text("me:open-sesame-0001\n")
        flags += ["--api-keys-file", str(folder / "keys")]
    if "tls" in VALUES[kind]:
        authority = Authority(folder, "ca")
        pair = authority.sign("router")
        flags += ["--tls-cert", pair.cert, "--tls-key", pair.key]
        tls = ssl.create_default_context(cafile=authority.own.cert)
        tls.load_cert_chain(pair.cert, pair.key)
        if kind == "client certificates":
            flags += ["--tls-client-ca", authority.own.cert]
    process = RouterProcess(folder / "router.log", *flags)
    try:
        yield process, int(process.started().url.rpartition(":")[2]), tls
    finally:
        process.child.send_signal(signal.SIGCONT)
        process.kill()


def probed(kind, port, *, within_s=30):
    """Run what the chart has the kubelet run; return whether the router is alive."""
    values = {"router": {**VALUES[kind], "port": port, "adminPort": 0, "probes": {"timeoutSeconds": within_s}}}
    probe = container(templates(router(Chart().objects(values)))[0])["livenessProbe"]
    return subprocess.run(probe["exec"]["command"], capture_output=True, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("kind", VALUES)
def test_a_router_is_alive_unless_it_gives_no_answer(tmp_path, kind):
    """A restart of a router that stands still helps; when nothing listens there is nothing else to do."""
    with running(tmp_path, kind) as (process, port, _):
        assert probed(kind, port)
        os.kill(process.child.pid, signal.SIGSTOP)
        assert not probed(kind, port, within_s=2)
    assert not probed(kind, port)


@pytest.mark.parametrize("more", [1, 40], ids=["a few too many", "far too many"])
@pytest.mark.parametrize("kind", VALUES)
def test_a_router_with_all_the_connections_that_it_may_have_is_alive(tmp_path, kind, more):
    """It says so with 503, or closes those that are far too many: a restart would end everybody's requests."""
    with running(tmp_path, kind) as (_, port, tls), ExitStack() as stack:
        for _ in range(LIMIT + more):
            stack.enter_context(RawClient(port, tls=tls))

        assert probed(kind, port)
