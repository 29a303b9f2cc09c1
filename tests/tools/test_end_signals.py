"""SIGTERM and SIGHUP to a command of the tools."""

import signal

import pytest

from pdrelay_tools.end_signals import on_end_signals
from support.signals import handling

pytestmark = pytest.mark.edges


def test_an_ignored_signal_stays_ignored():
    """`nohup pdrelay up &` outlives its terminal."""
    heard = []

    with handling({signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_IGN}):
        with on_end_signals(lambda number, _: heard.append(number), signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        left = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)]

    assert heard == [signal.SIGTERM]
    assert left == [signal.SIG_IGN, signal.SIG_DFL]
