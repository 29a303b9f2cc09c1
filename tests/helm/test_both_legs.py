"""What `helm test` runs, with the flags of its pod, against a real router and pretended engines."""

import contextlib
import importlib.util
import subprocess
import sys
from dataclasses import replace

import pytest
from starlette.responses import PlainTextResponse

from pdrelay_proxy.app import build
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import Sim
from support.certificates import Authority
from support.helm_chart import CHART, Chart, default
from support.helm_objects import COMPONENT, container, kind
from support.sim import serving

pytestmark = pytest.mark.processes


LOADED = "vllm:pdrelay_loads_total"
FAILED = "vllm:pdrelay_loads_failed_handshake_total"


class Decode(Sim):
    """Counts, as the connector does, what came to it; ``counts`` is the name of what it counts.

    ``cold``: so many requests get no KV.
    """

    def __init__(self):
        super().__init__("decode")
        self.counts = LOADED
        self.cold = 0

    @property
    def came(self):
        return sum('"kv_transfer_params"' in entry.body for entry in self.log)

    async def __call__(self, scope, receive, send):
        if scope["path"] != "/metrics":
            return await super().__call__(scope, receive, send)
        counts = self.counts if self.came > self.cold else FAILED
        found = {LOADED: 0, FAILED: 0} | {counts: self.came} if self.counts else {}
        text = "".join(f'{name}{{model_name="sim",engine="0"}} {value:.1f}\n' for name, value in found.items())
        return await PlainTextResponse("# HELP x y\n" + text)(scope, receive, send)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("both_legs", CHART / "files" / "both_legs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engines():
    """One engine of each role: their addresses, and the decode engine itself."""
    engine = Decode()
    with serving(Sim("prefill")) as prefill, serving(engine) as decode:
        yield prefill, decode, engine


@pytest.fixture(scope="module")
def release(engines):
    """A router in front of them, which asks for nothing."""
    with routed(engines) as found:
        yield found


@contextlib.contextmanager
def routed(engines, settings=None, *, prefill=True, **tls):
    settings = replace(
        settings or Settings(), prefill=engines[:1] if prefill else (), decode=engines[1:2], health_check_interval_s=0.0
    )
    with serving(build(settings).app, **tls) as router:
        yield router, engines[1]


def pod(values=None):
    """Return the test's pod of a chart."""
    objects = Chart().objects(values) if values else default()
    (found,) = [o for o in kind(objects, "Pod") if o["metadata"]["labels"][COMPONENT] == "test"]
    return container(found)


@pytest.fixture
def tested(script, capsys):
    """Run it with the flags of the chart's pod, these addresses, and no time to wait: exit code, and what it said."""

    def run(addresses, values=None, *, scheme="http", **files):
        names = {"router": f"{scheme}://{addresses[0]}", "decode": addresses[1], "model": "sim", "seconds": 0} | files
        given = [arg.removeprefix("--").partition("=") for arg in pod(values)["args"][1:]]
        flags = [f"--{flag}{sign}{names.get(flag.replace('-', '_'), value)}" for flag, sign, value in given]
        code = script.main([*flags, "--settle=0.2"])
        out, err = capsys.readouterr()
        assert (err, out.count("\n")) == ("", 1)
        return code, out.removeprefix("pdrelay test: ").strip()

    return run


def test_both_legs_and_their_kv_are_shown(release):
    """By the pod's own command, in words that name the engines."""
    c = pod()
    own = [f"--router=http://{release[0]}", f"--decode={release[1]}", "--model=sim"]
    argv = [sys.executable, *c["command"][1:], *c["args"], *own]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("pdrelay test: a request went through prefill-0 (")
    assert " ms) and decode-0 (" in done.stdout
    assert done.stdout.endswith(" ms), and its KV from one to the other\n")


def test_an_answer_of_a_decode_engine_alone_is_not_enough(engines, tested):
    """It is right, with status 200: nobody would notice that the prefill engines do nothing."""
    with routed(engines, Settings(min_split_new_bytes=1_000_000)) as addresses:
        code, said = tested(addresses)

    assert code == 1
    assert said == "no prefill engine took part: decode-0 served the request alone (short_prompt)"


def test_an_engine_of_each_role_is_waited_for(engines, tested):
    """A router is ready before its engines are: what it lacks is in its /health."""
    with routed(engines, prefill=False) as addresses:
        code, said = tested(addresses)

    assert code == 1
    assert said.endswith("has no engine of each role yet: the router knows no prefill instance")


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        (FAILED, f"{FAILED} rose"),
        ("vllm:pdrelay_something_else_total", f"{LOADED} stands still, and so does every reason"),
        ("", "the decode engines have no pdrelay connector, or none that counts"),
    ],
)
def test_two_legs_without_kv_are_not_enough(release, engines, tested, counts, reason):
    """The decode engine has computed the prompt itself."""
    engines[2].counts = counts
    try:
        code, said = tested(release)
    finally:
        engines[2].counts = LOADED

    assert code == 1
    assert said.startswith("the request went through prefill-0 (")
    assert said.endswith(f"but its KV did not: {reason}")


def test_engines_that_are_elsewhere_are_not_asked(release, tested):
    """Their address is the router's alone; what is not known is said."""
    code, said = tested(release, {"decode": {"enabled": False}})

    assert code == 0
    assert said.endswith("whether its KV did is not known: the decode engines are elsewhere")


def test_who_is_not_there_is_named(release, tested):
    """A router that does not answer, one without engines, and engines behind a closed door."""
    closed = tested((release[0], "127.0.0.1:1"))
    nobody = tested(("127.0.0.1:1", release[1]))
    with serving(build(Settings(health_check_interval_s=0.0)).app) as empty:
        unready = tested((empty, release[1]))

    assert closed[0] == unready[0] == nobody[0] == 1
    assert closed[1].startswith("no metrics of a decode engine can be read at 127.0.0.1:1")
    assert unready[1].endswith("has no engine of each role yet: the router knows no prefill instance")
    assert nobody[1].startswith("the router at http://127.0.0.1:1 gives no answer to /health: ")


def test_engines_that_start_are_waited_for(release, engines, tested):
    """Models load for minutes, and the test may be run at once: here the first try gets no KV, the second does."""
    engine = engines[2]
    seen = len(engines[2].log)
    engine.cold = engine.came + 1
    code, said = tested(release, seconds=10)
    engine.cold = 0

    assert (code, said.endswith("and its KV from one to the other")) == (0, True)
    assert len(engine.log) == seen + 2


KEY = "sesame-open-the-door-please"


def test_it_shows_a_key_of_the_clients(engines, tested, monkeypatch, tmp_path):
    """The first that is written out, or the one it is given; of a digest no key can be made."""
    (digests := tmp_path / "digests").write_text("# ours\nold:sha256:" + "0" * 64 + "\n")
    (keys := tmp_path / "keys").write_text(digests.read_text() + f"checks:{KEY}\n")
    values = {"router": {"apiKeys": {"secretName": "clients"}}}
    own = values | {"tests": {"apiKey": {"secretName": "check", "key": "k"}}}
    with routed(engines, Settings(api_keys_file=str(keys))) as addresses:
        first = tested(addresses, values, keys=keys)
        none = tested(addresses, values, keys=digests)
        monkeypatch.setenv("PDRELAY_TEST_KEY", KEY)
        given = tested(addresses, own)
        monkeypatch.setenv("PDRELAY_TEST_KEY", KEY + "x")
        wrong = tested(addresses, own)

    assert (first[0], given[0]) == (0, 0)
    assert (
        none[1] == "router.apiKeys has digests only, of which no key can be made: name one in tests.apiKey.secretName"
    )
    assert none[0] == wrong[0] == 1
    assert wrong[1].startswith("the request was answered with status 401: ")
    assert pod(own)["env"][0]["valueFrom"] == {"secretKeyRef": {"name": "check", "key": "k"}}


def test_it_trusts_the_routers_own_certificate_and_no_other(engines, tested, tmp_path):
    """The name in it is for the public and says nothing; and a router may want a certificate, too."""
    authority = Authority(tmp_path, "authority")
    ours, other = authority.sign("ours"), authority.sign("other")
    asks = {"ssl_certfile": ours.cert, "ssl_keyfile": ours.key, "ssl_ca_certs": authority.own.cert, "ssl_cert_reqs": 2}
    values = {"router": {"tls": {"secretName": "tls", "clientCaSecretName": "ca"}}}
    showing = values | {"tests": {"clientCertSecretName": "c"}}
    shown = {"scheme": "https", "cert": other.cert, "cert_key": other.key}
    with routed(engines, **asks) as addresses:
        good = tested(addresses, showing, pin=ours.cert, **shown)
        bad = tested(addresses, showing, pin=other.cert, **shown)
        silent = tested(addresses, values, pin=ours.cert, scheme="https")

    assert good[0] == 0
    assert bad[0] == silent[0] == 1
    assert "certificate verify failed" in bad[1]
    assert silent[1].endswith("name a certificate to show in tests.clientCertSecretName")


def test_its_prompt_is_one_that_the_router_splits(engines, tested):
    """A prompt shorter than min_split_new_bytes goes to one engine alone, by the operator's own rule."""
    with routed(engines, Settings(min_split_new_bytes=3000)) as addresses:
        short = tested(addresses)
        long = tested(addresses, {"router": {"settings": {"min_split_new_bytes": 3000}}})

    assert (short[0], long[0]) == (1, 0)
    assert "(short_prompt)" in short[1]


def test_decode_engines_behind_https_are_asked_by_the_name_of_all(tested, tmp_path):
    """By their IPs, which no certificate has; a stranger's numbers count for nothing, and it says why."""
    authority = Authority(tmp_path, "authority")
    decode = Decode()
    ours, client = authority.sign("ours", "DNS:r-pdrelay-engines.ns.svc"), authority.sign("client")
    asks = {"ssl_certfile": ours.cert, "ssl_keyfile": ours.key, "ssl_ca_certs": authority.own.cert, "ssl_cert_reqs": 2}
    values = {"engineTls": {"secretName": "e", "clientSecretName": "c", "requireClientCertificates": True}}
    shown = {"engine_cert": client.cert, "engine_cert_key": client.key}
    trust = {"engine_ca": authority.own.cert, "engine_cert": client.cert, "engine_key": client.key}
    settings = Settings(engine_server_name="r-pdrelay-engines.ns.svc", **trust, health_check_interval_s=0.0)
    with serving(Sim("prefill")) as prefill, serving(decode, **asks) as at:
        known = replace(settings, prefill=(prefill,), decode=(f"https://{at}",))
        with serving(build(known).app) as router:
            good = tested((router, at), values, engine_ca=authority.own.cert, **shown)
            bad = tested((router, at), values, engine_ca=client.cert, **shown)

    assert good[0] == 0
    assert good[1].endswith("and its KV from one to the other")
    assert bad == (1, "a decode engine is not reached over TLS (engineTls): CERTIFICATE_VERIFY_FAILED")
