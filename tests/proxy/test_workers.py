"""Several routers on one port, started by one supervisor: what they share, and what becomes of one that dies."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdrelay_proxy.supervisor import _cause
from pdrelay_tools.simulated.rules import expected_text
from support.cluster import free_ports
from support.router_process import KEY, RouterProcess
from support.sim import fleet, serving, sims, until

PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 3}
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not spread connections"),
]


class Workers(RouterProcess):
    """A supervisor with two workers, and what they have written."""

    running = r"running on (https?://\S+) with 2 workers"

    def __init__(self, folder, *args):
        self.admin_port = free_ports(1)[0]
        flags = ("--workers", "2", "--admin-port", str(self.admin_port), *args)
        super().__init__(folder / "workers.log", *flags, env={"TMPDIR": str(folder)})
        self.folder = folder

    @property
    def pids(self):
        """Of all workers that have ever served, by the order in which they began."""
        return [int(pid) for pid in re.findall(r"worker \d+ is process (\d+)", self.said)]

    def pid(self, number):
        return int(re.findall(rf"worker {number} is process (\d+)", self.said)[-1])

    def ask(self, number, path, body=None):
        """Ask a worker at its admin port."""
        url = f"http://127.0.0.1:{self.admin_port + number}{path}"
        method = "GET" if body is None else "POST"
        return httpx.request(method, url, json=body, headers=KEY, timeout=20)

    def order(self, number, verb, **body):
        answer = self.ask(number, f"/instances/{verb}", body)
        assert answer.status_code == 200, answer.text

    def rows(self, number):
        """Return what a worker says of the engines, by address: ids are its own."""
        return {row["address"]: row for row in self.ask(number, "/instances").json()["instances"]}

    def requests(self, number):
        """Return how many requests a worker has counted."""
        text = self.ask(number, "/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "pdrelay_requests_total")

    @contextmanager
    def client(self, number):
        """Yield a client with one connection, which the kernel has given to this worker."""
        for _ in range(200):
            with httpx.Client(base_url=self.url, timeout=20, limits=httpx.Limits(max_connections=1)) as client:
                name = client.post(PATH, json=BODY).headers["x-request-id"]
                if self.ask(number, f"/requests/{name}?engines=false").status_code == 200:
                    yield client
                    return
        raise AssertionError(f"none of 200 connections reached worker {number}")

    def end(self):
        pids = self.pids
        self.kill()  # the supervisor's end is that of its workers
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid):
    """Tell whether a process still runs: one that has ended may wait for somebody who asks how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_locked(folder):
    """Tell whether systemd-tmpfiles leaves a folder alone: it cleans one that it can lock (tmpfiles.d(5))."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Workers before p0, d0 and d1; tests leave them as they found them."""
    folder = tmp_path_factory.mktemp("workers")
    config = folder / "pdrelay.toml"
    config.write_text("")
    flags = ["--health-check-interval", "0", "--decode-policy", "least_loaded", "--drain-grace", "0"]
    with fleet(1, 2) as (engines, at, words), ExitStack() as stack:
        workers = Workers(folder, "--config", str(config), *words, *flags)
        stack.callback(workers.end)
        workers.config = config
        workers.started()
        until(lambda: all('pdrelay_peers{state="heard"} 1.0' in workers.ask(n, "/metrics").text for n in (0, 1)))
        yield workers, engines, at
        assert "Traceback" not in workers.said, workers.said


@pytest.fixture
def slow_streams(shared):
    """The decode engines take so long for a token that a stream lasts, until what this yields is called."""
    _, engines, _ = shared

    def take(seconds):
        for name in ("d0", "d1"):
            engines[name]._token_s = seconds

    take(0.2)
    yield partial(take, 0.0)
    take(0.0)


def test_an_engine_that_one_worker_is_told_of_is_used_and_left_by_all(shared):
    """They follow one store."""
    workers, _, at = shared
    known = {at[name] for name in ("p0", "d0", "d1")}
    with serving(sims(0, 1)["d0"]) as d2:
        workers.order(0, "add", type="decode", instance=d2)
        until(lambda: d2 in workers.rows(1))
        workers.order(1, "drain", type="decode", instance=d2)
        until(lambda: workers.rows(0)[d2]["state"] in ("draining", "drained"))
        assert not any("alone" in workers.rows(number)[d2]["why"] for number in (0, 1))
        workers.order(1, "remove", type="decode", instance=d2)
        until(lambda: set(workers.rows(0)) == known)

    assert set(workers.rows(1)) == known


@pytest.mark.usefixtures("slow_streams")
def test_a_stream_of_one_worker_is_load_for_the_other(shared):
    """Which sends its requests elsewhere, and does not call an engine drained that has requests of others."""
    workers, _, at = shared
    with workers.client(0) as zero, workers.client(1) as one:
        with zero.stream("POST", PATH, json=BODY | {"max_tokens": 400, "stream": True}) as response:
            busy = re.findall(r'"(decode-\d+)"', response.headers["server-timing"])[0]
            address = at[busy.replace("decode-", "d")]
            until(lambda: workers.rows(1)[address]["load"] == 1)
            used = {re.findall(r'"(decode-\d+)"', one.post(PATH, json=BODY).headers["server-timing"])[0] for _ in "abc"}
            workers.order(1, "drain", type="decode", instance=address)
            until(lambda: workers.rows(1)[address]["why"].startswith("another router has requests there"))
            state = workers.rows(1)[address]["state"]
        until(lambda: workers.rows(1)[address]["state"] == "drained")
        drained_by = [workers.rows(number)[address]["why"] for number in (0, 1)]
        workers.order(1, "undrain", type="decode", instance=address)

    assert busy not in used
    assert state == "draining"
    assert ["by this router alone: give the order to the others, too" in why for why in drained_by] == [False, True]


def test_each_worker_counts_its_own_and_together_they_count_all(shared):
    """What Prometheus adds up is what clients have sent; no request has the name of another."""
    workers, _, _ = shared
    before = [workers.requests(number) for number in (0, 1)]
    names = [httpx.post(workers.url + PATH, json=BODY, timeout=20).headers["x-request-id"] for _ in range(20)]
    until(lambda: sum(workers.requests(number) for number in (0, 1)) == sum(before) + 20)
    counts = [workers.requests(number) - before[number] for number in (0, 1)]
    knowing = [
        sum(workers.ask(number, f"/requests/{name}?engines=false").is_success for name in names) for number in (0, 1)
    ]

    assert len(set(names)) == 20
    assert counts == knowing


def test_a_reload_reaches_all_workers(shared):
    """One SIGHUP to the process that was started."""
    workers, _, _ = shared
    workers.config.write_text("max_rat = 1")
    workers.signal(signal.SIGHUP)
    until(lambda: workers.said.count("max_rat is not a setting") == 2)
    workers.config.write_text('retries = 1\nlog_format = "json"')
    workers.signal(signal.SIGHUP)
    until(lambda: workers.said.count("the settings were read again\n") == 2)

    assert workers.said.count("log_format needs a restart") == 2


def test_a_worker_that_is_killed_is_replaced_and_the_others_fail_nothing(shared):
    """Its successor knows the engines of the store, and has the settings of the others where these need a restart."""
    workers, _, _ = shared
    workers.config.write_text('log_format = "json"')
    with serving(sims(0, 1)["d0"]) as d2, workers.client(1) as one:
        workers.order(0, "add", type="decode", instance=d2)
        until(lambda: d2 in workers.rows(1))
        os.kill(workers.pid(0), signal.SIGKILL)
        answers = [one.post(PATH, json=BODY).status_code for _ in range(5)]
        until(lambda: workers.said.count("worker 0 is process") == 2 and _answers(workers, 0))
        until(lambda: d2 in workers.rows(0))
        with workers.client(0) as zero:
            answers.append(zero.post(PATH, json=BODY).status_code)
        workers.order(0, "remove", type="decode", instance=d2)
        until(lambda: d2 not in workers.rows(1))

    assert "worker 0 has ended (killed by SIGKILL): another one starts in 0.2 s" in workers.said
    assert set(answers) == {200}
    assert "{" not in [line[0] for line in workers.said.splitlines()]


def _answers(workers, number):
    try:
        return workers.ask(number, "/live").is_success
    except httpx.TransportError:
        return False


def test_sigterm_lets_the_streams_of_all_workers_finish(shared, slow_streams):
    """Also where every process gets it. The last test of this module: the workers end, and their store goes."""
    workers, _, _ = shared
    body = BODY | {"max_tokens": 400, "stream": True}
    (store,) = workers.folder.glob("pdrelay-*")
    assert is_locked(store)  # systemd removes old files of /tmp, and with them all engines that were added
    with ExitStack() as stack:
        clients = [stack.enter_context(workers.client(number)) for number in (0, 1)]
        answers = [stack.enter_context(client.stream("POST", PATH, json=body)) for client in clients]
        for pid in (workers.pid(0), workers.pid(1), workers.child.pid):  # as systemd does it
            os.kill(pid, signal.SIGTERM)
        until(lambda: workers.said.count("refusing new requests; 1 in flight") == 2)
        slow_streams()
        texts = [_text(answer) for answer in answers]

    assert workers.child.wait(timeout=60) == 0
    assert texts == [expected_text(BODY | {"max_tokens": 400})] * 2
    assert not any(map(is_alive, workers.pids))
    assert not store.exists()


def _text(response):
    events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_workers_end_when_their_supervisor_is_killed(tmp_path):
    """Nobody would start them again, and nobody would end them."""
    with fleet(1, 1) as (_, _, words), ExitStack() as stack:
        workers = Workers(tmp_path, *words, "--drain-grace", "0")
        stack.callback(workers.end)
        workers.started()
        workers.child.kill()
        workers.child.wait()
        until(lambda: not any(map(is_alive, workers.pids)), seconds=60)

    assert workers.said.count("the supervisor has gone: this worker ends, too") == 2


def test_what_is_wrong_is_said_once(tmp_path):
    """However many workers there are; the exit code is that of a usage error."""
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as stack:
        port = str(taken.getsockname()[1])
        wrong = {
            ("--decode", "a:1", "a:1"): "a:1 is already known as decode-0: name every engine once",
            ("--decode", "a:1", "--workers", "65"): "'65' is not a number of workers: write one from 1 to 64",
            ("--decode", "a:1", "--port", port): f"cannot listen at 127.0.0.1 port {port}: Address already in use",
            (
                "--decode",
                "a:1",
                "--admin-port",
                port,
            ): f"cannot listen at 127.0.0.1 port {port}: Address already in use",
        }
        started = {}
        for number, flags in enumerate(wrong):
            (folder := tmp_path / str(number)).mkdir()
            started[flags] = Workers(folder, *flags)
            stack.callback(started[flags].end)
        for flags, workers in started.items():
            assert workers.child.wait(timeout=60) == 2
            (line,) = [line for line in workers.said.splitlines() if line.startswith("pdrelay serve: ")]
            assert wrong[flags] in line
            assert "Traceback" not in workers.said


def test_a_worker_may_be_killed_by_a_signal_without_a_name():
    """The supervisor ended with a traceback, and with it all other workers."""
    assert _cause(-int(signal.SIGRTMIN) - 5) == f"killed by signal {signal.SIGRTMIN + 5}"


ENDS_AT_START = """
import os, signal
from pdrelay_proxy.io.worker_place import READY
from pdrelay_proxy.settings import Settings
from pdrelay_proxy.supervisor import run

def serve(place):
    print(place.number, flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.kill(os.getppid(), signal.SIGTERM)
    signal.sigwait({signal.SIGTERM})
    place.line.send(READY)
    return 0

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
raise SystemExit(run(Settings(workers=3, port=0, admin_port=0), serve))
"""


def test_an_end_that_is_ordered_while_the_first_worker_starts_starts_no_others():
    """They would not have heard of it, and the supervisor would wait for them for ever.

    What has started it may ignore the ends of children, which it inherits: it must still learn of that of its worker.
    """
    done = subprocess.run([sys.executable, "-c", ENDS_AT_START], stdout=subprocess.PIPE, timeout=60)

    assert (done.returncode, done.stdout) == (0, b"0\n")
