"""SIGTERM and SIGHUP to a command of the tools."""

import signal

import pytest

from pdrelay_tools.end_signals import on_end_signals

pytestmark = pytest.mark.edges


@pytest.fixture(autouse=True)
def as_usual():
    """Who runs the tests may ignore some signals."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_ignored_signal_stays_ignored():
    """`nohup pdrelay up &` outlives its terminal."""
    heard = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with on_end_signals(lambda number, _: heard.append(number), signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)

    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
