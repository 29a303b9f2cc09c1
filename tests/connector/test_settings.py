"""What an operator can choose, and what he reads when he chose wrong."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_connector.errors import SettingsError
from xpyd_connector.settings import (
    AT_LEAST,
    AT_MOST,
    CHOICES,
    FROM_ENVIRONMENT,
    HOST_VARIABLE,
    PORT_VARIABLE,
    READERS,
    SECRET_VARIABLE,
    SHARES,
    Granularity,
    Mode,
    Settings,
    read_settings,
)


def test_without_choices_the_defaults_hold():
    """The connector works without any configuration."""
    assert read_settings({}, {}) == Settings()


def test_the_environment_names_host_port_and_secret():
    """The same variables as for vLLM's own NIXL connector."""
    settings = read_settings({}, {HOST_VARIABLE: "10.0.0.7", PORT_VARIABLE: "5700", SECRET_VARIABLE: "é"})

    assert (settings.host, settings.port, settings.secret) == ("10.0.0.7", 5700, "é".encode())


def test_the_secret_is_not_printed():
    """Settings end up in logs."""
    assert "hush" not in repr(read_settings({}, {SECRET_VARIABLE: "hush"}))


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


def test_pull_is_what_nobody_has_to_choose():
    """And whoever pushes pushes while it computes."""
    assert (Settings().mode, Settings().push_granularity) == (Mode.PULL, Granularity.CHUNK)


@given(st.floats(0.5, 1e6), st.floats(0.1, 1e6))
def test_in_push_a_silence_is_noticed_within_the_transfer_timeout(duration, timeout):
    """The question and the patience with it add up to it, and neither is nothing."""
    settings = Settings(mode=Mode.PUSH, kv_lease_duration=duration, transfer_timeout=timeout)

    assert 0 < settings.heartbeat_interval <= settings.patience
    assert settings.heartbeat_interval + settings.patience == pytest.approx(timeout)
    assert 3 * settings.heartbeat_interval < settings.lease_extension


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


@pytest.mark.parametrize(("key", "most"), SHARES.items())
def test_a_share_is_at_most_one(key, most):
    """More of the cache than there is would be no bound."""
    assert getattr(read_settings({key: most}, {}), key) == most
    with pytest.raises(SettingsError, match=f"'{key}'\\] is 1.5; it must be between 0.01 and 1"):
        read_settings({key: 1.5}, {})


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
