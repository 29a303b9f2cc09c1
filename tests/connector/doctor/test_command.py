"""The command line: what it refuses, and that the router offers it where the connector is installed."""

import json
import os
import subprocess
import sys

import pytest

from pdrelay_connector.core.ids import Address
from pdrelay_connector.doctor import command
from pdrelay_proxy.cli import main as pdrelay
from support.raw_engine import closing, raw_engine

pytestmark = pytest.mark.processes


SECRET_FILE = "/nowhere/secret"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say what to examine"),
        (["listen", "--secret-file", SECRET_FILE], "cannot be read"),
        (["listen", "--host", "0.0.0.0"], "name one address"),
        (["listen", "--host", "localhost.invalid"], "leads nowhere"),
        (["h:port"], "is no HOST"),
        (["h", "--block-bytes", "99999999999"], "--block-bytes must be"),
        (["h", "--seconds", "0"], "--seconds must be"),
        (["h", "--model", "/nowhere"], "cannot be read"),
        (["--router", "router:8000"], "must be a URL"),
        (["--engine", "e@"], "is no HOST"),
        (["h:²"], "is no HOST"),
        (["h", "--port", "-1"], "--port must be"),
        (["listen", "--port", "65536"], "--port must be"),
    ],
)
@pytest.mark.parametrize(
    "program", [command.main, lambda arguments: pdrelay(["doctor", *arguments])], ids=["own", "pdrelay"]
)
def test_what_cannot_run_is_said_in_one_sentence(program, arguments, words, capsys, monkeypatch):
    """With code 2, which no finding has."""
    for name in ("PDRELAY_CONNECTOR_SECRET", "PDRELAY_CONNECTOR_SECRET_FILE", "VLLM_NIXL_SIDE_CHANNEL_HOST"):
        monkeypatch.delenv(name, raising=False)

    assert program(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("pdrelay doctor: ")
    assert err.count("\n") == 1


def test_an_end_that_other_machines_reach_needs_a_secret(monkeypatch, capsys):
    """As an engine does: a stranger would have it move memory."""
    for name in ("PDRELAY_CONNECTOR_SECRET", "PDRELAY_CONNECTOR_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pdrelay_connector.doctor.pair.own_address", lambda host, port: host)

    assert command.main(["listen", "--host", "10.0.0.1"]) == 2
    assert "there is no secret" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("p0", Address("p0", 5690)),
        ("p0:1", Address("p0", 1)),
        ("[fd00::1]:1", Address("fd00::1", 1)),
        ("fd00::1", Address("fd00::1", 5690)),
    ],
)
def test_hosts_and_ports(text, address):
    assert command._parsed(text, 5690) == address


def test_a_blocked_address_is_a_finding_in_text_and_as_json(capsys):
    """Found without NIXL, in a moment."""
    assert command.main(["127.0.0.1:1"]) == 1
    assert "FINDING not-listening: cannot connect to 127.0.0.1:1" in capsys.readouterr().out
    assert command.main(["127.0.0.1:1", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["name"] == "not-listening"


def test_words_of_a_server_do_not_reach_the_terminal(capsys):
    """It may be anybody's."""
    with raw_engine(closing(b"HTTP/1.1 500 \x1b[2J\r\nContent-Length: 0\r\n\r\n")) as engine:
        assert command.main(["--router", f"http://{engine.at}"]) == 2

    assert "500" in (err := capsys.readouterr().err)
    assert "\x1b" not in err


@pytest.mark.parametrize("missing", ["numpy", "pdrelay_connector"])
def test_a_router_without_the_connector_says_what_to_install(missing):
    """The image of the router has neither NIXL nor numpy."""
    code = f"import sys; sys.modules[{missing!r}] = None; from pdrelay_proxy.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "p0", "--json"],
        env=os.environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert done.stderr == (
        f"pdrelay doctor: {missing} is not installed: "
        "pip install 'pdrelay[connector]' or, in a checkout, pip install '.[connector]'\n"
    )
