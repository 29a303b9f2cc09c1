"""``pdrelay instances``, against a router on a real socket."""

import io
import json
from functools import partial

import pytest
from starlette.responses import JSONResponse

from pdrelay_proxy.app import build
from pdrelay_proxy.cli import main
from pdrelay_proxy.settings import Settings
from support.certificates import Authority
from support.sim import cluster, serving, sims

pytestmark = pytest.mark.processes


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    with cluster(1, 2, Settings(admin_key="sesame", health_check_interval_s=0.0)) as found:
        yield found


@pytest.fixture
def instances(command):
    return partial(command, "instances")


def test_the_list_is_a_table(instances):
    """One line for each engine, in columns."""
    code, out, err = instances("list")
    head, *lines = out.splitlines()

    assert (code, err) == (0, "")
    assert head.split()[:5] == ["id", "role", "address", "rank", "state"]
    assert [line.split()[0] for line in lines] == ["prefill-0", "decode-0", "decode-1"]
    assert {line[head.index("state") :].split()[0] for line in lines} == {"starting"}


@pytest.mark.parametrize(
    "words",
    [["--router", "{}", "list", "--json"], ["--json", "list", "--router", "{}"], ["list", "--router={}", "--json"]],
)
def test_flags_may_stand_before_the_verb_and_behind_it(running, capsys, words):
    """People write them last."""
    code = main(["instances", *(word.format(running.router) for word in words)])

    assert code == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)["instances"]] == [
        "prefill-0",
        "decode-0",
        "decode-1",
    ]


def test_an_engine_can_be_added_drained_put_back_and_removed(instances):
    """Its whole life from a terminal."""
    with serving(sims()["d0"]) as address:
        assert instances("add", "decode", address) == (0, f"Added {address} to decode_instances.\n", "")
        code, out, _ = instances("drain", "decode-2", "--wait", "10")
        assert (code, out.splitlines()[1].split()[4]) == (0, "drained")
        assert instances("undrain", "decode-2")[1].splitlines()[1].split()[4] == "starting"
        assert instances("remove", "decode-1", "decode-2")[0] == 0
        assert "decode-2" not in instances("list")[1]


def test_an_engine_that_shares_no_request_is_added_with_a_warning(instances):
    """It answers, and computes every prompt itself: who adds it is told at once, and the list says it again."""
    engines = sims()
    for name, engine in engines.items():
        engine.loads.are_shown = True
        engine.loads.info["fingerprint"] = f"of-{name}"
    with serving(engines["p0"]) as prefill, serving(engines["d0"]) as decode:
        assert instances("add", "prefill", prefill) == (0, f"Added {prefill} to prefill_instances.\n", "")
        instances("remove", "prefill-0")  # of which nothing is known: it might fit
        code, out, err = instances("add", "decode", decode)

        why = "the connector's fingerprint is of-p0 there and of-d0 here"
        warning = f"warning: decode-2: no prefill engine shares a request with it: {why}\n"
        assert (code, out, err) == (0, f"Added {decode} to decode_instances.\n{warning}", "")
        assert instances("list")[1].endswith(warning)


def test_an_engine_may_be_named_by_its_address(instances):
    """What starts and stops engines knows where they are; ids are the router's own, and differ between routers."""
    with serving(sims()["d0"]) as address:
        instances("add", "decode", address)
        code, out, _ = instances("drain", address, "--wait", "10")
        assert (code, out.splitlines()[1].split()[:5]) == (0, ["decode-2", "decode", address, "-", "drained"])
        assert instances("undrain", address)[1].splitlines()[1].split()[4] == "starting"
        assert instances("remove", address)[0] == 0
        assert instances("remove", address)[::2] == (1, f"pdrelay instances: there is no instance at {address}\n")


def test_an_engine_turns_and_the_list_shows_it(instances):
    """Its role is what it serves; while it turns, the reason stands at the end of the line."""
    code, out, _ = instances("turn", "decode-0", "both")
    assert (code, out.splitlines()[1].split()[:2]) == (0, ["decode-0", "both"])
    address = out.splitlines()[1].split()[2]
    code, out, err = instances("turn", "--wait", "20", address, "decode-1", "prefill")
    assert (code, err) == (1, "pdrelay instances: decode-1 is the last decode engine that serves: turn another one to "
            "decode first, or use force\n")  # fmt: skip
    lines = instances("list")[1].splitlines()
    turning = next(line for line in lines if line.startswith("decode-0 "))
    assert "both, to prefill" in turning or " prefill " in turning
    code, out, _ = instances("turn", "--force", "--wait", "20", "decode-0", "decode-1", "prefill")
    assert (code, [line.split()[1] for line in out.splitlines()[1:]]) == (0, ["prefill", "prefill"])


def test_a_drain_that_takes_too_long_is_an_error(instances, running):
    """A script must not stop the engine then."""
    body = {"prompt": "x", "max_tokens": 4}
    running.engines["d0"]._token_s = 30.0
    with running.open("/v1/completions", body), running.open("/v1/completions", body):
        for _ in range(200):
            if running.engines["d0"].log:
                break
            instances("list")
        code, _, err = instances("drain", "decode-0", "--wait", "0.1")

    assert code == 1
    assert err == "pdrelay instances: after 0.1 s decode-0 is draining with 1 in flight\n"


def test_streams_that_cannot_move_are_refused_in_a_sentence(instances):
    """The script goes on without, or turns on what is missing."""
    code, _, err = instances("drain", "--move", "decode-0")

    assert code == 1
    assert "set resume_streams" in err
    assert "draining" not in instances("list")[1]


def test_explain_shows_the_engines_the_rule_and_the_bodies(instances, tmp_path):
    """What to look at first when an answer is odd."""
    file = tmp_path / "request.json"
    file.write_text('{"prompt": "hello", "max_tokens": 5}')
    code, out, _ = instances("explain", str(file))

    assert code == 0
    assert out.splitlines()[:3] == [
        "rule:     prefill first, then decode",
        "prefill:  prefill-0",
        "decode:   decode-0",
    ]
    assert '"min_tokens": 1' in out
    assert json.loads(instances("--json", "explain", str(file))[1])["decode"] == "decode-0"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["drain", "decode-9"], "there is no instance 'decode-9'"),
        (["add", "decode", "127.0.0.1:1"], "Instance validation failed: candidate cannot be reached"),
        (["explain", "/no/such/file"], "/no/such/file cannot be read: No such file or directory"),
        (["explain", "--path", "/metrics", "-"], "- is not JSON"),
    ],
)
def test_what_goes_wrong_is_one_sentence(instances, monkeypatch, arguments, said):
    """And the exit code is 1."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, out, err = instances(*arguments)

    assert (code, out) == (1, "")
    assert err.startswith(f"pdrelay instances: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("answer", [(500, {"error": "no"}), (200, []), (422, [1])])
def test_what_is_no_router_is_one_sentence_too(monkeypatch, capsys, answer):
    """A port may be somebody else's."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    status, body = answer
    with serving(JSONResponse(body, status)) as other:
        assert main(["instances", "--router", other, "list"]) == 1

    assert capsys.readouterr().err.count("\n") == 1


def test_without_the_key_nothing_is_asked(monkeypatch, capsys, tmp_path):
    """It comes from the environment alone: arguments are visible to everybody on the machine."""
    monkeypatch.chdir(tmp_path)  # without the key of an `pdrelay up`
    monkeypatch.delenv("ADMIN_API_KEY", raising=False)

    assert main(["instances", "list"]) == 2
    assert "set ADMIN_API_KEY" in capsys.readouterr().err


def test_a_wrong_key_and_a_router_that_is_not_there(running, monkeypatch, capsys):
    """Two ways not to get in."""
    monkeypatch.setenv("ADMIN_API_KEY", "wrong")
    assert main(["instances", "--router", running.router, "list"]) == 1
    assert capsys.readouterr().err == "pdrelay instances: Forbidden: Invalid API Key.\n"
    assert main(["instances", "--router", "127.0.0.1:1", "list"]) == 1
    assert "the router at http://127.0.0.1:1 cannot be asked" in capsys.readouterr().err


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def pairs(authority):
    """A certificate of the router, and one of a client, both for 127.0.0.1."""
    return authority.sign("router"), authority.sign("client")


@pytest.fixture(scope="module")
def secure(pairs):
    """A router that serves https."""
    with serving(_router(), ssl_certfile=pairs[0].cert, ssl_keyfile=pairs[0].key) as address:
        yield f"https://{address}"


def _router():
    return build(Settings(admin_key="sesame", health_check_interval_s=0.0, decode=("127.0.0.1:9",))).app


@pytest.fixture
def listed(monkeypatch, capsys):
    """Ask for the list; returns the exit code and what was complained about."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")

    def run(url, *flags):
        code = main(["instances", "--router", url, *flags, "list"])
        out, err = capsys.readouterr()
        assert code or "decode-0" in out
        return code, err

    return run


def test_a_router_of_a_private_authority_is_trusted_when_it_is_named(listed, secure, authority, pairs):
    """By the authority, or by the router's own certificate; an authority that did not sign it is not enough."""
    assert listed(secure, "--ca", authority.own.cert) == (0, "")
    assert listed(secure, "--pin", pairs[0].cert) == (0, "")
    assert listed(secure, "--pin", authority.own.cert) == (0, "")

    for flags in ([], ["--ca", pairs[1].cert], ["--pin", pairs[1].cert]):
        code, err = listed(secure, *flags)
        assert code == 1
        assert err.startswith(f"pdrelay instances: the certificate of {secure} is not trusted (")
        assert err.endswith("): see --ca, --pin and --server-name\n")


def test_the_name_in_a_certificate_counts_but_for_a_pin(listed, secure, authority, pairs):
    """From inside its pod a router is localhost, and its certificate is for a public name."""
    local = secure.replace("127.0.0.1", "localhost")

    code, err = listed(local, "--ca", authority.own.cert)
    assert code == 1
    assert "Hostname mismatch" in err
    assert listed(local, "--ca", authority.own.cert, "--server-name", "127.0.0.1") == (0, "")
    assert listed(local, "--pin", pairs[0].cert) == (0, "")


def test_a_router_that_wants_a_certificate_gets_one(listed, authority, pairs):
    """As with --tls-client-ca."""
    asks = {"ssl_ca_certs": authority.own.cert, "ssl_cert_reqs": 2}
    shown = ["--client-cert", pairs[1].cert, "--client-key", pairs[1].key]
    with serving(_router(), ssl_certfile=pairs[0].cert, ssl_keyfile=pairs[0].key, **asks) as address:
        assert listed(f"https://{address}", "--ca", authority.own.cert, *shown) == (0, "")
        code, err = listed(f"https://{address}", "--ca", authority.own.cert)

    assert (code, err.count("\n")) == (1, 1)


def test_a_pod_says_where_its_router_is(secure, pairs, monkeypatch, capsys):
    """So that `kubectl exec POD -- pdrelay instances list` needs no flag."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    monkeypatch.setenv("PDRELAY_ROUTER", secure)
    monkeypatch.setenv("PDRELAY_ROUTER_PIN", pairs[0].cert)

    assert main(["instances", "list"]) == 0
    assert "decode-0" in capsys.readouterr().out


def test_the_key_may_stand_in_a_file(running, monkeypatch, capsys, tmp_path):
    """As Kubernetes mounts a secret; the environment is then not looked at."""
    (file := tmp_path / "key").write_text("sesame\n")
    monkeypatch.setenv("ADMIN_API_KEY", "wrong")

    assert main(["instances", "--router", running.router, "--key-file", str(file), "list"]) == 0
    assert "prefill-0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--key-file", "/no/such/file"], "/no/such/file cannot be read: No such file or directory"),
        (["--key-file", "{folder}/two"], "{folder}/two is not an API key: write one line"),
        (["--key-file", "{folder}/empty"], "{folder}/empty is not an API key: write one line"),
        (["--key-file", "{folder}/bytes"], "{folder}/bytes is not UTF-8 text"),
        (["--router", "https://r", "--ca", "{folder}/two"], "{folder}/two has no certificate in PEM"),
        (["--router", "https://r", "--pin", "{folder}/two"], "{folder}/two has no certificate in PEM"),
        (["--router", "https://r", "--client-cert", "x"], "--client-cert and --client-key belong together"),
        (
            ["--router", "https://r", "--client-cert", "{folder}/two", "--client-key", "{folder}/two"],
            "{folder}/two and {folder}/two are not a certificate and its private key",
        ),
        (["--router", "https://r", "--pin", "x", "--ca", "y"], "--pin trusts one certificate, of any name"),
        (["--router", "r:1", "--ca", "x"], "--ca: only a router at https:// has a certificate, and this is http://r:1"),
    ],
)
def test_what_it_cannot_get_in_with_is_one_sentence(flags, said, monkeypatch, capsys, tmp_path):
    """And the exit code is 2: nothing was asked."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    (tmp_path / "two").write_text("one\ntwo\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")

    assert main(["instances", *(flag.format(folder=tmp_path) for flag in flags), "list"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"pdrelay instances: {said.format(folder=tmp_path)}")


@pytest.mark.parametrize(("seconds", "said"), [(5, "5s"), (65, "1m05s"), (7325, "2h02m")])
def test_durations_are_short(seconds, said):
    """They stand in a table."""
    from pdrelay_proxy.commands.instances import _duration

    assert _duration(seconds) == said
