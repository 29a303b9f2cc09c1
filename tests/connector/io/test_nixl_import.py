"""What importing NIXL changes in a process."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


LOOK = "import logging; logging.raiseExceptions = {}; import pdrelay_connector.io.nixl; print(logging.raiseExceptions)"


@pytest.mark.parametrize("before", ["True", pytest.param("False", marks=pytest.mark.slow)])
def test_a_line_that_cannot_be_logged_is_printed_as_before(before):
    """nixl 1.5.1 switches that off for all of the process: errors of the engine's own log lines would be silent."""
    seen = subprocess.run([sys.executable, "-c", LOOK.format(before)], capture_output=True, text=True, check=True)

    assert seen.stdout.split() == [before]
