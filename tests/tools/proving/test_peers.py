"""What is done to engines' processes: by commands of the user, or by signals."""

import asyncio
import signal
import subprocess
import sys

import psutil
import pytest

from pdrelay_tools.proving.peers import Deed, DeedFailed, Peers
from support.proc import wait_stopped

pytestmark = pytest.mark.processes


SLEEPS = "import subprocess; sleep = subprocess.Popen(['sleep', '60']); print(flush=True); sleep.wait()"


@pytest.fixture
def process():
    """A program that has started another one, as an engine does.

    While it starts it, it waits for that one without looking at signals (vfork), and both would be stopped then.
    """
    with subprocess.Popen([sys.executable, "-c", SLEEPS], start_new_session=True, stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        yield started
        started.kill()


async def test_a_frozen_process_stands_and_goes_on(process):
    """By its number."""
    peers = Peers({}, {"decode": process.pid})

    await peers.do("decode", Deed.FREEZE)
    wait_stopped(process.pid)
    await peers.do("decode", Deed.THAW)
    await peers.do("decode", Deed.KILL)

    assert process.wait(10) == -signal.SIGKILL


async def test_a_command_is_run(tmp_path):
    """With a shell, as the user has written it."""
    done = tmp_path / "done"
    await Peers({("decode", Deed.RESTART): f"echo a > {done}"}).do("decode", Deed.RESTART)

    assert done.read_text() == "a\n"


async def test_an_engine_that_a_command_starts_in_the_background_is_not_waited_for(tmp_path):
    """`vllm serve ... &` restarts an engine: its output stays open for as long as it serves."""
    number = tmp_path / "number"
    peers = Peers({("decode", Deed.RESTART): f"sleep 60 & echo $! > {number}"})
    async with asyncio.timeout(20):
        await peers.do("decode", Deed.RESTART)
    engine = psutil.Process(int(number.read_text()))

    assert engine.status() != psutil.STATUS_ZOMBIE
    engine.kill()


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        (Peers({("decode", Deed.KILL): "echo no such pod; exit 3"}), "--kill-decode ended with 3: no such pod"),
        (Peers(), "nothing says how to kill the decode engine: --kill-decode COMMAND"),
        (Peers({}, {"decode": 2**22 + 1}), "there is no process"),
    ],
)
async def test_what_fails_says_why(peers, said):
    """The command itself is not repeated: it may have a password in it."""
    with pytest.raises(DeedFailed, match=said):
        await peers.do("decode", Deed.KILL)


def test_a_number_is_enough_for_signals_and_not_for_a_restart():
    peers = Peers({}, {"decode": 1})

    assert peers.can("decode", Deed.KILL, Deed.FREEZE, Deed.THAW)
    assert not peers.can("decode", Deed.KILL, Deed.RESTART)
    assert not peers.can("prefill", Deed.KILL)
