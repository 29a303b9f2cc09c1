"""``xpyd instances``, against a router on a real socket."""

import io
import json

import pytest
from starlette.responses import JSONResponse

from support.sim import cluster, serving, sims
from xpyd_proxy.cli import main
from xpyd_proxy.settings import Settings


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    with cluster(1, 2, Settings(admin_key="sesame", probe_interval_s=0.0)) as found:
        yield found


@pytest.fixture
def instances(running, capsys):
    """Run the command; returns the exit code, what it printed and what it complained about."""

    def run(*arguments):
        code = main(["instances", "--router", running.router, *arguments])
        return code, *capsys.readouterr()

    return run


def test_the_list_is_a_table(instances):
    """One line for each engine, in columns."""
    code, out, err = instances("list")
    head, *lines = out.splitlines()

    assert (code, err) == (0, "")
    assert head.split()[:5] == ["id", "role", "address", "rank", "state"]
    assert [line.split()[0] for line in lines] == ["prefill-0", "decode-0", "decode-1"]
    assert {line[head.index("state") :].split()[0] for line in lines} == {"joining"}


def test_the_list_is_json_when_asked_for(instances):
    """For scripts."""
    _, out, _ = instances("--json", "list")

    assert [row["id"] for row in json.loads(out)["instances"]] == ["prefill-0", "decode-0", "decode-1"]


def test_an_engine_can_be_added_drained_put_back_and_removed(instances):
    """Its whole life from a terminal."""
    with serving(sims()["d0"]) as address:
        assert instances("add", "decode", address) == (0, f"Added {address} to decode_instances.\n", "")
        code, out, _ = instances("drain", "decode-2", "--wait", "10")
        assert (code, out.splitlines()[1].split()[4]) == (0, "drained")
        assert instances("undrain", "decode-2")[1].splitlines()[1].split()[4] == "joining"
        assert instances("remove", "decode-1", "decode-2")[0] == 0
        assert "decode-2" not in instances("list")[1]


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
    assert err == "xpyd instances: after 0.1 s decode-0 is draining with 1 in flight\n"


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
        (["add", "decode", "nobody:1"], "Instance validation failed."),
        (["explain", "/no/such/file"], "/no/such/file cannot be read: No such file or directory"),
        (["explain", "--path", "/metrics", "-"], "- is not JSON"),
    ],
)
def test_what_goes_wrong_is_one_sentence(instances, monkeypatch, arguments, said):
    """And the exit code is 1."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, out, err = instances(*arguments)

    assert (code, out) == (1, "")
    assert err.startswith(f"xpyd instances: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("answer", [(500, {"error": "no"}), (200, []), (422, [1])])
def test_what_is_no_router_is_one_sentence_too(monkeypatch, capsys, answer):
    """A port may be somebody else's."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    status, body = answer
    with serving(JSONResponse(body, status)) as other:
        assert main(["instances", "--router", other, "list"]) == 1

    assert capsys.readouterr().err.count("\n") == 1


def test_without_the_key_nothing_is_asked(monkeypatch, capsys):
    """It comes from the environment alone: arguments are visible to everybody on the machine."""
    monkeypatch.delenv("ADMIN_API_KEY", raising=False)

    assert main(["instances", "list"]) == 2
    assert "set ADMIN_API_KEY" in capsys.readouterr().err


def test_a_wrong_key_and_a_router_that_is_not_there(running, monkeypatch, capsys):
    """Two ways not to get in."""
    monkeypatch.setenv("ADMIN_API_KEY", "wrong")
    assert main(["instances", "--router", running.router, "list"]) == 1
    assert capsys.readouterr().err == "xpyd instances: Forbidden: Invalid API Key.\n"
    assert main(["instances", "--router", "127.0.0.1:1", "list"]) == 1
    assert "the router at http://127.0.0.1:1 cannot be asked" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "said"), [(5, "5s"), (65, "1m05s"), (7325, "2h02m")])
def test_durations_are_short(seconds, said):
    """They stand in a table."""
    from xpyd_proxy.commands.instances import _duration

    assert _duration(seconds) == said
