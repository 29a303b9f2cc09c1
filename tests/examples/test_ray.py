"""examples/09-ray: the driver runs here with simulated engines, on a Ray of one process, or on a real one.

PDRELAY_RAY_PYTHON names a Python that has Ray; this project's own environment has none.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.bare_metal import EXAMPLES, new_site, program, secrets_in
from support.certificates import Authority
from support.cluster import ROOT, free_ports, wait_until

SCRIPT = EXAMPLES / "09-ray" / "ray_fleet.py"
REAL = os.environ.get("PDRELAY_RAY_PYTHON")
GOES_ON = "cannot be reached, the others go on"  # the driver says so; the router's log has the first half, at times
pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]
with_processes = pytest.mark.slow  # a router and engines start, each a Python of its own


without_ray = pytest.mark.skipif(not REAL, reason="PDRELAY_RAY_PYTHON names no Python with Ray")


@pytest.fixture(params=["pretended", pytest.param("real", marks=without_ray)])
def python(request):
    """A Python, and what it finds Ray by."""
    if request.param == "real":
        return REAL, {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return sys.executable, {"PYTHONPATH": f"{ROOT}/tests/support/pretended_ray:{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture
def site(tmp_path):
    return new_site(tmp_path)


@contextmanager
def driver(site, python, *arguments):
    """Run the driver; yields its process and the file of its output."""
    program, more = python
    argv = [program, str(SCRIPT), "--model", "m", "--secrets", str(site.secrets), "--gpus", "0", "--cpus", "0"]
    argv += [
        "--host",
        "0.0.0.0" if program == REAL else "127.0.0.1",
        "--address",
        "local",
        "--pdrelay",
        f"{site.programs}/pdrelay",
    ]
    argv += ["--router-args", "--allowed-instances 0.0.0.0/0"]  # whatever address Ray finds this machine by
    argv += ["--vllm", f"{site.programs}/vllm", "--first-port", str(free_ports(1)[0]), *arguments]
    log = site.folder / f"driver-{len(list(site.folder.iterdir()))}.log"
    environment = site.environment | {"PRETENDED_TOKEN_S": "0.02", "DRAIN_S": "120"} | more
    with log.open("w") as out:
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            yield process, log
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def serves(process, log):
    assert process.poll() is None, log.read_text()
    return "clients ask" in log.read_text()


@with_processes
def test_a_fleet_serves_and_ends_without_an_error(site, python):
    """SIGTERM, as `ray job stop` sends it: a stream comes to its end first. Engines of another driver come and go."""
    with driver(site, python, "--port", str(site.ports[0]), "--decode", "2") as (process, log):
        wait_until(lambda: serves(process, log), seconds=150, what="the fleet serves")
        url = log.read_text().split("clients ask ")[1].split()[0]
        addresses = [
            line.split()[1] for line in log.read_text().splitlines() if line.startswith(("prefill ", "decode "))
        ]
        assert sorted(site.instances()) == sorted(addresses)
        assert site.ask().status_code == 200

        with driver(site, python, "--router", url, "--prefill", "0") as (another, second):
            wait_until(lambda: serves(another, second), seconds=150, what="one more engine has joined")
            assert len(site.instances()) == 4
            another.send_signal(signal.SIGTERM)
            assert another.wait(120) == 0, second.read_text()
        assert sorted(site.instances()) == sorted(addresses)

        with site.streaming(60) as came:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()

    assert [came[-2], sum(line.startswith("data: {") for line in came) >= 60] == ["data: [DONE]", True]
    given = [json.loads(path.read_text()) for path in site.folder.glob("[0-9]*.json")]
    assert len(given) == 4
    assert [secrets_in(one["argv"]) for one in given] == [[]] * 4


def pid_in(note):
    text = note.read_text()
    return json.loads(text)["pid"] if text.endswith("}") else None  # it is being written


@with_processes
def test_an_engine_that_ends_begins_again(site, python):
    """At its address, where the router knows it."""
    with driver(site, python, "--port", str(site.ports[0])) as (process, log):
        wait_until(lambda: serves(process, log), seconds=150, what="the fleet serves")
        (note,) = [path for path in site.folder.glob("[0-9]*.json") if "kv_producer" in path.read_text()]
        pid = json.loads(note.read_text())["pid"]
        before = site.instances()
        (address,) = [one for one in before if one.endswith(f":{note.stem}")]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid_in(note) != pid, seconds=150, what="it is started again")
        wait_until(lambda: site.instances()[address] == "healthy", seconds=150, what="it serves")

        assert site.instances().keys() == before.keys()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()


def started(site):
    """Return the pids of the engines that a program of `loading` has begun."""
    note = site.folder / "started"
    return [int(word) for word in note.read_text().split()] if note.exists() else []


def loading(site, *, prefill):
    """Engines that load for ever, and prefill engines that do something else."""
    text = f'case "$*" in *kv_producer*) {prefill};; esac\necho $$ >>{site.folder}/started\nexec sleep 1000'
    program(site, "vllm", text)


def have_ended(pids):
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        return False
    return True


ENDED_FIRST = """
from ray_fleet import Process
engine = Process()
engine.end(1)
try:
    engine.start(["sleep", "1"], {})
except RuntimeError as error:
    print(error, engine.exit_code())
"""


def test_an_engine_that_was_ended_before_it_began_does_not_begin():
    """It begins in a thread of its own: one that came late was ended by nobody, and held up the driver's end."""
    path = os.pathsep.join([str(ROOT / "tests/support/pretended_ray"), str(SCRIPT.parent)])
    argv = [sys.executable, "-c", ENDED_FIRST]
    done = subprocess.run(argv, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)

    assert done.stdout == "sleep is not started: the fleet ends None\n"


@with_processes
def test_a_start_that_is_stopped_leaves_no_engine(site, python):
    """An engine that loads holds its GPUs, and nobody knows it once the driver has gone."""
    loading(site, prefill=":")
    with driver(site, python, "--port", str(site.ports[0])) as (process, log):
        wait_until(lambda: len(started(site)) == 2, seconds=150, what="both engines load")
        process.send_signal(signal.SIGTERM)
        process.wait(120)  # its exit code is Ray's, if it waits for Ray just then

    assert "over" in log.read_text().splitlines(), log.read_text()
    wait_until(lambda: have_ended(started(site)), seconds=30, what="both engines have ended")


@with_processes
@pytest.mark.parametrize("others", [False, True], ids=["with a router", "for another's router"])
def test_a_start_that_fails_ends_the_other_engines(site, python, others):
    """At once, and not when `join` gives up after half an hour."""
    begun = f"until [ -s {site.folder}/started ]; do sleep 0.1; done"  # the other one is there to be ended
    loading(site, prefill=f"{begun}; exit 3")
    more = ("--router", site.router) if others else ("--port", str(site.ports[0]))
    with driver(site, python, *more) as (process, log):
        assert process.wait(150) == 1, log.read_text()

    assert "the engine has ended" in log.read_text()
    wait_until(lambda: have_ended(started(site)), seconds=30, what="the other engine has ended")


def lose(site, pid, python):
    """End an actor as the loss of its node does: the engine with it, and nobody says so."""
    if python[0] == REAL:
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    else:
        (site.folder / f"lost-{pid}").touch()
    os.kill(pid, signal.SIGKILL)


@with_processes
def test_a_fleet_outlives_a_node_that_is_lost(site, python):
    """The others serve, and the end does not wait for the one that has gone."""
    with driver(site, python, "--port", str(site.ports[0]), "--decode", "2") as (process, log):
        wait_until(lambda: serves(process, log), seconds=150, what="the fleet serves")
        note = next(path for path in site.folder.glob("[0-9]*.json") if "kv_consumer" in path.read_text())
        lose(site, pid_in(note), python)
        wait_until(lambda: GOES_ON in log.read_text(), seconds=100, what="the driver has seen it")
        wait_until(lambda: site.ask().status_code == 200, seconds=100, what="the others serve")

        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()
    assert log.read_text().count(GOES_ON) == 1
    assert log.read_text().count("has not ended by itself") == 1
    notes = [json.loads(path.read_text())["pid"] for path in site.folder.glob("[0-9]*.json")]
    wait_until(lambda: have_ended(notes), seconds=30, what="all engines have ended")


@with_processes
def test_a_router_with_a_certificate_is_joined_over_https(site, python):
    """Engines trust this certificate, whatever name is in it."""
    pair = Authority(site.folder, "authority").sign("router", host="DNS:elsewhere.example")
    shutil.copy(pair.cert, site.secrets / "tls.crt")
    shutil.copy(pair.key, site.secrets / "tls.key")
    with driver(site, python, "--port", str(site.ports[0]), "--once") as (process, log):
        assert process.wait(150) == 0, log.read_text()

    assert "clients ask https://" in log.read_text()
