"""``pdrelay serve --check`` and ``--print-config``."""

import re
import tomllib

import pytest

from pdrelay_proxy.cli import build_parser, main
from pdrelay_proxy.features import feature_policies
from pdrelay_proxy.known_settings import OPTIONS, SECRETS
from pdrelay_proxy.options import serve_settings

RIGHT = "The settings are right. Engines were not asked: pdrelay check does that.\n"

BY_CACHE = " or ".join(["prefix", *feature_policies()])


@pytest.fixture
def serve(tmp_path, capsys, monkeypatch):
    """Run the command with a file of this text; give its exit code, output and errors."""
    for secret in SECRETS.values():
        monkeypatch.delenv(secret.option.environment, raising=False)

    def run(text, *arguments):
        path = tmp_path / "router.toml"
        path.write_text(text)
        code = main(["serve", "--config", str(path), *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err.replace(f"{path}", "router.toml").splitlines()

    return run


def test_right_settings_are_said_to_be_right(serve):
    """Nothing listens: the same command may run where a router does."""
    assert serve('decode = ["d:1"]', "--check") == (0, RIGHT, [])


def test_each_wrong_setting_is_one_sentence(serve, tmp_path):
    """Flags, file, contradictions and files together: one is not found after the other."""
    text = 'prefil = ["a:1"]\nport = 70000\nmove_above = 0.5\nqueue_order = "fair"\nadmin_key_file = "/nowhere"'
    code, out, said = serve(text, "--connect-timeout", "soon", "--retries", "99", "--check")

    assert (code, out) == (2, "")
    assert said == [
        f"pdrelay serve: {sentence}"
        for sentence in (
            "router.toml: prefil is not a setting: did you mean prefill?",
            "router.toml: port: '70000' is not a port: write a number from 0 to 65535",
            "argument --retries: '99' is not a number of retries: write one from 0 to 10",
            "argument --connect-timeout: 'soon' is not a time: write a number of seconds above 0",
            "queue_order fair needs api_keys_file: without keys all clients are one",
            "move_above is 0.5, and no stream could move: write resume_streams = true, too",
            "/nowhere cannot be read: No such file or directory",
        )
    ]


def test_what_follows_from_a_wrong_setting_is_not_a_second_one(serve):
    """Its default would be one that it contradicts."""
    code, _, said = serve('host = "0.0.0.0"\napi_keys_file = ""\ndecode = ["d:1"]', "--check")

    assert code == 2
    assert said == ["pdrelay serve: router.toml: api_keys_file: it is empty: leave it out or write a value"]


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("", ["--decode", "d:1", "d:1"], "d:1 stands twice among the decode engines: name each once"),
        ('return_kv = true\ndecode = ["d:1"]', [], f"return_kv needs decode_policy {BY_CACHE}: "),
        ('workers = 4\ndecode = ["d:1"]', [], "workers is 4, and admin_port is not set"),
        ("port = ", [], "router.toml is not TOML"),
    ],
)
def test_what_shows_only_in_a_router_is_said_as_well(serve, text, arguments, said):
    """Engines, policies, extras that are missing."""
    code, _, sentences = serve(text, *arguments, "--check")

    assert code == 2
    assert len(sentences) == 1
    assert sentences[0].startswith(f"pdrelay serve: {said}")


def test_the_settings_in_effect_are_a_file_of_their_own(serve, tmp_path, monkeypatch):
    """A flag wins over the file, and what is printed gives the same router."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    text = 'prefill = ["p:1"]\ndecode = ["d:1"]\nport = 9000\nsession_names = ["x-team"]\n'
    flags = ["--port", "9001", "--max-queue", "9"]
    code, out, said = serve(text, *flags, "--print-config")
    sources = {line.split(" = ")[0]: line.rpartition("  # ")[2] for line in out.splitlines() if " = " in line}

    assert (code, said) == (0, [])
    assert {sources[name] for name in ("prefill", "decode", "session_names")} == {f"{tmp_path}/router.toml"}
    assert (sources["port"], sources["host"]) == ("--port", "default")
    assert sources["otlp_endpoint"] == "OTEL_EXPORTER_OTLP_ENDPOINT"
    again = tmp_path / "printed.toml"
    again.write_text(out)
    arguments = ["serve", "--config", str(tmp_path / "router.toml"), *flags]
    assert serve_settings(build_parser(["serve"]).parse_args(["serve", "--config", str(again)])) == serve_settings(
        build_parser(["serve"]).parse_args(arguments)
    )


def test_every_setting_is_printed_and_what_is_unset_too(serve):
    """As a comment: a key without a value is no TOML."""
    _, out, _ = serve("", "--print-config")

    assert re.findall(r"(?m)^(?:# )?([a-z_0-9]+)(?: =|:)", out)[: len(OPTIONS)] == [*OPTIONS]
    assert "max_rate" not in tomllib.loads(out)


def test_no_secret_is_printed(serve, monkeypatch):
    """Whether it is set can be seen, and by what."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    code, out, _ = serve("", "--otlp-endpoint", "http://user:sesame@collector:4318", "--print-config")

    assert code == 0
    assert "sesame" not in out
    assert "# admin_key: set, and not shown (ADMIN_API_KEY)" in out
    assert "# peer_secret: not set (PDRELAY_PEER_SECRET)" in out
    assert '# otlp_endpoint = "http://***@collector:4318"' in out


def test_wrong_values_are_said_beside_the_others(serve):
    """And the exit code is not that of right ones."""
    code, out, said = serve("retries = 3", "--port", "x", "--print-config")

    assert code == 2
    assert "retries = 3" in out
    assert said == ["pdrelay serve: argument --port: 'x' is not a port: write a number from 0 to 65535"]
