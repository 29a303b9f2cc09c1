"""Children that always end: with their block, with their parent, and with everything they started themselves."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from pdrelay_tools.local.errors import ChildFailed
from pdrelay_tools.local.processes import Command, Patience, open_fleet
from support.cluster import free_ports

pytestmark = pytest.mark.processes


SLEEPER = "import time; time.sleep(60)"
# Answers the requests for each path with the path's statuses in turn, and the last of them for ever.
FICKLE = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        first, *rest = self.path[1:].split(",") if self.path not in answers else answers[self.path]
        answers[self.path] = rest or [first]
        self.send_response(int(first)); self.end_headers()
        self.wfile.write(str(len(rest)).encode())
answers = {}
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Starts a child of its own and writes down both process ids.
FAMILY = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".new").rename(path)
time.sleep(60)
"""
# Leaves a socket and a file in its directory for temporary files, and writes down where that is.
LITTER = """
import os, pathlib, socket, sys, tempfile, time, uuid
where = pathlib.Path(tempfile.gettempdir())
socket.socket(socket.AF_UNIX).bind(str(where / str(uuid.uuid4())))
(where / "rendezvous").touch()
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(str(where))
path.with_suffix(".new").rename(path)
time.sleep(60)
"""
PARENT = """
import os, pathlib, sys, time
from pdrelay_tools.local.processes import Command, open_fleet
with open_fleet(pathlib.Path(sys.argv[1]), grace_s=5) as fleet:
    fleet.start(Command("family", [sys.executable, "-c", sys.argv[3], sys.argv[2]], os.environ, "http://127.0.0.1:9"))
    time.sleep(60)
"""


def command(code, *arguments, name="child", port=9):
    return Command(name, [sys.executable, "-c", code, *arguments], os.environ, f"http://127.0.0.1:{port}/health")


def runs(pid):
    """Whether a process exists and is more than a zombie that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def fleet(tmp_path):
    with open_fleet(tmp_path / "logs", grace_s=5) as fleet:
        yield fleet


def test_ready_means_that_all_serve_at_the_same_time(fleet):
    """A router is healthy until its first look at engines that still load, and again when it has seen them serve."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    router = Command("router", [sys.executable, "-c", FICKLE, str(port)], os.environ, f"{url}/200,503,503,503,200,200")
    engine = Command("engine", [sys.executable, "-c", SLEEPER], os.environ, f"{url}/503,200")
    children = [fleet.start(engine), fleet.start(router)]

    fleet.wait_ready(children, timeout_s=20)

    answers_left = int(httpx.get(router.health_url, trust_env=False, timeout=20).text)
    assert answers_left == 0  # the wait took all but the last one


def test_a_child_that_dies_ends_the_wait_at_once(fleet):
    """Nobody waits three minutes for a process that is gone; the reason is in the error."""
    child = fleet.start(command("import sys; sys.exit('no such model')"))

    with pytest.raises(ChildFailed, match="child ended with exit code 1") as caught:
        fleet.wait_ready([child], timeout_s=20)
    assert caught.value.tail == "no such model"
    assert caught.value.log == child.log


def test_any_childs_death_ends_the_wait(fleet):
    """A decode engine alone is of no use, however long one waits for it."""
    dead = fleet.start(command("pass", name="dead"))
    dead.wait(20)
    waiting = fleet.start(command(SLEEPER, name="slow"))

    with pytest.raises(ChildFailed, match="dead ended with exit code 0"):
        fleet.wait_ready([waiting], timeout_s=20)


def test_a_child_that_never_serves_is_reported_in_time(fleet):
    """The time-out names the child and its log."""
    child = fleet.start(command(SLEEPER))

    with pytest.raises(ChildFailed, match=r"child is not ready after \d+ s; its log is .*child\.log"):
        fleet.wait_ready([child], timeout_s=0.05)


def test_a_log_that_grows_extends_the_wait():
    """An engine on a busy machine loads for minutes, and says so; one that says nothing hangs."""
    patience = Patience(10.0, 100.0, now=0.0)

    assert [patience.is_over({"decode-0": size}, now=now) for size, now in ((0, 9), (5, 10), (5, 19), (6, 20))] == [
        False
    ] * 4
    assert not patience.is_over({"decode-0": 6}, now=30.0)
    assert patience.is_over({"decode-0": 6}, now=30.1)
    assert patience.silence(now=30.1) == pytest.approx(10.1)


def test_a_log_that_grows_for_ever_does_not():
    """A program may say once a second that it waits for another."""
    patience = Patience(10.0, 100.0, now=0.0)

    assert not any(patience.is_over({"decode-0": now}, now=float(now)) for now in range(101))
    assert patience.is_over({"decode-0": 101}, now=100.5)


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: no such model",
        "(EngineCore pid=7) ERROR 11-21 02:42:12 [core.py:1510] ValueError: no such model",
    ],
)
def test_the_first_exception_is_the_cause(fleet, line):
    """vLLM's last line only says that there was one."""
    child = fleet.start(command(f"print({line!r}, flush=True); raise SystemExit('RuntimeError: see above')"))
    child.wait(20)

    assert child.cause() == "ValueError: no such model"
    with pytest.raises(ChildFailed, match="exit code 1, probably because of ValueError: no such model;"):
        child.raise_if_dead()


def test_a_log_without_an_exception_names_no_cause(fleet):
    """We do not guess."""
    child = fleet.start(command("print('all is well')"))
    child.wait(20)

    assert child.cause() is None


def test_the_tail_of_a_huge_log_is_cheap_and_whole(fleet):
    """Engines write megabytes."""
    child = fleet.start(command("for i in range(100_000): print(f'line {i}')"))
    child.wait(20)

    assert child.tail(2) == "line 99998\nline 99999"


def test_what_a_dead_child_left_behind_is_ended(fleet, tmp_path):
    """Only the API server was killed: its engine core still holds the memory."""
    child = fleet.start(command(FAMILY, str(tmp_path / "pids")))
    eventually((tmp_path / "pids").exists)
    orphan = int((tmp_path / "pids").read_text().split()[1])
    os.kill(child.pid, signal.SIGKILL)
    child.wait(20)
    assert runs(orphan)

    fleet.stop(child)

    eventually(lambda: not runs(orphan))


def test_the_block_ends_all_children(tmp_path):
    """Whatever happens inside it."""
    children = []

    def fail_with_children():
        with open_fleet(tmp_path) as fleet:
            children.extend(fleet.start(command(SLEEPER, name=f"child-{i}")) for i in range(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_with_children()
    assert [child.exit_code for child in children] == [-signal.SIGTERM] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_children_do_not_survive_their_parent(tmp_path, number):
    """However it dies: a test machine is not left with engines that hold its ports and its memory."""
    arguments = [str(tmp_path / "logs"), str(tmp_path / "pids"), FAMILY]
    # who runs the tests may ignore some of these signals (nohup, a job in the background), and children inherit that
    heeding = {"preexec_fn": lambda: signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None}
    with subprocess.Popen([sys.executable, "-c", PARENT, *arguments], stderr=subprocess.DEVNULL, **heeding) as parent:
        eventually((tmp_path / "pids").exists)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(runs(pid) for pid in pids)
        parent.send_signal(number)

    eventually(lambda: not any(runs(pid) for pid in pids))


def test_what_a_child_leaves_in_its_temporary_directory_goes_with_it(tmp_path):
    """An engine leaves sockets and files there: a hundred a day on a machine that runs tests."""
    told = [tmp_path / "first", tmp_path / "second"]
    with open_fleet(tmp_path / "logs", grace_s=5) as fleet:
        for path in told:
            fleet.start(command(LITTER, str(path), name=path.name))
        eventually(lambda: all(path.exists() for path in told))
        wheres = [Path(path.read_text()) for path in told]
        assert len(set(wheres)) == 2
        assert all((where / "rendezvous").exists() for where in wheres)

        fleet.stop(fleet.children[0])

        assert [where.exists() for where in wheres] == [False, True]
    assert not any(where.parent.exists() for where in wheres)


def test_it_goes_too_when_the_parent_is_killed(tmp_path):
    """The guard removes what the parent cannot."""
    arguments = [str(tmp_path / "logs"), str(tmp_path / "where"), LITTER]
    with subprocess.Popen([sys.executable, "-c", PARENT, *arguments], stderr=subprocess.DEVNULL) as parent:
        eventually((tmp_path / "where").exists)
        where = Path((tmp_path / "where").read_text())
        assert where.exists()
        parent.kill()

    eventually(lambda: not where.parent.exists())


def test_its_path_leaves_room_for_a_socket_where_the_usual_one_is_long(tmp_path, monkeypatch):
    """The kernel takes 107 bytes, and vLLM names its sockets by 36 characters."""
    usual = tmp_path / ("x" * 60)
    usual.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    with open_fleet(tmp_path / "logs", grace_s=5) as fleet:
        child = fleet.start(command(LITTER, str(tmp_path / "where")))
        eventually((tmp_path / "where").exists)

        assert child.temp == Path((tmp_path / "where").read_text())


def test_a_restart_continues_the_log_of_the_same_name(fleet):
    """What the first one said before it was killed is what one wants to read."""
    fleet.start(command("print('first')")).wait(20)
    again = fleet.start(command("print('second')"))
    again.wait(20)

    assert again.tail() == "first\nsecond"


def test_a_new_fleet_starts_a_new_log(tmp_path):
    """Logs do not grow from run to run."""
    for _ in range(2):
        with open_fleet(tmp_path) as fleet:
            child = fleet.start(command("print('hello')"))
            child.wait(20)

    assert child.tail() == "hello"


def test_stopping_twice_is_harmless(fleet):
    """A test may have stopped an engine that the block stops again."""
    child = fleet.start(command(SLEEPER))
    fleet.stop(child)

    fleet.stop(*fleet.children)

    assert child.exit_code == -signal.SIGTERM


def test_a_program_that_cannot_be_run_is_an_error(fleet):
    """And not a child."""
    with pytest.raises(FileNotFoundError):
        fleet.start(Command("ghost", ["/no/such/program"], {}, "http://127.0.0.1:9"))
    assert fleet.children == []
