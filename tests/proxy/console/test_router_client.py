"""Commands that ask a router, in front of servers that are none: each ends in time, with one sentence."""

import gzip
import json
import time
import tracemalloc

import pytest

from pdrelay_proxy.cli import main
from support.raw_engine import closing, endless, raw_engine

pytestmark = pytest.mark.edges


COMMANDS = (["why", "x"], ["pairs"], ["instances", "list"])
SECONDS = "60"  # a server that answers may be kept from it; only one that never ends is waited for
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")


def answering(body, *, status=b"200 OK", head=b""):
    return closing(
        b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, head, len(body)) + body
    )


def run(command, at, *flags):
    """Run a command against a server."""
    name, *rest = command
    return main([name, "--router", at, "--timeout", SECONDS, *flags, *rest])


@pytest.mark.parametrize("command", COMMANDS, ids=str)
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (endless(HEAD + b"\r\n", b" ", pause_s=0.1), "gave no whole answer within 1 s"),
        (endless(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n", pause_s=0.1), "gave no whole answer within 1 s"),
        (answering(b"[" * 1_000_000), "without JSON: is it a router?"),
        (answering(b"{}"), "answers something else than a router does"),
        (answering(b'{"requests": null, "pairs": null, "instances": 3, "dropped": 0}'), "something else than a router"),
        (answering(b'{"requests": [{}], "pairs": [1], "instances": [{}], "dropped": 0}'), "something else than"),
        (answering(b"{}", status=b"404 No"), "status 404"),
    ],
    ids=["drip", "drip-head", "deep", "empty", "nulls", "rows", "unknown"],
)  # fmt: skip
def test_a_server_that_is_no_router_is_said_in_one_sentence(capsys, command, script, said):
    """A wrong port may be anything's, and --timeout is for the whole answer."""
    began = time.monotonic()
    limit = ("--timeout", "1") if "within 1 s" in said else ()
    with raw_engine(script) as engine:
        code = run(command, engine.at, *limit)
    out, err = capsys.readouterr()

    assert (code, out) == (1, "")
    assert said in err
    assert err.startswith(f"pdrelay {command[0]}: ")
    assert err.count("\n") == 1
    assert time.monotonic() - began < 8


def test_a_server_that_does_not_end_is_said(capsys):
    """As fast as it may be: its answer is not kept."""
    with raw_engine(endless(HEAD + b"\r\n", b" " * (1 << 20))) as engine:
        code = run(["pairs"], engine.at)

    assert code == 1
    assert "answers more than" in capsys.readouterr().err


def test_an_answer_is_not_unpacked(capsys):
    """A few KB unpack to many GB, and what was read is bounded behind that."""
    bomb = gzip.compress(gzip.compress(bytes(1 << 26)))
    assert len(bomb) < 2000
    script = answering(bomb, head=b"Content-Encoding: gzip, gzip\r\n")
    with raw_engine(script) as engine:
        tracemalloc.start()
        code = run(["pairs"], engine.at)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert code == 1
    assert "without JSON" in capsys.readouterr().err
    assert most < 32 << 20


REQUEST = {
    **dict.fromkeys(("request_id", "path", "outcome", "mode"), "x"),
    **dict.fromkeys(("client_id", "single_reason", "error"), ""),
    "status": 200,
    "duration_ms": 1.0,
    "began_at": 0.0,
    "retries": [],
    "notes": [],
    "rows": [],
}


def test_what_cannot_be_written_is_said(capsys):
    """It is JSON, and its fields are of the right types."""
    body = json.dumps({"requests": [REQUEST | {"began_at": 1e17}], "omitted": 0}).encode()
    with raw_engine(answering(body)) as engine:
        code = run(["why", "x"], engine.at)

    assert code == 1
    assert "answers something else than a router does" in capsys.readouterr().err


def test_a_long_word_does_not_widen_a_million_rows(capsys):
    """Each would be as wide: 64 MB of an answer would be written as terabytes."""
    row = dict.fromkeys(("prefill", "decode", "state"), "x")
    row |= dict.fromkeys(("rest_s", "reason", "mode", "pull_s", "push_s", "ttft_s", "bytes_per_s", "last_s"))
    row |= {"handovers": 0, "failed": 0, "failures": {}}
    found = {"dropped": 0, "pairs": [row | {"prefill": "y" * 100_000}, *[row] * 100]}
    with raw_engine(answering(json.dumps(found).encode())) as engine:
        code = run(["pairs"], engine.at)
    out, err = capsys.readouterr()

    assert (code, err) == (0, "")
    assert "y" * 100_000 in out
    assert len(out) < 200_000


def test_many_words_of_an_error_are_cut(capsys):
    """The terminal is an operator's."""
    body = json.dumps({"error": {"message": "x" * 5_000_000}}).encode()
    with raw_engine(answering(body, status=b"500 No")) as engine:
        code = run(["pairs"], engine.at)

    assert code == 1
    assert 100 < len(capsys.readouterr().err) < 1000


@pytest.mark.parametrize(
    "url", ["http://", "http://[", "ftp://x", "http://a:99999", "http://u:secret@a", "http://a/?x"]
)
def test_what_is_no_url_of_a_router_is_said(capsys, url):
    """With code 2: nothing was asked. A password would be in the list of processes."""
    assert run(["pairs"], url) == 2
    assert "is not the URL of a server" in capsys.readouterr().err


def test_a_name_that_no_resolver_takes_is_said(capsys):
    assert run(["pairs"], "http://xn--") == 1
    assert "cannot be asked" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=str)
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "x"])
def test_times_are_bounded(capsys, command, value):
    name, *rest = command
    with pytest.raises(SystemExit):
        main([name, "--timeout", value, *rest])

    assert "is not a time" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["drain"], ["turn"]])
def test_a_wait_ends(capsys, verb):
    """No time is later than NaN."""
    with pytest.raises(SystemExit):
        main(["instances", *verb, "--wait", "nan", "decode-0", *(["decode"] if verb == ["turn"] else [])])

    assert "is not a time" in capsys.readouterr().err
