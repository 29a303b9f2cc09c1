"""`xpyd up` as a user sees it, with simulated engines: real processes, a real router, real signals."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest

from support.cluster import ROOM, free_ports
from xpyd_proxy.local.errors import ChildFailed
from xpyd_proxy.local.model import FINGERPRINT
from xpyd_proxy.local.plan import LocalPlan
from xpyd_proxy.local.screen import Screen
from xpyd_proxy.local.up import _explain, _make_model


@contextmanager
def up(directory, *options, port=None):
    """Run it; when the test fails it is ended, or the failure would wait for it for ever."""
    router, prefill, decode = free_ports(3)
    ports = ["--port", str(port or router), "--prefill-port", str(prefill), "--decode-port", str(decode)]
    with subprocess.Popen(
        [sys.executable, "-m", "xpyd_proxy.cli", "up", *ports, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise


@pytest.fixture(autouse=True)
def ctrl_c():
    """A shell's background job ignores Ctrl-C, and so does all that it starts: `nohup pytest &` among them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def read_until(process, text):
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, f"it ended before it said {text!r}: {seen}"
        seen += line
    return seen


def child_of(process, pattern):
    children = psutil.Process(process.pid).children()
    return next(child.pid for child in children if pattern in " ".join(child.cmdline()))


def urls(output):
    return re.findall(r"http://127\.0\.0\.1:\d+", output)


def nobody_listens(output):
    deadline = time.monotonic() + 20
    for url in urls(output):
        while True:
            try:
                httpx.get(f"{url}/health", timeout=1)
            except httpx.TransportError:
                break
            assert time.monotonic() < deadline, f"{url} still answers"
            time.sleep(0.05)
    return True


def test_once_shows_an_answer_and_leaves_nothing_behind(tmp_path):
    """The whole promise of the first five minutes."""
    with up(tmp_path, "--engine", "sim", "--once") as process:
        out, err = process.communicate()

    assert process.returncode == 0, err
    assert err == ""
    assert re.search(r"answer +\w+", out)
    assert re.search(r"prefill +prefill-0 in [\d.]+ ms", out)
    assert re.search(r"decode +decode-0 in [\d.]+ ms", out)
    assert "KV moved  unknown" in out
    assert len(urls(out)) == 3
    assert nobody_listens(out)
    assert {path.name for path in (tmp_path / ".xpyd/logs").iterdir()} == {
        "prefill-0.log",
        "decode-0.log",
        "router.log",
    }


def test_it_says_who_moves_the_kv_cache_and_what_to_paste(tmp_path):
    """And the engines do as it says: after the first request both legs go out at once."""
    with up(tmp_path, "--engine", "sim", "--kv-transfer-mode", "push") as process:
        out = read_until(process, "Ctrl-C stops everything")
        (line,) = [line.strip() for line in out.splitlines() if "curl" in line]
        pasted = subprocess.run(["sh", "-c", f"{line} -i"], capture_output=True, text=True, check=True)
        process.send_signal(signal.SIGINT)
        process.communicate()

    assert "prefill pushes the KV cache (--kv-transfer-mode push)" in out
    assert re.search(r"mode +push_cold", out)
    assert 'mode;desc="push",' in pasted.stdout
    assert '"chat.completion"' in pasted.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_runs_until_it_is_told_to_stop(tmp_path, number):
    """Ctrl-C, a supervisor, or a terminal that is closed: no child is left, and that is a success."""
    with up(tmp_path, "--engine", "sim", "--prefill", "2") as process:
        out = read_until(process, "Ctrl-C stops everything")
        (router,) = re.findall(r"router +(http://\S+)", out)
        alive = httpx.get(f"{router}/v1/models", timeout=20)
        process.send_signal(number)
        rest, err = process.communicate()

    assert alive.json()["data"][0]["id"] == "tiny"
    assert process.returncode == 0, err
    assert "no process is left" in rest
    assert nobody_listens(out)


@pytest.mark.parametrize(("role", "when"), [("decode", "Ctrl-C stops everything"), ("prefill", "start     router")])
def test_an_engine_that_dies_ends_everything_with_its_reason(tmp_path, role, when):
    """Its log is named. During the start it is not waited for as long as a slow engine is, five minutes."""
    with up(tmp_path, "--engine", "sim") as process:
        out = read_until(process, when)
        os.kill(child_of(process, f"role {role}"), signal.SIGKILL)
        _, err = process.communicate()

    assert process.returncode == 1
    assert f"xpyd up: {role}-0 was ended by signal 9; its log is .xpyd/logs/{role}-0.log" in err
    assert nobody_listens(out)


def test_a_failure_shows_the_end_of_the_log_and_one_sentence(tmp_path, capsys):
    """In this order: the sentence is the last thing on the screen."""
    tail = "loading\nOSError: no such model"

    said = "decode-0 ended with exit code 1, probably because of OSError: no such model"
    _explain(ChildFailed(said, tmp_path / "decode-0.log", tail), Screen())

    out, err = capsys.readouterr()
    assert out.splitlines()[-3:] == ["  | loading", "  | OSError: no such model", ""]
    assert err == (
        "xpyd up: decode-0 ended with exit code 1, probably because of OSError: no such model; "
        f"its log is {tmp_path / 'decode-0.log'}\n"
    )


def test_a_taken_port_is_one_sentence_and_nothing_is_started(tmp_path):
    """Usually an earlier `xpyd up` in another terminal."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with up(tmp_path, "--engine", "sim", port=port) as process:
            _, err = process.communicate()

    assert process.returncode == 1
    assert err == (
        f"xpyd up: port {port} for the router is taken: stop what listens there, or choose another with --port\n"
    )
    assert not (tmp_path / ".xpyd").exists()


@pytest.mark.parametrize("count", ["0", "-1", "33", "two"])
def test_a_wrong_number_of_engines_is_one_sentence(tmp_path, count):
    """Before anything else happens."""
    with up(tmp_path, f"--decode={count}") as process:
        _, err = process.communicate()

    assert process.returncode == 2
    assert err == (f"xpyd up: argument --decode: '{count}' is not a number of engines: write one from 1 to 32\n")


def test_a_model_of_ones_own_is_served_as_it_is(tmp_path):
    """`--model DIR` may name a real one."""
    (tmp_path / "config.json").write_text("{}")

    _make_model(LocalPlan(model=tmp_path), Screen())

    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_missing_model_is_made(tmp_path):
    """Nothing can be fetched from a hub."""
    _make_model(LocalPlan(model=tmp_path / "tiny"), Screen())

    assert (tmp_path / "tiny" / FINGERPRINT).exists()


def test_the_ports_that_follow_a_tests_port_belong_to_that_test():
    """The side channel of a second engine has the port after the first one's: another test's engine must not be there.

    So it happened: `xpyd up` refused to start, because a test's engine of the same session listened there.
    """
    ports = sorted(free_ports(100))

    assert all(after - before >= ROOM for before, after in itertools.pairwise(ports))
