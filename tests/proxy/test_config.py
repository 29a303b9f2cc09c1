"""Settings from the file, the command line and the environment."""

import dataclasses
import itertools

import pytest

from pdrelay_proxy.cli import build_parser, main
from pdrelay_proxy.consistency import check
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features import feature_settings
from pdrelay_proxy.known_settings import DECLARED, OPTIONS, SECRETS, needs_restart, reused_of_features, with_values
from pdrelay_proxy.options import serve_settings
from pdrelay_proxy.setting_values import read
from pdrelay_proxy.settings import KvTransferMode, LogLevel, Settings


@pytest.fixture
def config(tmp_path):
    """Writes the file and reads it, beside these flags."""
    path = tmp_path / "pdrelay.toml"

    def settings_of(text, *argv):
        path.write_text(text)
        return serve_settings(build_parser(["serve"]).parse_args(["serve", "--config", str(path), *argv]))

    return settings_of


def test_the_names_in_the_file_are_those_of_the_settings(config):
    """Numbers, texts and lists, as TOML writes them."""
    text = """
    prefill = ["p0:1", "p1:1"]
    host = "::"
    port = 0
    kv_transfer_mode = "push"
    connect_timeout_s = 2
    first_token_timeout_s = 0.5
    log_level = "debug"
    """

    assert config(text) == Settings(
        prefill=("p0:1", "p1:1"),
        host="::",
        port=0,
        kv_transfer_mode=KvTransferMode.PUSH,
        connect_timeout_s=2.0,
        first_token_timeout_s=0.5,
        log_level=LogLevel.DEBUG,
    )


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(config):
    """A list of addresses is replaced, not extended: else one could never leave an engine out."""
    text = 'prefill = ["p0:1"]\nport = 1\nretries = 7'

    found = config(text, "--prefill", "p1:1", "p2:1", "--port", "2")

    assert (found.prefill, found.port, found.retries, found.host) == (("p1:1", "p2:1"), 2, 7, Settings().host)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[router]\nport = 1",
            r"\[router\] is not a setting: settings are keys outside of tables, so leave this line out and write its "
            "keys above all tables, such as port = 8000",
        ),
        ("[[router]]\nport = 1", r"\[router\] is not a setting: settings are keys outside of tables"),
        ("router.port = 1", r"\[router\] is not a setting: settings are keys outside of tables"),
        ("router = 1", "router is not a setting"),
        ("prefil = []", "prefil is not a setting: did you mean prefill?"),
        ("connect-timeout = 5", "connect-timeout is not a setting: did you mean connect_timeout_s?"),
        ("xyzzy = 5", "xyzzy is not a setting$"),
        ('admin_key = "secret"', "admin_key is not a setting of the file: put it into the environment"),
        ('port = "x"', "port is 'x': write a whole number"),
        ("port = 65536", "port: '65536' is not a port: write a number from 0 to 65535"),
        ("port = true", "port is True: write a whole number"),
        ("retries = 1.5", "retries is 1.5: write a whole number"),
        ("retries = 11", "retries: '11' is not a number of retries: write one from 0 to 10"),
        ("server_timing = 1", "server_timing is 1: write true or false"),
        ("retry_budget_ratio = 1.1", "retry_budget_ratio: '1.1' is not a share: write a number above 0, at most 1"),
        ('model = ""', "model is not a setting"),
        ('kubernetes_namespace = ""', "kubernetes_namespace: it is empty: leave it out or write a value"),
        ("host = 5", "host is 5: write a string, in quotes"),
        ('connect_timeout_s = "5"', "connect_timeout_s is '5': write a number"),
        ("connect_timeout_s = inf", "connect_timeout_s: 'inf' is not a time: write a number of seconds above 0"),
        ('prefill = "p0:1"', "prefill is 'p0:1': write a list"),
        ('decode = ["nowhere"]', "decode: 'nowhere' is not the address of an engine: write host:port"),
        ("decode = [5]", "decode is 5: write a string, in quotes"),
        ('kv_transfer_mode = "both"', "kv_transfer_mode: 'both' is not a choice: write auto, pull or push"),
        ("port = ", "is not TOML: Invalid value"),
    ],
)
def test_a_wrong_file_is_one_sentence(config, text, says):
    """It names the file, the key and the value, and says what would be right."""
    with pytest.raises(ConfigError, match=f"pdrelay.toml:? {says}") as caught:
        config(text)

    assert "secret" not in str(caught.value)


def test_the_command_line_says_it_too(tmp_path, capsys):
    """With the exit code of a usage error; also for a file that is not there, or is not text."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")

    assert main(["serve", "--config", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"pdrelay serve: {tmp_path}/none cannot be read: No such file or directory\n"
    assert main(["serve", "--config", str(binary)]) == 2
    assert capsys.readouterr().err == f"pdrelay serve: {binary} is not UTF-8 text\n"


@pytest.mark.parametrize("setting", OPTIONS.values(), ids=lambda setting: setting.name)
def test_every_default_could_be_written(setting):
    """Whoever writes a default into the file gets the default."""
    if setting.default is not None and not setting.is_list:
        written = str(setting.default).lower() if isinstance(setting.default, bool) else str(setting.default)
        assert read(setting.kind, written) == setting.default


def test_every_setting_is_declared_with_a_flag_of_its_own():
    """And with a meaning; constants, which are none, have a plain type and a default."""
    fields = [field for owner in (Settings, *feature_settings()) for field in dataclasses.fields(owner)]

    assert sorted(setting.name for setting in DECLARED) == sorted(field.name for field in fields if field.metadata)
    assert len({setting.name for setting in DECLARED}) == len(DECLARED)
    groups = [group for group, _ in itertools.groupby(DECLARED, lambda one: one.option.group)]
    assert len(set(groups)) == len(groups)
    constants = [field for field in fields if not field.metadata and field.name != "features"]
    assert {type(field.default) for field in constants} <= {bool, int, float}
    assert len({setting.flag for setting in OPTIONS.values()}) == len(OPTIONS)
    assert all(setting.option.help for setting in DECLARED)


def test_secrets_are_no_options():
    """They would stand in ps, or in a file that is shown around; and no settings object prints them."""
    owners = Settings, *feature_settings()
    fields = {field.name: field for owner in owners for field in dataclasses.fields(owner)}
    own = {name for name, secret in SECRETS.items() if secret.owner is Settings}

    assert own == {"admin_key", "prefill_api_key", "decode_api_key", "cache_salt_secret"}
    assert not SECRETS.keys() & OPTIONS.keys()
    assert not any(fields[name].repr for name in SECRETS)


def test_what_needs_a_restart_is_named():
    """The rest takes effect when the file is read again."""
    new = dataclasses.replace(Settings(), port=1, host="::", max_queue=3, log_level=LogLevel.DEBUG, prefill=("a:1",))

    assert needs_restart(Settings(), new) == ["host", "port"]


def test_one_setting_chooses_all_that_uses_kv_and_others_win(config):
    """A flag or a line of the file that says otherwise stays; and what needs what was left out is left out, too."""
    all_of_it = config("reuse_kv = true")
    by_time = config('prefill_policy = "expected_ttft"', "--reuse-kv", "true", "--min-split-new-bytes", "0")
    by_turns = config('decode_policy = "round_robin"', "--reuse-kv", "true")

    used = {"prefill_policy": "prefix", "decode_policy": "prefix", "return_kv": True}
    features = reused_of_features()
    assert all_of_it == with_values(Settings(reuse_kv=True, **used, min_split_new_bytes=1500), features)
    expected = {"prefill_policy": "expected_ttft", "decode_policy": "expected_ttft"}
    assert by_time == with_values(Settings(reuse_kv=True, **used | expected), features)
    turns = Settings(reuse_kv=True, prefill_policy="prefix", decode_policy="round_robin")
    assert by_turns == with_values(turns, features)
    assert config("reuse_kv = false") == Settings()


def test_an_empty_file_changes_nothing(config):
    """Comments are fine."""
    assert config("# nothing yet\n") == Settings()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (Settings(admin_host="127.0.0.1"), "^admin_host is set, and admin_port is not: write the port"),
        (Settings(port=8000, admin_port=8000), "^port and admin_port are both 8000: write two$"),
        (Settings(host="0.0.0.0"), "^host is 0.0.0.0, so others could use the engines without a key: set"),
    ],
)
def test_places_that_cannot_be_meant_are_refused(settings, says):
    """Of two ports that are one, the kernel would spread connections over both."""
    with pytest.raises(ConfigError, match=says):
        check(settings)
