"""The lab itself, without engines: nothing is left behind. ``test_cut_network.py`` shows that cuts and limits work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import netns

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def _here():
    if reason := netns.lab_available():
        pytest.skip(reason)


def test_nothing_is_left_behind():
    """Neither after the block, nor after a failure in it, nor of a run that was killed."""
    with netns.open_lab() as lab, netns.open_lab() as second:
        assert {lab.p.namespace, second.d.namespace} <= set(netns.namespaces())
    with pytest.raises(RuntimeError), netns.open_lab():
        raise RuntimeError("a test fails")
    left = kill_a_run_that_has_a_lab()
    with netns.open_lab():
        pass

    pids = {str(os.getpid()), *(name.split("-")[2] for name in left)}  # other tests have labs at the same time
    found = [name for name in netns.namespaces() if name.split("-")[2] in pids]
    found += [name for name in netns.devices() if name.removeprefix(netns.LINK).split("-")[0] in pids]
    assert found == []


def kill_a_run_that_has_a_lab():
    """Return the namespaces it leaves."""
    script = "from support.netns import *\nwith open_lab() as lab: print(lab.p.namespace, lab.d.namespace), input()"
    tests = str(Path(netns.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script],
        env={**os.environ, "PYTHONPATH": tests},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        left = set(process.stdout.readline().split())
        process.kill()
    assert len(left) == 2
    assert left <= set(netns.namespaces())
    return left
