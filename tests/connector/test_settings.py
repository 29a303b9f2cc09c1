"""What an operator can choose, and what he reads when he chose wrong."""

import ast
import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.errors import SettingsError
from pdrelay_connector.settings import (
    ALWAYS,
    AT_LEAST,
    AT_MOST,
    BOUNDS,
    CHOICES,
    FROM_ENVIRONMENT,
    HOST_VARIABLE,
    INSTEAD,
    MODE_OF_NAME,
    PORT_VARIABLE,
    READERS,
    SAME,
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    Backend,
    Mode,
    Settings,
    read_settings,
    remarks,
)


def test_without_choices_the_defaults_hold():
    """The connector works without any configuration."""
    assert read_settings({}, {}) == Settings()


def test_the_environment_names_host_port_and_secret():
    """The same variables as for vLLM's own NIXL connector."""
    environment = {HOST_VARIABLE: "10.0.0.7", PORT_VARIABLE: "5700", SECRET_VARIABLE: "ééééééééé"}
    settings = read_settings({}, environment)

    assert (settings.host, settings.port, settings.secrets) == ("10.0.0.7", 5700, ("ééééééééé".encode(),))


def test_the_secret_is_not_printed():
    """Settings end up in logs."""
    assert "hush" not in repr(read_settings({}, {SECRET_VARIABLE: "hush, this is a secret"}))


def test_two_secrets_are_in_force_while_they_are_exchanged():
    """The new one first: engines that have both use it."""
    text = " the new secret that we use\n\nthe old secret, until then\n"
    secrets = read_settings({}, {SECRET_VARIABLE: text}).secrets

    assert secrets == (b"the new secret that we use", b"the old secret, until then")


@pytest.mark.parametrize(
    ("secret", "sentence"),
    [("hush", "a secret of 4 bytes; it must have at least 16"), ("x" * 20 + "\n" + "y" * 20 + "\nz", "has 3 lines")],
)
def test_a_secret_that_can_be_guessed_or_one_too_many_is_refused_without_showing_it(secret, sentence):
    """Who sees one proof may try secrets for as long as it likes."""
    with pytest.raises(SettingsError, match=sentence) as caught:
        read_settings({}, {SECRET_VARIABLE: secret})
    assert secret not in str(caught.value)


def test_a_secret_that_is_no_text_is_refused_and_no_cause_of_the_error_shows_it():
    """Reporters of errors print the values of each: Python's own error of encoding has all of the text."""
    with pytest.raises(SettingsError, match=f"{SECRET_VARIABLE} is not UTF-8; it must be text") as caught:
        read_settings({}, {SECRET_VARIABLE: "x" * 20 + "\udcff"})

    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


@pytest.mark.parametrize(
    ("given", "environment", "sentence"),
    [
        ({}, {SECRET_VARIABLE: "x" * 16, SECRET_FILE_VARIABLE: "/f"}, "are both set"),
        ({"tls_key": "k.pem"}, {}, "tls_cert is not"),
        ({"tls_ca": "ca.pem"}, {}, "tls_cert is not"),
        ({"tls_cert": "c.pem", "tls_server_name": "engines"}, {}, "tls_ca is not"),
        ({"tls_cert": 1}, {}, "it must be a text"),
        ({"allow_open_data_plane": "yes"}, {}, "it must be true or false"),
        ({"backends": []}, {}, "a list of NIXL's backends"),
        ({"backends": "UCX"}, {}, "a list of NIXL's backends"),
        ({"backends": [1]}, {}, "a list of NIXL's backends"),
        ({"backends": [{"UCX": {}}]}, {}, "a list of NIXL's backends"),
        ({"backends": {"UCX": 4}}, {}, "it must map names to texts or numbers"),
        ({"backends": {"UCX": {"num_workers": []}}}, {}, "it must map names to texts or numbers"),
    ],
)
def test_settings_of_the_network_that_cannot_be_used_say_why(given, environment, sentence):
    """Before anything listens."""
    with pytest.raises(SettingsError, match=sentence):
        read_settings(given, environment)


def test_backends_are_names_as_vllm_takes_them_or_have_parameters():
    """NIXL gets the parameters as texts."""
    assert read_settings({"backends": ["UCX", "LIBFABRIC"]}, {}).backends == (Backend("UCX"), Backend("LIBFABRIC"))
    assert read_settings({"backends": {"UCX": {"num_workers": 4}}}, {}).backends == (
        Backend("UCX", {"num_workers": "4"}),
    )


@pytest.mark.parametrize("key", sorted(AT_LEAST))
def test_every_key_can_be_set(key):
    """To its smallest value, and it arrives as the type its field says."""
    settings = read_settings({key: int(AT_LEAST[key]) + 1}, {})

    assert getattr(settings, key) == int(AT_LEAST[key]) + 1
    assert type(getattr(settings, key)) is type(getattr(Settings(), key))


def test_every_setting_has_a_bound():
    """A new field without one would fail at the first use."""
    assert {field.name for field in fields(Settings)} - set(FROM_ENVIRONMENT) == set(AT_LEAST) | set(READERS)


@pytest.mark.parametrize(("key", "choice"), [(key, choice) for key, choices in CHOICES.items() for choice in choices])
def test_every_choice_can_be_made(key, choice):
    """By its plain name, as JSON has it."""
    assert getattr(read_settings({key: choice.value}, {}), key) is choice


@pytest.mark.parametrize("key", sorted(CHOICES))
@pytest.mark.parametrize("value", ["", "PUSH", 1, None, True, ["push"], 10**400], ids=lambda v: str(v)[:8])
def test_a_choice_that_there_is_not_names_its_key_and_the_choices(key, value):
    """An operator who guessed wrong reads what would be right."""
    with pytest.raises(SettingsError, match=f"kv_connector_extra_config\\['{key}'\\].* or '"):
        read_settings({key: value}, {})


def test_pull_is_the_default():
    assert Settings().mode is Mode.PULL


@given(st.floats(0.5, 1e6), st.floats(0.1, 1e6))
def test_in_push_a_silence_is_noticed_within_the_transfer_timeout(duration, timeout):
    """The question and the patience with it add up to it, and neither is nothing."""
    settings = Settings(mode=Mode.PUSH, kv_lease_duration=duration, transfer_timeout=timeout)

    assert 0 < settings.heartbeat_interval <= settings.peer_timeout
    assert settings.heartbeat_interval + settings.peer_timeout == pytest.approx(timeout)
    assert 3 * settings.heartbeat_interval < settings.lease_extension


@given(st.floats(0.5, 1e6), st.floats(0.1, 1e6))
def test_in_pull_three_lost_heartbeats_do_not_end_a_read(duration, timeout):
    """P believes it for the transfer timeout, and it travels with the heartbeats: three may be lost."""
    settings = Settings(kv_lease_duration=duration, transfer_timeout=timeout)

    assert 3 * settings.heartbeat_interval < settings.transfer_timeout


@pytest.mark.parametrize("key", sorted(AT_LEAST))
@pytest.mark.parametrize(
    "value", [-1, float("nan"), float("inf"), 10**400, AT_MOST * 2, "1", None, True, [1]], ids=lambda v: str(v)[:8]
)
def test_a_value_that_cannot_be_used_names_its_key(key, value):
    """Whatever JSON holds, and before any thread meets it."""
    with pytest.raises(SettingsError, match=f"kv_connector_extra_config\\['{key}'\\]"):
        read_settings({key: value}, {})


def test_a_whole_number_must_be_whole():
    """Half a thread is none."""
    with pytest.raises(SettingsError, match="a whole number"):
        read_settings({"handshake_threads": 1.5}, {})


@pytest.mark.parametrize(("key", "most"), BOUNDS.items())
def test_what_has_a_bound_is_at_most_that(key, most):
    """More of the cache than there is, or more blocks than a message carries, would be no bound."""
    assert getattr(read_settings({key: most}, {}), key) == most
    with pytest.raises(
        SettingsError, match=f"'{key}'\\] is {most + 1}; it must be between {AT_LEAST[key]:g} and {most:g}"
    ):
        read_settings({key: most + 1}, {})


def test_a_misspelt_key_is_an_error_with_a_hint():
    """Otherwise the default would hold in silence."""
    with pytest.raises(SettingsError, match="did you mean 'kv_lease_duration'"):
        read_settings({"kv_lease_duraton": 3}, {})


@pytest.mark.parametrize("key", ["zzz", *FROM_ENVIRONMENT])
def test_an_unknown_key_is_an_error_that_lists_the_known_ones(key):
    """What belongs into the environment is not taken from a configuration file."""
    with pytest.raises(SettingsError, match="no key"):
        read_settings({key: 1}, {})


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "5600 ", "٥٦٠٠", "9" * 5000, "http"])
def test_a_port_that_is_none_is_an_error(port):
    """With the variable's name."""
    with pytest.raises(SettingsError, match=PORT_VARIABLE):
        read_settings({}, {PORT_VARIABLE: port})


@given(st.floats(0.5, 1e6))
def test_three_heartbeats_may_be_lost_before_a_lease_is(duration):
    """A renewal holds for longer than three intervals, and never for longer than the lease itself."""
    settings = Settings(kv_lease_duration=duration)

    assert 3 * settings.heartbeat_interval < settings.lease_extension <= settings.kv_lease_duration


@pytest.mark.parametrize("value", [True, False, None])
def test_staging_is_on_off_or_as_the_device_needs_it(value):
    """null is what one gets without the key."""
    assert read_settings({"host_staging": value}, {}).host_staging is value


@pytest.mark.parametrize("value", ["true", 1, 0.0, []])
def test_a_switch_is_true_false_or_null(value):
    """A word or a number may mean the opposite."""
    with pytest.raises(SettingsError, match=r"\['host_staging'\] is .* it must be true, false or null"):
        read_settings({"host_staging": value}, {})


# ---- what operators bring along from vLLM's own connector


def keys_of_vllm():
    """The keys that vLLM's own connector asks its configuration for, from its source (importing it takes seconds)."""
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    found = set()
    for source in (vllm / "distributed/kv_transfer/kv_connector/v1/nixl").glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get_from_extra_config":
                found.add(node.args[0].value)
    return found


def test_every_key_of_vllms_own_connector_is_taken_or_explained():
    """A new vLLM with another one fails here."""
    ours = {field.name for field in fields(Settings)}

    assert keys_of_vllm() <= {*ours, *SAME, *INSTEAD, *ALWAYS}
    assert {*SAME, *INSTEAD, *ALWAYS} <= keys_of_vllm()
    assert set(SAME.values()) <= ours


def test_a_key_that_means_the_same_is_taken():
    """By either name, but not by both."""
    assert read_settings({"push_registration_timeout": 7}, {}).registration_timeout == 7.0
    with pytest.raises(SettingsError, match=r"'push_registration_timeout' and 'registration_timeout'; .* give one"):
        read_settings({"push_registration_timeout": 7, "registration_timeout": 7}, {})


@pytest.mark.parametrize("key", sorted(INSTEAD))
def test_a_key_that_changes_nothing_is_explained(key):
    """The engine starts, with a line in its log."""
    assert read_settings({key: True}, {}) == Settings()
    assert remarks({key: True}, {}) == [f"kv_connector_extra_config['{key}'] is ignored: {INSTEAD[key]}"]


@pytest.mark.parametrize(("connector", "mode"), MODE_OF_NAME.items())
def test_a_name_of_vllms_own_connector_means_its_mode(connector, mode):
    """Who writes NixlPushConnector wants push, and has no key for it; "auto" does that as well as pull."""
    other = Mode.PULL if mode is Mode.PUSH else Mode.PUSH

    assert read_settings({}, {}, connector) == read_settings({"mode": mode}, {}, connector) == Settings(mode=mode)
    assert read_settings({"mode": "auto"}, {}, connector).mode is Mode.AUTO
    with pytest.raises(SettingsError, match=f"'{connector}' and .*'mode'.* is '{other}'; the name means '{mode}'"):
        read_settings({"mode": other}, {}, connector)


@pytest.mark.parametrize("value", [False, None, 0, "true"])
def test_engines_are_always_compared(value):
    """Whoever switched that off would get wrong texts here."""
    assert read_settings({"enforce_handshake_compat": True}, {}) == Settings()
    with pytest.raises(SettingsError, match=r"\['enforce_handshake_compat'\] is .*; it must be true: KV of an engine"):
        read_settings({"enforce_handshake_compat": value}, {})


def test_the_variable_of_older_versions_is_explained():
    """Recipes still set it; vLLM 0.32 has forgotten it in silence."""
    (sentence,) = remarks({}, {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "600"})

    assert sentence.startswith("VLLM_NIXL_ABORT_REQUEST_TIMEOUT is ignored: kv_lease_duration")
    assert remarks({"kv_lease_duration": 30}, {HOST_VARIABLE: "10.0.0.7"}) == []
