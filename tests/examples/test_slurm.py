"""examples/08-slurm: the batch scripts run here, with an srun and an scontrol that start simulated engines."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from support.bare_metal import EXAMPLES, command_lines, new_site, processes_of, program, secrets_in
from support.certificates import Authority
from support.cluster import free_ports, wait_until

FOLDER = EXAMPLES / "08-slurm"
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")  # each is a host: engines listen on their own address
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(500),
    pytest.mark.skipif(sys.platform != "linux", reason="all of 127/8 is this host"),
]
with_processes = pytest.mark.slow  # a router and engines start, each a Python of its own


@pytest.fixture
def site(tmp_path):
    """srun takes one task to a node; it ends when the task does, and hands signals on."""
    found = new_site(tmp_path)
    program(found, "scontrol", '[ "$1 $2" = "show hostnames" ] && echo "$3" | tr , "\\n"')
    text = f'echo "$@" >>{tmp_path}/srun.log\nwhile :; do case $1 in --*) shift;; *) break;; esac; done\nexec "$@"'
    program(found, "srun", text)
    return found


@contextmanager
def job(site, script, nodes, **more):
    """Run a batch script as slurmd does; yields the process of the script."""
    environment = {
        **site.environment, "SLURM_JOB_NODELIST": ",".join(nodes), "SLURM_SUBMIT_DIR": str(EXAMPLES), "MODEL": "m",
        "SECRETS": str(site.secrets), "DRAIN_S": "120", **more,
    }  # fmt: skip
    log = site.folder / f"{script}.log"
    with log.open("w") as out:
        argv = ["bash", str(FOLDER / script)]
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def fleet(site):
    """Two prefill engines and a decode engine; the ports are the site's, for several tests run at once."""
    router, prefill, _ = site.ports
    ports = {"ROUTER_PORT": str(router), "PORT": str(prefill), "SIDE_PORT": str(free_ports(1)[0])}
    with job(site, "fleet.sbatch", NODES, PREFILL_NODES="2", PRETENDED_TOKEN_S="0.02", **ports) as process:
        wait_until(lambda: _ready(site, 3), seconds=150, what="three engines are ready")
        yield process


def _ready(site, count):
    try:
        states = site.instances()
    except Exception:  # the router is not there yet
        return False
    return len(states) == count and site.ask().status_code == 200


@with_processes
def test_a_job_serves_and_ends_without_an_error(site, fleet):
    """Slurm's signal before the time limit: a stream that runs comes to its end, then everything goes."""
    asked = (site.folder / "srun.log").read_text().splitlines()
    with site.streaming(60) as came:
        fleet.send_signal(signal.SIGUSR1)
    assert fleet.wait(120) == 0

    assert came[-2] == "data: [DONE]"
    assert sum(line.startswith("data: {") for line in came) >= 60
    assert [word.split("--nodelist=")[1].split()[0] for word in sorted(asked)] == list(NODES)
    assert (site.folder / "fleet.sbatch.log").read_text().splitlines()[-1] == "fleet.sbatch: over"


@with_processes
def test_an_engine_of_another_job_joins_and_leaves(site, fleet):
    """It serves as one of the fleet meanwhile, and goes without an error for a client."""
    port = free_ports(1)[0]
    (own := site.folder / "own").mkdir()  # what the page says that such a job needs, and no admin key
    for name in ("connector-secret", "engine-key", "join-key"):
        shutil.copy(site.secrets / name, own / name)
    more = {"ROLE": "decode", "PDRELAY_ROUTER": site.router, "PORT": str(port), "SECRETS": str(own)}
    with job(site, "add-engine.sbatch", ["127.0.0.4"], **more) as process:
        wait_until(lambda: f"127.0.0.4:{port}" in site.instances(), seconds=150, what="the engine has joined")
        assert site.given(port)["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.4"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(120) == 0

    assert len(site.instances()) == 3
    assert site.ask().status_code == 200


@with_processes
def test_a_fleet_whose_router_ends_does_not_stay(site, fleet):
    """It would hold the nodes until its time is over. No argument shows a secret: every user of a node sees those."""
    lines = {pid: command_lines(pid) for pid in processes_of(fleet.pid)}
    (router,) = [pid for pid, words in lines.items() if "--api-keys-file" in words]
    os.kill(router, signal.SIGKILL)

    assert fleet.wait(120) == 1
    assert "the router has ended" in (site.folder / "fleet.sbatch.log").read_text()
    assert len(lines) >= 5
    assert [secrets_in(words) for words in lines.values()] == [[]] * len(lines)


def _engine_at(job, address):
    (pid,) = [pid for pid in processes_of(job.pid) if {"--kv-transfer-config", address} <= set(command_lines(pid))]
    return pid


@with_processes
def test_a_fleet_outlives_an_engine_but_not_the_last_of_a_role(site, fleet):
    """The router ejects the first; without the second the job would hold its nodes until its time is over."""
    address = f"{NODES[0]}:{site.ports[1]}"
    os.kill(_engine_at(fleet, NODES[0]), signal.SIGKILL)
    wait_until(lambda: site.instances()[address] != "healthy", seconds=100, what="the router has seen it")
    wait_until(lambda: site.ask().status_code == 200, seconds=100, what="the other serves")
    assert fleet.poll() is None
    os.kill(_engine_at(fleet, NODES[1]), signal.SIGKILL)

    assert fleet.wait(120) == 1
    assert "no prefill engine is left" in (site.folder / "fleet.sbatch.log").read_text()
    wait_until(lambda: processes_of(fleet.pid) == [], seconds=60, what="all its processes have ended")


@with_processes
@pytest.mark.parametrize(
    ("script", "nodes", "said"),
    [("fleet.sbatch", NODES, "engine is left"), ("add-engine.sbatch", NODES[:1], "the engine has ended")],
)
def test_a_job_whose_engines_cannot_start_ends(site, script, nodes, said):
    """At once, and not when a join gives up after half an hour; nothing of it stays on the node."""
    program(site, "vllm", "exit 3")
    router, prefill, _ = site.ports
    more = {"ROUTER_PORT": str(router), "PORT": str(prefill), "PDRELAY_ROUTER": site.router}
    with job(site, script, nodes, **more) as process:
        assert process.wait(120) == 1

    assert said in (site.folder / f"{script}.log").read_text()
    wait_until(lambda: processes_of(process.pid) == [], seconds=60, what="all its processes have ended")


@with_processes
def test_a_router_with_a_certificate_is_joined_over_https(site):
    """The node that it gets is not known before: engines trust this certificate, whatever name is in it."""
    pair = Authority(site.folder, "authority").sign("router", host="DNS:elsewhere.example")
    shutil.copy(pair.cert, site.secrets / "tls.crt")
    shutil.copy(pair.key, site.secrets / "tls.key")
    router, prefill, _ = site.ports
    log = site.folder / "fleet.sbatch.log"
    with job(site, "fleet.sbatch", NODES[:2], ROUTER_PORT=str(router), PORT=str(prefill)) as process:
        wait_until(lambda: log.read_text().count("the router sends requests to") == 2, seconds=150, what="both join")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(120) == 0

    assert f"clients ask https://{NODES[0]}:{router}" in log.read_text()


@pytest.mark.parametrize(
    ("script", "nodes", "more", "said"),
    [
        ("fleet.sbatch", NODES[:1], {}, "none is left to decode"),
        ("fleet.sbatch", NODES, {"PREFILL_NODES": "3"}, "none is left to decode"),
        ("fleet.sbatch", NODES, {"MODEL": ""}, "MODEL is what vllm serve is given"),
        ("add-engine.sbatch", NODES[:1], {}, "PDRELAY_ROUTER is the router"),
    ],
)
def test_a_job_that_cannot_serve_ends_at_once(site, script, nodes, more, said):
    """With a sentence in its log, and before anything is started."""
    with job(site, script, nodes, **more) as process:
        assert process.wait(120) != 0

    assert said in (site.folder / f"{script}.log").read_text()
    assert not (site.folder / "srun.log").exists()


@pytest.mark.parametrize("script", ["fleet.sbatch", "add-engine.sbatch"])
def test_slurms_directives_come_before_the_first_command(script):
    """sbatch reads none after it; the signal comes early enough for the drain."""
    lines = (FOLDER / script).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))

    assert lines[0] == "#!/bin/bash"
    assert [i for i, line in enumerate(lines) if line.startswith("#SBATCH") and i > first] == []
    (early,) = [int(line.rpartition("@")[2]) for line in lines if "--signal=B:USR1@" in line]
    assert early >= 600 + 20 + 60
