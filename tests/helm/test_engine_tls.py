"""Engines that serve https: the chart's router, probes, hooks and test against engines with the chart's own flags."""

import asyncio
import os
import select
import shutil
import ssl
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.cli import build_parser
from pdrelay_proxy.options import serve_settings
from pdrelay_tools.simulated.rules import expected_text
from support.certificates import Authority
from support.helm_chart import CHART, HELMS, Chart, Refused
from support.helm_checks import complaints
from support.helm_objects import container, engine_pods, env, flag, kind, pods, router, templates
from support.kube_api import KubeApi
from support.service_account import ServiceAccount
from support.sim import serving, sims

pytestmark = pytest.mark.processes


SECRET = "r-engines"  # with tls.crt, tls.key and ca.crt, as cert-manager fills it
NAME = "r-pdrelay-engines.ns.svc"
PLAIN = {"engineTls": {"secretName": SECRET}}
MUTUAL = {"engineTls": {**PLAIN["engineTls"], "clientSecretName": "r-client", "requireClientCertificates": True}}
BODY = {"model": "sim", "prompt": "once upon a time", "max_tokens": 3}
READY = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}


class Mounted:
    """The secrets of a release as files; arguments of pods lead there."""

    def __init__(self, folder, name=NAME, authority=None):
        self.folder, self.authority = folder, Authority(folder, "ca")
        signer = authority or self.authority
        self._secret("engine-tls", signer.sign("engine", f"DNS:{name}"))
        self._secret("engine-client", self.authority.sign("client", "DNS:router"))
        self._secret("engine-ca", None)

    def _secret(self, folder, pair):
        (at := self.folder / folder).mkdir()
        shutil.copy(self.authority.own.cert, at / "ca.crt")
        if pair is not None:
            shutil.copy(pair.cert, at / "tls.crt")
            shutil.copy(pair.key, at / "tls.key")

    def of(self, words):
        """Return a container's words with the files of this machine in them."""
        return [
            word.replace("/etc/pdrelay/", f"{self.folder}/").replace("/opt/pdrelay/", f"{CHART}/files/")
            for word in words
        ]


@pytest.fixture
def mounted(tmp_path):
    return Mounted(tmp_path)


@contextmanager
def serving_as_told(engine, mounted, args):
    """Serve as vLLM does with the flags of the chart's pod; yields the port."""
    args = mounted.of(args)
    asks = {"ssl_ca_certs": flag(args, "--ssl-ca-certs"), "ssl_cert_reqs": int(flag(args, "--ssl-cert-reqs") or 0)}
    shown = {"ssl_certfile": flag(args, "--ssl-certfile"), "ssl_keyfile": flag(args, "--ssl-keyfile")}
    with serving(engine, **shown, **asks) as at:
        yield int(at.rpartition(":")[2])


def command(values, port, part):
    """Return what the kubelet runs in a decode engine's pod: its preStop hook, or one of its probes."""
    objects = Chart().objects(values | {"decode": {"port": port, "drain": {"settleSeconds": 0}}})
    (own,) = [container(template) for role, template in engine_pods(objects) if role == "decode"]
    return (own["lifecycle"]["preStop"] if part == "preStop" else own[part])["exec"]["command"]


def ran(mounted, words, *more):
    """Run it; return its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, *mounted.of(words)[1:], *more], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("helm", HELMS)
def test_one_secret_has_engines_serve_https_and_all_others_know_it(helm):
    """Router, probes, hook, PodMonitor and helm test look for one name; the check of all files of ci/ says so."""
    objects = Chart().objects(PLAIN | {"monitoring": {"podMonitor": {"enabled": True}}}, helm=helm)
    args = container(templates(router(objects))[0])["args"]
    (monitor,) = kind(objects, "PodMonitor")

    assert complaints(objects) == []
    assert flag(args, "--engine-server-name") == NAME
    assert flag(args, "--engine-ca") == "/etc/pdrelay/engine-ca/ca.crt"
    assert monitor["spec"]["podMetricsEndpoints"][0]["tlsConfig"] == {
        "serverName": NAME,
        "ca": {"secret": {"name": SECRET, "key": "ca.crt"}},
    }
    for _, template in engine_pods(objects):
        own = container(template)
        assert own["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTPS"}
        assert "--enable-ssl-refresh" in own["args"]


def test_engines_serve_http_unless_a_secret_is_named():
    """Nothing of it is in the pods then, nor in the router's arguments."""
    objects = Chart().objects()
    told = [container(templates(router(objects))[0])["args"]]
    for _, template in engine_pods(objects):
        own = container(template)
        told += [
            own["args"],
            own["lifecycle"]["preStop"]["exec"]["command"],
            [mount["name"] for mount in own["volumeMounts"]],
        ]
        assert "pdrelay/scheme" not in template["metadata"]["annotations"]
        assert own["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}

    assert [word for words in told for word in words if "ssl" in word or "tls" in word or "engine" in word] == []
    assert [list(o["data"]) for o in kind(objects, "ConfigMap") if o["metadata"]["name"] == "r-pdrelay-scripts"] == [
        ["drain.py"]
    ]


def test_engines_outside_of_the_release_may_have_authorities_of_their_own():
    """The release's own ones, if there are any, serve http."""
    values = {
        "engineTls": {"caSecretName": "corp-ca", "serverName": "engines.corp.example", "clientSecretName": "me"},
        "router": {"discovery": {"prefill": ["https://p.corp.example:8100"], "decode": ["https://10.1.2.3:8100"]}},
    }
    objects = Chart().objects(values)
    template = templates(router(objects))[0]
    args = container(template)["args"]
    volumes = {one["name"]: one for one in template["spec"]["volumes"]}

    assert complaints(objects) == []
    assert flag(args, "--engine-server-name") == "engines.corp.example"
    assert volumes["engine-ca"]["secret"] == {"secretName": "corp-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    assert volumes["engine-client"]["secret"]["secretName"] == "me"
    assert all("--ssl-certfile" not in container(one)["args"] for _, one in engine_pods(objects))


@pytest.mark.parametrize("values", [PLAIN, MUTUAL], ids=["plain", "mutual"])
async def test_a_router_of_the_chart_serves_with_https_engines_of_the_chart(tmp_path, monkeypatch, mounted, values):
    """Found by their pods' IPs, which no certificate has: a request goes over both, and probes find them well."""
    (folder := tmp_path / "account").mkdir()
    account = ServiceAccount(folder)
    engines = sims()
    flags = {role: container(one)["args"] for role, one in engine_pods(Chart().objects(values))}
    with (
        serving_as_told(engines["p0"], mounted, flags["prefill"]) as prefill,
        serving_as_told(engines["d0"], mounted, flags["decode"]) as decode,
    ):
        ports = {"prefill": {"port": prefill}, "decode": {"port": decode}}
        alone = {"router": {"replicas": 1, "store": {"type": "memory"}}}
        objects = Chart().objects(values | ports | alone)
        async with KubeApi(token="first", tls=account.tls) as api:
            for variable, value in account.env(api).items():
                monkeypatch.setenv(variable, value)
            for number, (_, meta, spec) in enumerate(pods(objects)):
                api.put("pods", f"pod-{number}", {"metadata": dict(meta), "spec": spec, "status": READY}, "ns")
            args = mounted.of(container(templates(router(objects))[0])["args"])
            built = build(serve_settings(build_parser(args).parse_args(args)))
            transport = httpx.ASGITransport(built.app, raise_app_exceptions=False)
            admin = httpx.AsyncClient(transport=httpx.ASGITransport(built.admin_app), base_url="http://router")
            async with (
                built.app.router.lifespan_context(built.app),
                admin,
                httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
            ):
                async with asyncio.timeout(30):
                    while (await admin.get("/metrics")).text.count('state="healthy"} 1') < 2:
                        await asyncio.sleep(0.02)
                answer = await client.post("/v1/completions", json=BODY, timeout=30)

    assert answer.json()["choices"][0]["text"] == expected_text(BODY)
    assert [[one.path for one in engine.log] for engine in engines.values()] == [["/v1/completions"]] * 2


@pytest.mark.parametrize("values", [PLAIN, MUTUAL], ids=["plain", "mutual"])
def test_the_drain_hook_asks_by_the_name(tmp_path, mounted, monkeypatch, values):
    """One that got no answer would wait for all its time, and cut nothing short; it believes no stranger."""
    monkeypatch.setenv("PDRELAY_DRAIN_LOG", "/dev/stdout")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "stranger").mkdir()
    stranger = Mounted(tmp_path / "stranger", authority=Authority(tmp_path / "theirs", "other"))
    args = [container(one)["args"] for _, one in engine_pods(Chart().objects(values))][1]
    with serving_as_told(sims()["d0"], mounted, args) as port:
        words = command(values, port, "preStop")
        good = ran(mounted, words, "--seconds=20")
    with serving_as_told(sims()["d0"], stranger, args) as port:
        bad = ran(mounted, command(values, port, "preStop"), "--seconds=2")

    assert "pdrelay drain: drained after" in good[1]
    assert bad[1] == "pdrelay drain: not drained in 2 s: an answer to /metrics\n"


def test_probes_show_the_engines_own_certificate_where_engines_want_one(mounted, tmp_path):
    """The kubelet's own have none. A certificate that is no good is no reason for a restart, which brings no other."""
    args = [container(one)["args"] for _, one in engine_pods(Chart().objects(MUTUAL))][1]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "stranger").mkdir()
    stranger = Mounted(tmp_path / "stranger", authority=Authority(tmp_path / "theirs", "other"))
    probes = {part: command(MUTUAL, 1, part) for part in ("startupProbe", "readinessProbe", "livenessProbe")}

    def all_of(at):
        at = {
            part: ran(mounted, [w.replace("--port=1", f"--port={at}") for w in words]) for part, words in probes.items()
        }
        return [code for code, _ in at.values()], at["readinessProbe"][1]

    with serving_as_told(sims()["d0"], mounted, args) as port:
        well = all_of(port)
    with serving_as_told(sims()["d0"], stranger, args) as port:
        strange = all_of(port)
    gone = all_of(port)

    assert well == ([0, 0, 0], "")
    assert strange[0] == [0, 1, 0]
    assert "certificate verify failed" in strange[1]
    assert gone[0] == [1, 1, 1]
    assert "no answer to /health" in gone[1]


# What vLLM's --enable-ssl-refresh does with a file (vllm/entrypoints/launchers/utils/ssl.py).
WATCHING = """
import asyncio, sys
from watchfiles import awatch
async def main():
    async for _ in awatch(sys.argv[1]):
        print("seen", flush=True)
asyncio.run(main())
"""


def test_engines_see_each_certificate_that_replaces_another(tmp_path):
    """The kubelet replaces files by a link's new target, and a watch on the file ends with the first: it must poll."""
    template = engine_pods(Chart().objects(PLAIN))[1][1]
    told = {name: one["value"] for name, one in env(template).items() if name.startswith("WATCHFILES_")}

    def mount(number):
        """Do as the kubelet does."""
        (folder := tmp_path / f"..{number}").mkdir()
        (folder / "tls.crt").write_text("x" * number)
        (new := tmp_path / "..new").symlink_to(folder.name)
        new.rename(tmp_path / "..data")
        shutil.rmtree(tmp_path / f"..{number - 1}", ignore_errors=True)

    mount(1)
    (path := tmp_path / "tls.crt").symlink_to("..data/tls.crt")
    argv = [sys.executable, "-c", WATCHING, str(path)]
    environment = os.environ | told | {"WATCHFILES_POLL_DELAY_MS": "50"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as watcher:
        try:
            seen, number = 0, 1
            while seen < 3:  # the first ones may come before it watches
                number += 1
                assert number < 60, f"it has seen {seen} of them"
                mount(number)
                if select.select([watcher.stdout], [], [], 0.5)[0]:
                    assert watcher.stdout.readline() == "seen\n"
                    seen += 1
        finally:
            watcher.kill()


@pytest.mark.parametrize("helm", HELMS)
def test_ciphers_are_the_operators(helm):
    """The only flag of TLS that nobody else has to know."""
    values = PLAIN | {"decode": {"extraArgs": ["--ssl-ciphers", "ECDHE+AESGCM"]}}

    assert complaints(Chart().objects(values, helm=helm)) == []
    with pytest.raises(Refused, match=r"write engineTls\.secretName"):
        Chart().objects(PLAIN | {"decode": {"extraArgs": ["--ssl-cert-reqs", "0"]}}, helm=helm)


@pytest.mark.parametrize("name", ["*.llm.svc", "10.0.0.1", "https://e", "e:8100", "-e", "a..b", "e."])
def test_only_a_dns_name_can_be_looked_for(name):
    """The router would refuse to start."""
    with pytest.raises(Refused, match="serverName"):
        Chart().objects({"engineTls": {"secretName": SECRET, "serverName": name}})


def test_the_trust_of_scripts_is_never_without_a_name():
    """Python looks for no name where none is said, if it is told so: the scripts never tell it."""
    for script in ("drain.py", "health.py", "both_legs.py"):
        text = (CHART / "files" / script).read_text()
        assert "CERT_NONE" not in text
        assert text.count("check_hostname = False") == (1 if script == "both_legs.py" else 0)  # the router's pinned one
    assert ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).check_hostname
