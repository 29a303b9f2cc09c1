"""The preStop hook of an engine's pod, as the chart runs it, against an engine that answers over a socket."""

import contextlib
import http.server
import importlib.util
import io
import socket
import subprocess
import sys
import threading
import time

import pytest

from support.helm_chart import CHART, Chart
from support.helm_objects import container, pool, templates
from support.helm_pods import drains

pytestmark = pytest.mark.processes


class Engine:
    """Shows metrics; each answer is the next of a list, and the last one stays."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0

    def text(self):
        self.asked += 1
        numbers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        labels = 'engine="0",model_name="m"'
        return "# HELP x\n" + "".join(f"vllm:{name}{{{labels}}} {value}\n" for name, value in numbers.items())


class InMemory(Engine):
    """One whose second answer and those behind it take so many seconds, and its hook's clock."""

    def __init__(self, *answers, later_s=0.0):
        super().__init__(*answers)
        self.now = 0.0
        self._later_s = later_s

    def open(self, _, *, patience_s):
        text = self.text()
        if self.asked > 1:
            self.sleep(min(self._later_s, patience_s))
            if self._later_s > patience_s:
                raise TimeoutError
        return contextlib.closing(io.BytesIO(text.encode()))

    def sleep(self, seconds):
        self.now += seconds


IDLE = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "pdrelay_leases_held": 0.0}
BUSY = IDLE | {"num_requests_running": 2.0}
QUEUED = IDLE | {"num_requests_waiting": 1.0}
LENDING = IDLE | {"pdrelay_leases_held": 3.0}
SILENT = {"num_requests_running": 0.0, "num_requests_waiting": 0.0}


@contextlib.contextmanager
def serving(engine):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = engine.text().encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def hook(role, port, *more, seconds=20):
    """Run the hook; return what it said and how long it took."""
    times = ["--settle=0", "--lease=30", f"--seconds={seconds}", "--pause=0.05"]
    argv = [sys.executable, str(CHART / "files" / "drain.py"), f"--role={role}", f"--port={port}", *times, *more]
    started = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, time.monotonic() - started


@pytest.fixture
def drain():
    """The same in simulated time; returns what it said and how long it took."""
    spec = importlib.util.spec_from_file_location("drain", CHART / "files" / "drain.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(role, engine, *, settle=0.0, lease=30.0, seconds=20.0):
        times = {"settle_s": settle, "lease_s": lease, "seconds": seconds, "pause_s": 0.05}
        said = script.drain(role, engine, **times, clock=lambda: engine.now, sleep=engine.sleep)
        return said, engine.now

    return run


@pytest.fixture(autouse=True)
def own_output(monkeypatch):
    """In a container the hook writes to the engine's log; here that would be the log of whoever runs the tests."""
    monkeypatch.setenv("PDRELAY_DRAIN_LOG", "/dev/stdout")


@pytest.mark.parametrize(
    ("role", "answers", "looks"),
    [
        ("prefill", [IDLE], 2),
        ("prefill", [BUSY, QUEUED, LENDING, LENDING, IDLE], 6),
        ("prefill", [IDLE, LENDING, IDLE], 4),  # vLLM's numbers are those of its last step: zero must be seen twice
        ("decode", [BUSY, QUEUED, IDLE], 4),
        ("decode", [LENDING, IDLE], 3),  # it has turned: under its decode label it served prefill
        ("decode", [SILENT], 2),  # nobody reads from another connector's decode engine
    ],
)
def test_it_waits_until_nothing_is_left(drain, role, answers, looks):
    """Requests first, and the KV that nobody has read yet: a turned pod lends as well, whatever its label."""
    said, _ = drain(role, engine := InMemory(*answers))

    assert said.startswith("drained after")
    assert engine.asked == looks


def test_it_waits_for_routers_to_hear_of_it(drain):
    """An engine that is idle when its pod is deleted may get a request a moment later."""
    _, took = drain("decode", InMemory(IDLE), settle=1)

    assert took == pytest.approx(1)


@pytest.mark.parametrize(("answers", "left"), [([LENDING], "3 leases"), ([BUSY], "2 requests")])
def test_it_ends_with_its_time_and_says_what_is_left(drain, answers, left):
    """The pod's grace is longer than that: nothing is killed in between."""
    said, took = drain("prefill", InMemory(*answers), seconds=3)

    assert said == f"not drained in 3 s: {left}"
    assert took == pytest.approx(3)


def test_a_look_that_the_end_cuts_short_does_not_hide_what_is_left(drain):
    """The last look has only the time that is left: on a busy node that was too little, and the log said no more."""
    said, _ = drain("prefill", InMemory(LENDING, later_s=3.5), seconds=3)

    assert said == "not drained in 3 s: 3 leases"


def test_leases_that_are_not_shown_are_waited_for_by_the_clock(drain):
    """Another connector does not count them."""
    said, took = drain("prefill", InMemory(SILENT), lease=1)

    assert said.startswith("drained after")
    assert took >= 1


def test_an_engine_where_nobody_listens_is_not_waited_for():
    """It loads its model, or its server has ended: nobody has sent it anything."""
    with socket.socket() as taken:  # bound and not listening: refuses, and nobody else can get its port
        taken.bind(("127.0.0.1", 0))
        said, _ = hook("prefill", taken.getsockname()[1])

    assert "drained after" in said
    assert "not drained" not in said


def test_a_proxy_is_not_asked(monkeypatch):
    """HTTP_PROXY is there for downloads; through it the engine would never be found idle."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(Engine(IDLE)) as port:
        said, _ = hook("decode", port, seconds=5)

    assert "not drained" not in said


def test_an_engine_that_does_not_answer_is_waited_for():
    """It may be busy; if it is dead the kubelet ends the pod anyway."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said, _ = hook("decode", silent.getsockname()[1], seconds=1)

    assert said == "pdrelay drain: not drained in 1 s: an answer to /metrics\n"


def test_a_pod_of_an_engine_of_several_waits_for_its_leader(monkeypatch):
    """The leader answers requests, and cannot without this pod; one that is gone needs nothing any more."""
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "127.0.0.1")
    with serving(engine := Engine(BUSY, LENDING, IDLE)) as port:
        said, _ = hook("prefill", port, "--of-leader")
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "a-leader-that-is-gone.invalid")
    gone, took = hook("prefill", port, "--of-leader")

    assert ("drained after" in said, "not drained" in said, engine.asked) == (True, False, 4)
    assert "drained after" in gone
    assert "not drained" not in gone
    assert took < 15  # of 20


def test_pods_that_may_turn_have_the_time_of_both_roles():
    """A pod keeps the times of the pool it was made in: turned, it has the other role's work to end."""
    values = {
        "returnKv": {"enabled": True},
        "router": {"settings": {"roles": "auto", "target_ttft_s": 2, "target_itl_s": 0.05}},
        "connector": {"leaseSeconds": 45},
        "prefill": {"drain": {"settleSeconds": 7, "requestSeconds": 100}},
        "decode": {"drain": {"settleSeconds": 5, "requestSeconds": 400}},
    }
    found = templates(pool(objects := Chart().objects(values), "prefill")) + templates(pool(objects, "decode"))
    hooks = [container(one)["lifecycle"]["preStop"]["exec"]["command"] for one in found]

    assert drains(objects) == []
    assert [[arg for arg in hook if arg.startswith("--seconds=")] for hook in hooks] == [["--seconds=450"]] * 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_chart_calls_it_with_arguments_that_it_takes(role):
    """The very command of the pod, with the port of this engine and less time."""
    command = container(templates(pool(Chart().objects(), role))[0])["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["python3", "/opt/pdrelay/drain.py"]
    with serving(Engine(IDLE)) as port:
        args = [
            f"--port={port}" if a.startswith("--port=") else "--settle=0" if a.startswith("--settle=") else a
            for a in command[2:]
        ]
        done = subprocess.run(
            [sys.executable, str(CHART / "files" / "drain.py"), *args],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert (done.returncode, done.stderr) == (0, "")
