"""What all tests of the tools share."""

import signal

import pytest

from support.certificates import one_authority  # noqa: F401 (a fixture of every test)
from support.signals import handling


@pytest.fixture
def ctrl_c():
    """A shell's background job ignores Ctrl-C, and so does all that it starts: `nohup pytest &` among them."""
    with handling({signal.SIGINT: signal.default_int_handler}):
        yield
