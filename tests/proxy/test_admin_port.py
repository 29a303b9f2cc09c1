"""The admin port, by its clients: what is at which port, what guards it, and what a flood of the other does to it."""

import re
import socket
import ssl
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from support.certificates import Authority
from support.raw_http import Over, RawClient
from support.router_process import KEY, RouterProcess
from support.sim import fleet, until

pytestmark = pytest.mark.processes


PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 3}
BOTH = {"/health", "/ready"}
MAIN = {"/v1/models"}
ADMIN = {"/live", "/", "/stats", "/metrics", "/status", "/instances", "/docs", "/openapi.json"}


class TwoPorts(RouterProcess):
    """A router with an admin port."""

    def __init__(self, log, *args):
        super().__init__(log, "--admin-port", "0", *args)

    @property
    def admin(self):
        (found,) = re.findall(r"the admin port is (https?://\S+)", self.said)
        return found

    @property
    def ports(self):
        """Of both, the main one first."""
        return [int(url.rpartition(":")[2]) for url in (self.url, self.admin)]


@contextmanager
def two_ports(folder, *args, engines=True, **options):
    """Run one in front of simulated engines; yields it and them."""
    with ExitStack() as stack:
        sims, _, flags = stack.enter_context(fleet(**options))
        router = TwoPorts(folder / "router.log", *(flags if engines else ()), *args)
        stack.callback(router.kill)
        router.started()
        until(lambda: "the admin port is" in router.said)
        yield router, sims
        assert "Traceback" not in router.said, router.said


def status(url, path, **options):
    return httpx.get(url + path, timeout=20, **options).status_code


def test_each_path_is_at_its_port_and_nowhere_else(tmp_path):
    """A NetworkPolicy and a load balancer know ports, and no paths."""
    with two_ports(tmp_path) as (router, engines):
        until(lambda: status(router.url, "/health") == 200)
        found = {
            path: (status(router.url, path), status(router.admin, path, headers=KEY)) for path in BOTH | MAIN | ADMIN
        }
        posts = [httpx.post(url + PATH, json=BODY, timeout=20).status_code for url in (router.url, router.admin)]
        orders = [
            httpx.post(f"{url}/instances/{verb}", json={"id": "decode-0"}, headers=KEY, timeout=20).status_code
            for url in (router.url, router.admin)
            for verb in ("drain", "undrain")
        ]
        served = len(engines["d0"].log)

    assert {path for path, ports in found.items() if ports == (200, 200)} == BOTH
    assert {path for path, ports in found.items() if ports == (200, 404)} == MAIN
    assert {path for path, ports in found.items() if ports == (404, 200)} == ADMIN
    assert (posts, served) == ([200, 404], 1)
    assert orders == [404, 404, 200, 200]


def test_engines_join_and_leave_by_the_join_key_and_touch_no_other(tmp_path):
    """Through a store; a header does not make a caller another host."""
    (tmp_path / "join").write_text("join-me-of-16-chars\n")
    join = {"X-Api-Key": "join-me-of-16-chars"}
    flags = ["--join-key-file", str(tmp_path / "join"), "--store", f"file:{tmp_path}/store", "--decode", "192.0.2.1:80"]
    with two_ports(tmp_path, *flags, engines=False) as (router, _), fleet() as (_, at, _):

        def order(verb, body, **headers):
            url = f"{router.admin}/instances/{verb}"
            return httpx.post(url, json=body, headers={**join, **headers}, timeout=20).status_code

        def addresses():
            rows = httpx.get(f"{router.admin}/instances", headers=join, timeout=20).json()["instances"]
            return {row["address"] for row in rows}

        engines = [{"type": "prefill", "instance": at["p0"]}, {"type": "decode", "instance": at["d0"]}]
        added = [order("add", engine) for engine in engines]
        until(lambda: [addresses() for _ in range(8)] == [{at["p0"], at["d0"]}] * 8)
        others = [{"type": "decode", "instance": "192.0.2.1:80"}, {"id": "decode-0"}]
        refused = [order(verb, other) for verb in ("drain", "remove", "undrain") for other in others]
        forged = [order("remove", other, **{"X-Forwarded-For": "192.0.2.1"}) for other in (*others, *engines)]
        left = [order(verb, engine) for engine in engines for verb in ("drain", "remove")]
        until(lambda: [addresses() for _ in range(8)] == [set()] * 8)
        known = httpx.get(f"{router.admin}/instances", headers=KEY, timeout=20).json()["instances"]

    assert (added, left) == ([200] * 2, [200] * 4)
    assert (set(refused), set(forged)) == ({403}, {403})
    assert [(row["address"], row["state"] in ("draining", "drained")) for row in known] == [("192.0.2.1:80", False)]


def test_without_an_admin_port_the_main_one_has_everything(tmp_path):
    """As before: one port for a laptop, or behind a proxy of one's own."""
    with fleet() as (_, _, flags):
        router = RouterProcess(tmp_path / "router.log", *flags)
        try:
            router.started()
            until(lambda: status(router.url, "/health") == 200)
            found = {path: status(router.url, path, headers=KEY) for path in BOTH | MAIN | ADMIN}
        finally:
            router.kill()

    assert set(found.values()) == {200}


HOSTILE = {
    "a head without an end": (b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000, 431),
    "a target without an end": (b"GET /" + b"a" * 70_000, 414),
    "two lengths": (
        b"POST /instances/drain HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        400,
    ),
    "no host": (b"GET /live HTTP/1.1\r\n\r\n", 400),
    "a tunnel": (b"CONNECT x:1 HTTP/1.1\r\nHost: x:1\r\n\r\n", 501),
    "half a head": (b"GET /live HTTP/1.1\r\nHost: x\r\n", 408),
    "half a body": (
        b"POST /instances/drain HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: sesame\r\n"
        b"Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{",
        408,
    ),
}


def _told(port, sent):
    """Return the status of an answer; a router that had no core for a second may close without one: then again."""
    for _ in range(5):
        with RawClient(port) as client, suppress(Over):
            return client.send(sent).answer().status
    return None


def test_what_guards_the_main_port_guards_the_admin_port(tmp_path):
    """Heads, framing, and clients that do not get on."""
    with two_ports(tmp_path, "--receive-timeout", "1") as (router, _):
        found = {}
        for name, (sent, _) in HOSTILE.items():
            found[name] = _told(router.ports[1], sent)
        with RawClient(router.ports[1]) as silent:
            nothing = silent.rest()
        alive = status(router.admin, "/live")

    assert found == {name: wanted for name, (_, wanted) in HOSTILE.items()}
    assert (nothing, alive) == (b"", 200)


def test_a_flood_of_the_main_port_leaves_probes_their_answers(tmp_path):
    """A router that has all the clients it may have is alive and ready: a restart would end everybody's requests."""
    with two_ports(tmp_path, "--max-connections", "8", engines=False) as (router, _), ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(RawClient(router.ports[0]))
        with RawClient(router.ports[0]) as one_more:
            refused = one_more.rest()
        found = [status(router.admin, path) for path in ("/live", "/ready", "/metrics")]

    assert refused == b"" or b" 503 " in refused
    assert found == [200, 200, 200]


def test_one_address_cannot_have_all_connections_of_the_admin_port(tmp_path):
    """Those of the kubelet come from another one. More than 64 from one are refused."""
    with two_ports(tmp_path, engines=False) as (router, _), ExitStack() as stack:
        for _ in range(65):
            stack.enter_context(RawClient(router.ports[1]))
        with RawClient(router.ports[1]) as one_more:
            refused = one_more.send(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n").answer()
        with RawClient(router.ports[1], address="127.0.0.2") as kubelet:
            answer = kubelet.send(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n").answer()
        main = status(router.url, "/ready")

    assert refused.status == 503
    assert b"max_connections_per_address" in refused.body
    assert (answer.status, main) == (200, 200)


def test_probes_need_no_certificate_where_clients_do(tmp_path):
    """The kubelet has none to show. What shows addresses wants the operator's key there."""
    authority = Authority(tmp_path, "ca")
    pair = authority.sign("router")
    tls = ("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", authority.own.cert)
    trusting = ssl.create_default_context(cafile=authority.own.cert)
    with two_ports(tmp_path, *tls) as (router, _):
        with pytest.raises(httpx.HTTPError):
            httpx.get(router.url + "/ready", verify=trusting, timeout=20)
        until(lambda: status(router.admin, "/health", verify=trusting) == 200)
        open_paths = [status(router.admin, path, verify=trusting) for path in ("/live", "/ready", "/metrics", "/")]
        shown = [
            status(router.admin, "/status", verify=trusting, headers=headers)
            for headers in ({}, {"X-Api-Key": "x"}, KEY)
        ]

    assert open_paths == [200, 200, 200, 200]
    assert shown == [401, 401, 200]


def test_metrics_want_a_key_where_clients_need_one_and_probes_do_not(tmp_path):
    """The port changes nothing about keys."""
    keys = tmp_path / "keys"
    keys.write_text("me:secret-of-mine-01\n")
    with two_ports(tmp_path, "--api-keys-file", str(keys)) as (router, _):
        without = {path: status(router.admin, path) for path in sorted(ADMIN | BOTH)}
        key = {"Authorization": "Bearer secret-of-mine-01"}
        with_key = [status(router.admin, path, headers=key) for path in ("/", "/stats", "/metrics", "/status", "/docs")]

    assert without.pop("/health") in (200, 503)
    assert {path for path, code in without.items() if code == 200} == {"/live", "/ready"}
    assert set(without.values()) == {200, 401}
    assert set(with_key) == {200}


def test_readiness_ends_with_sigterm_while_requests_are_still_served(tmp_path):
    """At the admin port, too, until the process ends."""
    with two_ports(tmp_path, "--drain-grace", "60") as (router, _):
        until(lambda: status(router.url, "/health") == 200)
        router.terminate()
        until(lambda: status(router.admin, "/ready") == 503)
        late = httpx.post(router.url + PATH, json=BODY, timeout=20).status_code
        alive = status(router.admin, "/live")
        router.terminate()
        code = router.child.wait(timeout=20)

    assert (late, alive, code) == (200, 200, 0)


def test_the_document_of_the_admin_port_names_the_paths_of_both(tmp_path):
    """Those of the main port are marked, so that the page's commands do not name the wrong one."""
    with two_ports(tmp_path) as (router, _):
        found = httpx.get(router.admin + "/openapi.json", headers=KEY, timeout=20).json()["paths"]

    assert {path for path in found if "x-pdrelay-main-port" not in found[path]} >= BOTH | (
        ADMIN - {"/docs", "/openapi.json"}
    )
    assert {PATH, "/v1/models"} <= {path for path in found if found[path].get("x-pdrelay-main-port")}
    assert not {path for path in found if found[path].get("x-pdrelay-main-port")} & (ADMIN | BOTH)


def test_an_admin_port_that_is_taken_is_refused_in_a_sentence(tmp_path):
    """Before anything is served."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        router = RouterProcess(tmp_path / "router.log", "--admin-port", port)
        code = router.child.wait(timeout=60)

    assert code == 2, router.said
    assert f"cannot listen at 127.0.0.1 port {port}: Address already in use" in router.said
    assert "running on" not in router.said
