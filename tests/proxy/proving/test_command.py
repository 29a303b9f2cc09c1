"""Flags, pages and exit codes of ``xpyd prove``."""

import stat

import pytest

from support.sim import cluster
from xpyd_proxy.cli import main
from xpyd_proxy.settings import Settings
from xpyd_proxy.testing.engine import FaultKind, SimulatedFault

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
