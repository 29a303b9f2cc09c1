"""The nursery itself, with small programs for engines: what it bears is, for a fleet, a program like any other."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pdrelay_proxy.local.errors import ChildFailed
from pdrelay_proxy.local.processes import Command, open_fleet
from support import netns, nursery
from support.cluster import free_ports, wait_until
from support.proc import states, wait_stopped

pytestmark = pytest.mark.processes


SERVER, STATEMENT = "http.server", "timeit"  # of the standard library: what serves, what runs a statement


@pytest.fixture
def fleet(tmp_path):
    with open_fleet(tmp_path / "logs", grace_s=5) as fleet:
        yield fleet


def start(fleet, name, program, *arguments, port=9, prefix=(), **environment):
    health = f"http://127.0.0.1:{port}/"
    argv = [*prefix, sys.executable, "-P", "-m", program, *map(str, arguments)]
    command = Command(name, argv, {**os.environ, **environment}, health)
    return nursery.start(fleet, command, program=program, prefix=prefix)


def serve(fleet, name, tmp_path, **options):
    (port,) = free_ports(1)
    return start(fleet, name, SERVER, port, "--bind", "127.0.0.1", "--directory", tmp_path, port=port, **options)


def run(fleet, name, statement, **options):
    return start(fleet, name, STATEMENT, "-n1", "-r1", statement, **options)


def test_nothing_of_a_frozen_one_runs_any_more(fleet):
    """SIGSTOP alone leaves threads running for a while: a read that P's thaw let end once ended in a "frozen" D."""
    hum = "while True: pass"
    others = [run(fleet, f"busy-{number}", hum) for number in range(3)]
    child = run(
        fleet, "child", f"import threading\nfor _ in range(3): threading.Thread(target=exec, args=('{hum}',)).start()"
    )
    wait_until(lambda: len(states(child.pid)) == 4, seconds=20, what="its threads run")
    for _ in range(30):
        child.signal(signal.SIGSTOP)
        wait_stopped(child.pid)
        assert set(states(child.pid).values()) == {"T"}
        child.signal(signal.SIGCONT)
        time.sleep(0.02)
    child.signal(signal.SIGKILL)
    fleet.stop(child, *others)


def test_a_name_that_is_started_again_continues_its_log(fleet):
    for said in ("first", "second"):
        child = run(fleet, "child", f"print('{said}')")
        assert child.wait(20) == 0
        fleet.stop(child)
    lines = child.log.read_text().splitlines()

    assert [line for line in lines if line in ("first", "second")] == ["first", "second"]


def test_each_has_an_environment_and_temporary_files_of_its_own(fleet, tmp_path):
    """What the process that bears them has of the first one's is not the second one's."""
    (tmp_path / "only_there.py").write_text("WHERE = 'there'")
    what = "import os, tempfile; print('said', os.environ.get('A'), os.environ.get('B'), tempfile.gettempdir())"
    one = run(fleet, "one", what, A="1")
    other = run(fleet, "other", f"import only_there; {what}", B="2", PYTHONPATH=str(tmp_path))
    codes = [child.wait(20) for child in (one, other)]
    said = [next(line for line in c.log.read_text().splitlines() if line.startswith("said")) for c in (one, other)]

    assert codes == [0, 0]
    assert said == [f"said 1 None {one.temp}", f"said None 2 {other.temp}"]


def bearers(fleet):
    return [child for child in fleet.children if child.name.startswith("nursery")]


def test_what_an_import_may_see_has_a_process_of_its_own(fleet):
    """A variable that is read while modules are imported would be the first engine's for all of them."""
    for number, options in enumerate([{}, {"A": "1"}, {"VLLM_API_KEY": "key"}, {"OMP_NUM_THREADS": "7"}]):
        assert run(fleet, f"child-{number}", "pass", **options).wait(20) == 0

    assert len(bearers(fleet)) == 2


@pytest.mark.skipif(netns.lab_available() is not None, reason=f"no network lab: {netns.lab_available()}")
def test_on_a_host_of_a_lab_it_is_as_what_ip_starts_there(fleet):
    """In the host's network, and with its devices in /sys, which UCX reads; here nothing of that is seen."""
    what = "import os, socket; print('said', sorted(os.listdir('/sys/class/net')), socket.if_nameindex())"
    here = run(fleet, "here", what)
    with netns.open_lab() as lab:
        born = run(fleet, "born", what, prefix=tuple(lab.p.prefix))
        by_ip = subprocess.run(
            [*lab.p.prefix, sys.executable, "-c", what], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        assert (born.wait(20), here.wait(20)) == (0, 0)
    after = run(fleet, "after", what)
    assert after.wait(20) == 0

    assert netns.DATA in by_ip
    assert by_ip in born.log.read_text()
    assert netns.DATA not in here.log.read_text() + after.log.read_text()
    assert len(bearers(fleet)) == 1


def test_what_was_prepared_for_nobody_ends_at_once(fleet):
    """As it does while it still imports: nobody has to kill it."""
    bearer = nursery.of_fleet(fleet, STATEMENT, dict(os.environ), "nursery-0").child
    wait_until(lambda: list(bearer.temp.parent.glob("n*")), seconds=20, what="it listens")
    fleet.stop(bearer)

    assert bearer.exit_code != -signal.SIGKILL


def test_what_cannot_be_imported_is_told(fleet):
    """Not after two minutes."""
    with pytest.raises(ChildFailed, match="No module named 'no_such_module'"):
        start(fleet, "child", "no_such_module")
    fleet.stop(*fleet.children)


def test_who_dies_with_the_one_who_bore_it_has_ended(fleet, tmp_path):
    """Nobody is left who could tell how."""
    child = serve(fleet, "child", tmp_path)
    fleet.wait_ready([child], timeout_s=20)
    (bearer,) = bearers(fleet)
    bearer.signal(signal.SIGKILL)
    wait_until(lambda: not bearer.alive, seconds=5, what="it is dead")
    assert child.alive
    child.signal(signal.SIGKILL)

    wait_until(lambda: not child.alive, seconds=5, what="the child is dead, too")
    assert child.exit_code == -signal.SIGKILL
