"""Flags, pages and exit codes of ``pdrelay prove``."""

import json
import signal
import stat
import subprocess
import sys
import threading
import time

import httpx
import pytest

from pdrelay_proxy.cli import main
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import FaultKind, LogEntry, SimulatedFault
from support.cluster import free_ports
from support.sim import cluster, until

pytestmark = pytest.mark.processes


EVIL = "<script>alert(1)</script>|`x`\x1b[2J"


def test_the_three_pages_have_the_findings(prove, fleet, tmp_path):
    """HTML with plots for people, Markdown for issues, JSON for scripts; for this user alone."""
    fleet.d.inject(SimulatedFault(FaultKind.STATUS, body=EVIL))
    pages = [tmp_path / f"page.{kind}" for kind in ("html", "md")]
    found = prove("--only", "load", *(word for page in pages for word in ("--report", str(page))))
    html, markdown = (page.read_text() for page in pages)

    assert found.code == 1
    assert "request-failed" in html
    assert "request-failed" in markdown
    assert html.count("<svg") >= 2
    assert {stat.S_IMODE(page.stat().st_mode) for page in pages} == {0o600}


def test_a_report_that_cannot_be_written_takes_no_verdict_along(prove):
    """The run may have taken ten minutes."""
    found = prove("--only", "siblings", "--report", "/proc/page.md")

    assert found.code == 2
    assert found.said.out == "1 check: 1 passed; 0 findings.\n"
    assert "--report /proc/page.md cannot be written: " in found.said.err


def test_words_of_engines_are_no_markup(prove, fleet, tmp_path):
    """Nobody trusts what an engine answers: not a browser, not a terminal."""
    fleet.d.inject(SimulatedFault(FaultKind.STATUS, body=EVIL))
    pages = [tmp_path / f"page.{kind}" for kind in ("html", "md")]
    found = prove("--only", "burst", *(word for page in pages for word in ("--report", str(page))))
    html, markdown = (page.read_text() for page in pages)

    assert "alert(1)" in html
    assert "<script" not in html + markdown
    assert "\x1b" not in html + markdown + found.said.err + found.said.out


def test_a_router_is_asked_as_a_client_does(fleet, capsys):
    """Nothing watches blocks then, which is said; what needs the engines themselves is skipped."""
    with cluster(1, 1, Settings(health_check_interval_s=0.0)) as running:
        url = f"http://{running.router}"
        code = main(["prove", "--router", url, "--reference", fleet.at["reference"], "--only", "equality"])

    assert code == 0
    assert "Blocks are not watched" in capsys.readouterr().err


def test_equality_with_nothing_is_not_green(tmp_path):
    """A router alone: there is no answer that would be known to be right."""
    page = tmp_path / "page.json"
    with cluster(1, 1, Settings(health_check_interval_s=0.0)) as running:
        running.engines["d0"].inject(SimulatedFault(FaultKind.WRONG))
        code = main(["prove", "--router", f"http://{running.router}", "--only", "equality", "--report", str(page)])
    checks = json.loads(page.read_text())["checks"]

    assert code == 2
    assert {check["reason"] for check in checks} == {"it needs a single engine to compare with (--reference)"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name engines of both roles"),
        (["--prefill", "http://127.0.0.1:1"], "name engines of both roles"),
        (["--router", "ftp://x"], "is not the URL of a server"),
        (["--router", "http://name:secret@127.0.0.1:1"], "keys in files"),
        (["--router", "http://127.0.0.1:1", "--report", "page.txt"], "must end in .html, .md, .json"),
        (["--router", "http://127.0.0.1:1", "--report", "/no/such/folder/page.md"], "its folder does not exist"),
        (["--router", "http://127.0.0.1:1", "--only", "lenghts"], "neither a check nor a group"),
        (["--router", "http://127.0.0.1:1", "--ca", "/no/file"], "there is none"),
        (["--router", "https://127.0.0.1:1", "--ca", "/no/file"], "cannot be read"),
        (["--router", "http://127.0.0.1:1", "--engine-server-name", "e.llm.svc"], "there is none"),
        (["--router", "https://127.0.0.1:1", "--engine-server-name", "10.0.0.1"], "is not a DNS name"),
        (["--router", "http://127.0.0.1:1", "--router-key-file", "/no/file"], "cannot be read"),
        (["--router", "http://127.0.0.1:1"], "does not serve"),
        (["--router", "http://127.0.0.1:1", "--start", "exit 3"], "exit code 3"),
    ],
)
def test_what_cannot_run_is_one_sentence(capsys, arguments, said):
    """And exit code 2, which is neither green nor a finding."""
    assert main(["prove", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "x", "1e9"])
def test_times_are_bounded(capsys, value):
    with pytest.raises(SystemExit):
        main(["prove", "--seconds", value])

    assert "is not a time" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "ignored"), [("HUP", ()), ("INT", ()), ("TERM", ("INT", "HUP"))])
def test_no_engine_stays_frozen_when_the_run_is_ended(fleet, tmp_path, number, ignored):
    """A job of CI is ended with SIGTERM. Here while the command that freezes is under way.

    One in the background of a script ignores SIGINT, and one of nohup ignores SIGHUP.
    """
    done = tmp_path / "thawed"
    at = fleet.at
    program = [sys.executable, "-m", "pdrelay_proxy.cli", "prove"]
    urls = ["--prefill", at["p0"], "--decode", at["d0"], "--reference", at["reference"], "--only", "decode-frozen"]
    deeds = ["--freeze-decode", f"kill -{number} $PPID; exec sleep 50", "--thaw-decode", f"echo a >> {done}"]

    def begin():
        for name in ("TERM", "HUP", "INT"):
            signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN if name in ignored else signal.SIG_DFL)

    began = time.monotonic()
    ended = subprocess.run(
        [*program, *urls, *deeds], capture_output=True, text=True, timeout=58, check=False, preexec_fn=begin
    )

    assert done.read_text() == "a\n"
    assert (ended.returncode, "interrupted" in ended.stderr) == (2, True)
    assert time.monotonic() - began < 50  # the command that freezes has not run to its end


@pytest.mark.parametrize("number", ["INT", "TERM"])
def test_a_second_signal_leaves_no_engine_frozen(fleet, tmp_path, number):
    """Some press Ctrl-C again while an engine is thawed, and CI sends another signal after some seconds."""
    done = tmp_path / "thawed"
    at = fleet.at
    program = [sys.executable, "-m", "pdrelay_proxy.cli", "prove"]
    urls = ["--prefill", at["p0"], "--decode", at["d0"], "--reference", at["reference"], "--only", "decode-frozen"]
    freeze = ["--freeze-decode", f"kill -{number} $PPID; exec sleep 50"]
    thaw = ["--thaw-decode", f"kill -{number} $PPID; sleep 1; kill -{number} $PPID; sleep 1; echo a >> {done}"]

    ended = subprocess.run(
        [*program, *urls, *freeze, *thaw],
        capture_output=True,
        text=True,
        timeout=58,
        check=False,
        preexec_fn=lambda: signal.signal(signal.Signals[f"SIG{number}"], signal.SIG_DFL),
    )

    assert done.read_text() == "a\n"
    assert (ended.returncode, "interrupted" in ended.stderr) == (2, True)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_run_that_is_ended_leaves_no_engine_dead(fleet, tmp_path, role):
    """It has killed one for a check, and would have started it again at the end of that."""
    done = tmp_path / "started"
    at = fleet.at
    program = [sys.executable, "-m", "pdrelay_proxy.cli", "prove", "--only", f"{role}-killed"]
    urls = ["--prefill", at["p0"], "--decode", at["d0"], "--reference", at["reference"]]
    deeds = [f"--kill-{role}", "kill -TERM $PPID; sleep 1", f"--restart-{role}", f"echo a >> {done}"]
    ended = subprocess.run([*program, *urls, *deeds], capture_output=True, text=True, timeout=58, check=False)

    assert done.read_text() == "a\n"
    assert (ended.returncode, "interrupted" in ended.stderr) == (2, True)


def test_a_run_that_is_ended_does_not_wait_for_work_that_it_gave_an_engine(fleet):
    """Dozens of prompts keep a decode engine busy; one that hangs would answer none of them in time."""
    fleet.d.inject(SimulatedFault(FaultKind.STALL, passes=1))
    at = fleet.at
    program = [sys.executable, "-m", "pdrelay_proxy.cli", "prove", "--only", "busy-left", "--timeout", "50"]
    urls = ["--prefill", at["p0"], "--decode", at["d0"], "--reference", at["reference"]]
    with subprocess.Popen([*program, *urls], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        until(lambda: len(fleet.d.log) >= 5 or run.poll() is not None)
        run.terminate()
        _, stderr = run.communicate(timeout=30)

    assert (run.returncode, "interrupted" in stderr) == (2, True)


@pytest.mark.parametrize("value", ["0", "-16", "x", "99999999999"])
def test_a_block_has_tokens(capsys, value):
    """Prompts of fewer than no token are refused by every engine, which would be a finding."""
    with pytest.raises(SystemExit):
        main(["prove", f"--block-size={value}"])

    assert "is not a number of tokens" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "1", "-1", "-4711", "x", "99999999999"])
def test_only_one_process_is_signalled(capsys, value):
    """0 and negative numbers are groups, and -1 is all processes of the user: SIGKILL would end them."""
    with pytest.raises(SystemExit):
        main(["prove", f"--decode-pid={value}"])

    assert "is not the number of an engine's process" in capsys.readouterr().err


def test_words_of_a_server_that_is_refused_do_not_reach_the_terminal(fleet, capsys):
    """Also where no page is written."""
    fleet.reference.inject(SimulatedFault(FaultKind.STATUS, body=EVIL))
    at = fleet.at
    code = main(["prove", "--prefill", at["p0"], "--decode", at["d0"], "--reference", at["reference"]])

    assert code == 2
    assert "alert(1)" in (said := capsys.readouterr().err)
    assert "\x1b" not in said


def test_the_checks_can_be_listed(capsys):
    assert main(["prove", "--list"]) == 0
    assert "boundaries" in capsys.readouterr().out


def test_keys_come_from_files_and_stay_out_of_the_page(prove, fleet, tmp_path):
    """An engine with a key gets it in a header."""
    key = tmp_path / "key"
    key.write_text("sesame\n")
    found = prove("--only", "refused", "--decode-key-file", str(key))

    assert found.code == 0
    assert {entry.headers.get("authorization") for entry in fleet.d.log} == {"Bearer sesame"}
    assert "sesame" not in str(found.page)


def test_what_is_started_is_waited_for_and_stopped(fleet, capsys):
    """Here the reference; and a command that ends well has left something that runs."""
    (port,) = free_ports(1)
    command = f"{sys.executable} -P -m pdrelay_tools.simulated.engine --role decode --port {port}"
    at = fleet.at
    url = f"http://127.0.0.1:{port}"
    engines = ["--prefill", at["p0"], "--decode", at["d0"], "--reference", url]

    code = main(["prove", *engines, "--start", command, "--start", "true", "--only", "refused"])

    assert code == 0
    assert "logs of what is started" in capsys.readouterr().err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False, timeout=20)


def test_what_is_started_may_ask_a_request_of_its_own_first(fleet, prove):
    """``pdrelay up`` does when its engines serve, which is when they are at rest for the first time."""
    first = LogEntry("/v1/completions", {}, "")
    fleet.d.log.append(first)
    over = threading.Timer(1.5, setattr, (first, "state", "done"))
    over.start()
    started = prove("--start", "true", "--only", "refused")
    over.join()
    first.state = "open"
    refused = prove("--only", "refused")

    assert (started.code, started.findings) == (0, {"refused": []})
    assert (refused.code, "decode-0" in refused.said.err, "not at rest" in refused.said.err) == (2, True, True)
