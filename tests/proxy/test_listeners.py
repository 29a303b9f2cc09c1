"""What the process listens with: how many connections it takes, by the file descriptors that it has."""

import logging
import resource

import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.listeners import main_protocol
from pdrelay_proxy.settings import Settings

SAID = "max_connections is 1000, and 1064 descriptors are enough for 500: more are refused (raise ulimit -n)"


@pytest.fixture
def connections(monkeypatch):
    """How many clients may be connected, on a machine with so many descriptors for a process."""

    def of(settings, descriptors=1064):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
        return main_protocol(build(settings), settings).clients.bounds.connections

    return of


def test_without_a_number_the_descriptors_decide_and_nothing_is_wrong(connections, caplog):
    """A warning that every machine shows is read by no operator."""
    caplog.set_level(logging.INFO)

    assert connections(Settings()) == 500
    assert "descriptors" not in caplog.text


def test_a_number_that_cannot_be_had_is_a_warning(connections, caplog):
    """The operator counts on it."""
    assert connections(Settings(max_connections=1000)) == 500
    assert [(one.levelname, one.message) for one in caplog.records] == [("WARNING", SAID)]


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        (Settings(), 16384),
        (Settings(max_connections=100), 100),
    ],
)
def test_with_enough_descriptors_there_is_a_limit_all_the_same(settings, most, connections, caplog):
    """Memory has an end, too."""
    assert connections(settings, 40_000 if most > 500 else 1064) == most
    assert caplog.records == []
