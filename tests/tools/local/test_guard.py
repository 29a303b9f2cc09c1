"""The guard's book-keeping and its way of ending process groups; that it works as a process is in test_processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pdrelay_tools.local.guard import end_groups, listen, runs, send

pytestmark = pytest.mark.processes


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture
def group():
    started = []

    def start(code):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        send(process.pid, signal.SIGKILL)
        process.communicate()


def test_groups_that_were_taken_back_are_not_ended():
    """Their number may belong to somebody else by now."""
    assert listen(["+10\n", "+11\n", "-10\n"]) == {11}


def test_taking_back_an_unknown_group_changes_nothing():
    """A parent may say so twice."""
    assert listen(["-10\n"]) == set()


def test_a_group_that_ends_when_asked_is_not_waited_for(group):
    """Stopping takes as long as the slowest child, no longer."""
    process = group("import time; print(flush=True); time.sleep(60)")
    start = time.monotonic()

    end_groups([process.pid], grace_s=30, reap=process.poll)

    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - start < 10


def test_who_ends_between_two_looks_is_collected(group):
    """The parent has looked for dead children just before: else nobody would know how it ended."""
    process = group("import time; print(flush=True); time.sleep(60)")
    looks = []

    def reap():
        looks.append(process.poll() if looks else os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT))

    end_groups([process.pid], grace_s=30, reap=reap)

    assert process.returncode == -signal.SIGTERM


def test_a_group_that_does_not_end_is_killed(group):
    """A hung engine must not hang the one who stops it."""
    process = group(STUBBORN)

    end_groups([process.pid], grace_s=0.1)

    assert process.wait(10) == -signal.SIGKILL


def test_a_frozen_group_is_ended_too(group):
    """A stopped process does not see SIGTERM before it goes on."""
    process = group("import time; print(flush=True); time.sleep(60)")
    os.killpg(process.pid, signal.SIGSTOP)

    end_groups([process.pid], grace_s=30, reap=process.poll)

    assert process.returncode == -signal.SIGTERM


def test_the_dead_whom_nobody_has_collected_are_not_waited_for(group):
    """An init that collects once a second would make every stop take as long."""
    process = group("import time; print(flush=True); time.sleep(60)")
    start = time.monotonic()

    end_groups([process.pid], grace_s=30)

    assert time.monotonic() - start < 10
    assert send(process.pid)  # its entry is there until its parent, which is this test, has asked for its end
    assert not runs(process.pid)


def test_a_group_runs_while_one_of_it_does(group):
    """The leader may die first: here it is collected, and its child holds on."""
    child = "import time; time.sleep(60)"
    process = group(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{child}']); print(flush=True)")
    process.wait(10)

    assert runs(process.pid)
    end_groups([process.pid], grace_s=30)
    assert not runs(process.pid)


def test_a_second_interrupt_kills_at_once(group):
    """Impatient people press Ctrl-C twice."""
    process = group(STUBBORN)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end_groups([process.pid], grace_s=30, reap=interrupt)
    assert process.wait(10) == -signal.SIGKILL


def test_sending_to_a_group_that_is_gone_says_so(group):
    """That is how the end of a group is noticed."""
    process = group("print(flush=True)")
    process.wait(10)

    assert not send(process.pid, signal.SIGTERM)
