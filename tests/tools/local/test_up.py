"""`pdrelay up` as a user sees it, with simulated engines: real processes, a real router, real signals."""

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

from pdrelay_proxy.cli import main
from pdrelay_tools.local.errors import ChildFailed
from pdrelay_tools.local.first_request import FirstAnswer
from pdrelay_tools.local.plan import EngineKind, LocalPlan
from pdrelay_tools.local.screen import Screen
from pdrelay_tools.local.up import _explain, _show
from support.cluster import free_ports
from support.signals import handling
from support.small_disk import HOW, WORDS, small_disk

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ctrl_c")]


def ports():
    router, prefill, decode = free_ports(3)
    return ["--port", str(router), "--prefill-port", str(prefill), "--decode-port", str(decode)]


@contextmanager
def up(directory, *options):
    """Run it; when the test fails it is ended, or the failure would wait for it for ever."""
    with subprocess.Popen(
        [sys.executable, "-m", "pdrelay_proxy.cli", "up", *ports(), *options],
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


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run it in an empty folder, where it starts nothing; return its exit code and its complaint."""
    monkeypatch.chdir(tmp_path)

    def run(*options):
        try:
            code = main(["up", *ports(), *options])
        except SystemExit as ended:
            code = ended.code
        assert list(tmp_path.iterdir()) == []
        return code, capsys.readouterr().err

    return run


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
    assert {path.name for path in (tmp_path / ".pdrelay/logs").iterdir()} == {
        "prefill-0.log",
        "decode-0.log",
        "router.log",
    }


@pytest.mark.slow  # `up` starts engines and a router, and each imports what it runs
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
@pytest.mark.slow  # three times `up` starts engines and a router
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


@pytest.mark.slow  # `up` starts engines and a router
def test_one_of_nohup_outlives_its_terminal(tmp_path):
    """`nohup pdrelay up &` over ssh: the engines are there at the next login."""
    # a child inherits that
    with handling({signal.SIGHUP: signal.SIG_IGN}), up(tmp_path, "--engine", "sim") as process:
        out = read_until(process, "Ctrl-C stops everything")
        process.send_signal(signal.SIGHUP)
        (router,) = re.findall(r"router +(http://\S+)", out)
        alive = [httpx.get(f"{router}/health", timeout=20).status_code for _ in range(20)]
        process.send_signal(signal.SIGTERM)
        process.communicate()

    assert set(alive) == {200}
    assert process.returncode == 0


@pytest.mark.parametrize(("role", "when"), [("decode", "Ctrl-C stops everything"), ("prefill", "start     router")])
def test_an_engine_that_dies_ends_everything_with_its_reason(tmp_path, role, when):
    """Its log is named. During the start it is not waited for as long as a slow engine is, five minutes."""
    with up(tmp_path, "--engine", "sim") as process:
        out = read_until(process, when)
        os.kill(child_of(process, f"role {role}"), signal.SIGKILL)
        _, err = process.communicate()

    assert process.returncode == 1
    assert f"pdrelay up: {role}-0 was ended by signal 9; its log is .pdrelay/logs/{role}-0.log" in err
    assert nobody_listens(out)


def test_a_failure_shows_the_end_of_the_log_and_one_sentence(tmp_path, capsys):
    """In this order: the sentence is the last thing on the screen."""
    tail = "loading\nOSError: no such model"

    said = "decode-0 ended with exit code 1, probably because of OSError: no such model"
    _explain(ChildFailed(said, tmp_path / "decode-0.log", tail), Screen())

    out, err = capsys.readouterr()
    assert out.splitlines()[-3:] == ["  | loading", "  | OSError: no such model", ""]
    assert err == (
        "pdrelay up: decode-0 ended with exit code 1, probably because of OSError: no such model; "
        f"its log is {tmp_path / 'decode-0.log'}\n"
    )


def test_an_answer_moves_no_cursor(capsys):
    """A model writes what it likes; the screen has progress on it."""
    _show(FirstAnswer("a\x1b[2Jb", 0.1, {}, None, None), LocalPlan(kind=EngineKind.SIM), Screen())

    assert "a [2Jb" in capsys.readouterr().out


@pytest.mark.parametrize("how", HOW)
@pytest.mark.slow  # twice
def test_a_disk_that_takes_nothing_is_one_sentence(tmp_path, how):
    """It was a traceback; the same command works when there is room, and no empty key is left."""
    with small_disk(tmp_path) as disk:
        disk.fail(how)
        with up(disk.path, "--engine", "sim", "--once") as process:
            _, stderr = process.communicate()
            assert process.returncode == 1
        assert re.fullmatch(rf"pdrelay up: \S*\.pdrelay\S* cannot be written: {WORDS[how]}\n", stderr), stderr
        disk.mend(how)
        with up(disk.path, "--engine", "sim", "--once") as process:
            _, stderr = process.communicate()
            assert (process.returncode, stderr) == (0, "")


def test_a_taken_port_is_one_sentence_and_nothing_is_started(refused):
    """Usually an earlier `pdrelay up` in another terminal."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, err = refused("--engine", "sim", "--port", str(port))

    assert code == 1
    assert err == (
        f"pdrelay up: port {port} for the router is taken: stop what listens there, or choose another with --port "
        "(make up PORT=...)\n"
    )


@pytest.mark.parametrize("count", ["0", "-1", "33", "two"])
def test_a_wrong_number_of_engines_is_one_sentence(refused, count):
    """Before anything else happens."""
    code, err = refused(f"--decode={count}")

    assert code == 2
    assert err == f"pdrelay up: argument --decode: '{count}' is not a number of engines: write one from 1 to 32\n"


@pytest.mark.parametrize("engine", ["vllm", "sim"])
def test_a_name_on_the_hub_is_refused_and_no_folder_of_that_name_is_made(refused, engine):
    """It was, with a random model in it, which answered under the name of the real one."""
    code, err = refused("--engine", engine, "--model", "Qwen/Qwen3-0.6B")

    assert code == 1
    assert err.startswith("pdrelay up: there is no model in Qwen/Qwen3-0.6B: --model takes a folder with a config.json")


@pytest.mark.slow  # `up` starts engines and a router, and each imports what it runs
def test_commands_for_operators_work_behind_a_plain_up(tmp_path):
    """The line that it prints is pasted as it is; the others find the key in the same folder."""
    with up(tmp_path, "--engine", "sim") as process:
        out = read_until(process, "Ctrl-C stops everything")
        (line,) = [line.strip() for line in out.splitlines() if " why --router=" in line]
        (url,) = re.findall(r"--router=(\S+)", line)
        ran = [["sh", "-c", line], *([sys.executable, "-m", "pdrelay_proxy.cli", *words, "--router", url]
               for words in (["instances", "list"], ["pairs"]))]  # fmt: skip
        bare = {name: value for name, value in os.environ.items() if name != "ADMIN_API_KEY"}
        done = [subprocess.run(argv, cwd=tmp_path, env=bare, capture_output=True, text=True) for argv in ran]
        page = httpx.get(re.findall(r"status +(http://\S+)", out)[0], timeout=20)
        shown = [" ".join(child.cmdline()) for child in psutil.Process(process.pid).children()]
        process.send_signal(signal.SIGINT)
        process.communicate()

    key = (tmp_path / ".pdrelay/admin-key").read_text().strip()
    assert [(each.returncode, each.stderr) for each in done] == [(0, "")] * 3
    assert "prefill leg prefill-0" in done[0].stdout
    assert page.status_code == 200
    assert len(key) >= 32
    assert (tmp_path / ".pdrelay/admin-key").stat().st_mode & 0o777 == 0o600
    told = [out, *shown, *(log.read_text() for log in (tmp_path / ".pdrelay/logs").iterdir())]
    assert not [text for text in told if key in text]


@pytest.mark.slow  # `up` starts engines and a router, and each imports what it runs
def test_a_key_of_the_environment_is_used_as_it_is(tmp_path, monkeypatch):
    """A second one would be one too many."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame-of-the-operator")
    with up(tmp_path, "--engine", "sim") as process:
        out = read_until(process, "Ctrl-C stops everything")
        (router,) = re.findall(r"router +(http://\S+)", out)
        asked = httpx.get(f"{router}/instances", headers={"X-Api-Key": "sesame-of-the-operator"}, timeout=20)
        process.send_signal(signal.SIGINT)
        process.communicate()

    assert asked.status_code == 200
    assert not (tmp_path / ".pdrelay/admin-key").exists()


@pytest.mark.slow  # `up` starts engines and a router, and each imports what it runs
def test_every_port_can_be_moved(tmp_path):
    """Also that of the routes for operators, where the printed lines then lead."""
    (admin,) = free_ports(1)
    with up(tmp_path, "--engine", "sim", "--admin-port", str(admin)) as process:
        out = read_until(process, "Ctrl-C stops everything")
        page = httpx.get(f"http://127.0.0.1:{admin}/", timeout=20)
        process.send_signal(signal.SIGINT)
        process.communicate()

    assert page.status_code == 200
    assert f"why --router=http://127.0.0.1:{admin} pdrelay-" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "sim", "--", "--max-num-seqs", "8"], "simulated engines have no options of vLLM"),
        (
            ["--", "--port=1"],
            "--port is not an option for engines here, as pdrelay up says it itself: write --prefill-port",
        ),
        (["--", "--served_model_name", "x"], "--served-model-name is not an option for engines here"),
    ],
)
def test_an_option_that_cannot_go_to_engines_is_refused(refused, words, says):
    """An engine would fail half a minute later, with a page of usage."""
    code, err = refused(*words)

    assert code == 1
    assert says in err


def test_an_argument_without_a_flag_is_no_option_of_engines(refused):
    """Only what stands behind -- is."""
    assert refused("--engine", "sim", "hermes") == (2, "pdrelay: unrecognized arguments: hermes\n")
