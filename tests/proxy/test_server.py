"""The process: its end, its second look at the settings, and TLS; with a real router process and real sockets."""

import json
import re
import signal
import socket
import ssl
import time
from contextlib import contextmanager

import httpx
import pytest

from pdrelay_proxy.io.build import find_build
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from pdrelay_tools.simulated.rules import expected_text
from support.certificates import Authority
from support.router_process import KEY, RouterProcess
from support.sim import fleet, serving, sims, until

pytestmark = pytest.mark.processes


PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 5}


class Process(RouterProcess):
    """A router process that is asked, and told to read its settings again."""

    def reload(self):
        """SIGHUP, and wait for what it says to it."""
        before = len(self.reloads())
        self.signal(signal.SIGHUP)
        until(lambda: len(self.reloads()) > before)
        return self.reloads()[-1]

    def reloads(self):
        return re.findall(r".* the settings (?:were|stay) .*(?=\n)", self.said)

    def post(self, **options):
        return httpx.post(self.url + PATH, json=BODY, timeout=20, **options)

    def states(self):
        """Return what has become of each engine: one that is starting gets nothing beside those that serve."""
        rows = httpx.get(f"{self.url}/instances", headers=KEY, timeout=20).json()["instances"]
        return {row["id"]: row["state"] for row in rows}

    def decode_of_a_request(self):
        return self.post().headers["server-timing"].split('"')[3]


@pytest.fixture
def start(tmp_path):
    """Start routers in front of engines; they are killed at the end of the test if they are still there."""
    processes = []

    def starting(*args):
        processes.append(Process(tmp_path / f"router-{len(processes)}.log", *args))
        return processes[-1].started()

    yield starting
    for process in processes:
        process.kill()


@contextmanager
def stream(process, tokens):
    """A stream that has begun."""
    body = BODY | {"max_tokens": tokens, "stream": True}
    with httpx.Client() as client, client.stream("POST", process.url + PATH, json=body, timeout=20) as response:
        lines = response.iter_lines()
        yield lines, next(lines)


def text_of(lines):
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def ready(process):
    return httpx.get(f"{process.url}/ready", timeout=20).status_code


def test_sigterm_flips_readiness_and_serves_a_grace(start):
    """Requests still come from who has not heard of it; their connections are closed after the answer."""
    with fleet() as (_, _, flags):
        process = start(*flags, "--drain-grace", "60")
        assert ready(process) == 200
        process.signal(signal.SIGTERM)
        until(lambda: ready(process) == 503)
        late = process.post()
        process.signal(signal.SIGTERM)
        assert process.child.wait(timeout=20) == 0

    assert late.status_code == 200
    assert late.headers["connection"] == "close"


def test_after_the_grace_requests_are_refused_and_streams_finish(start):
    """So a rolling update loses no request: those that come late are told, and exit code 0 ends it."""
    with fleet(token_s=0.2) as (engines, _, flags):
        process = start(*flags, "--drain-grace", "0.5", "--shutdown-timeout", "60")
        with stream(process, 400) as (lines, first):
            process.signal(signal.SIGTERM)
            until(lambda: process.post().status_code == 503)
            refused = process.post()
            engines["d0"]._token_s = 0.0
            text = text_of([first, *lines])
        assert process.child.wait(timeout=20) == 0

    assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert text == expected_text(BODY | {"max_tokens": 400})


def test_a_router_without_requests_ends_at_once(start):
    """Idle connections do not keep it."""
    with fleet() as (_, _, flags), httpx.Client(timeout=20) as client:
        process = start(*flags)
        assert client.get(f"{process.url}/health").status_code == 200
        process.signal(signal.SIGINT)
        asked = time.monotonic()

        assert process.child.wait(timeout=20) == 0
        assert time.monotonic() - asked < 15  # of 30 that requests would get


@pytest.mark.parametrize("how", ["a second SIGTERM", "the timeout"])
def test_what_does_not_finish_is_cut_off(start, how):
    """At once by a second signal, else after the timeout; the stream says so and lacks its [DONE]."""
    with fleet() as (engines, _, flags):
        engines["d0"].inject(SimulatedFault(FaultKind.STALL, after=2))
        timeout = "1" if how == "the timeout" else "60"
        process = start(*flags, "--drain-grace", "0" if how == "the timeout" else "60", "--shutdown-timeout", timeout)
        with stream(process, 10) as (lines, _):
            process.signal(signal.SIGTERM)
            until(
                lambda: "shutting down: /ready answers 503" in process.said
            )  # its port may be closed by the time that it is asked
            if how == "a second SIGTERM":
                process.signal(signal.SIGTERM)
            asked = time.monotonic()
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
        assert process.child.wait(timeout=20) == 0
        assert time.monotonic() - asked < 15
        until(lambda: engines["d0"].log[-1].state == "hung up")
    assert "Traceback" not in process.said


def test_sighup_brings_engines_keys_and_limits_and_takes_them_away(start, tmp_path):
    """Without a restart, and without a failed request."""
    config, keys = tmp_path / "pdrelay.toml", tmp_path / "keys"
    with fleet() as (engines, _, (_, p0, _, d0)), serving(sims(0, 1)["d0"]) as d1:

        def write(*decode, more=""):
            listed = ", ".join(f'"{address}"' for address in decode)
            config.write_text(f'prefill = ["{p0}"]\ndecode = [{listed}]\n{more}')

        write(d0)
        process = start("--config", str(config))
        write(d0, d1)
        assert process.reload().endswith("the settings were read again")
        until(lambda: process.states() == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "healthy"))
        assert {process.decode_of_a_request() for _ in range(4)} == {"decode-0", "decode-1"}

        write(d1)
        process.reload()
        assert {process.decode_of_a_request() for _ in range(4)} == {"decode-1"}

        keys.write_text("me:sk-1-of-16-chars\n")
        write(d1, more=f'api_keys_file = "{keys}"\nmax_key_rate = 1')
        process.reload()
        key = {"headers": {"authorization": "Bearer sk-1-of-16-chars"}}
        assert [answer.status_code for answer in (process.post(), process.post(**key))] == [401, 200]
        assert process.post(**key).status_code == 429

        keys.write_text("me:sk-2-of-16-chars\n")
        write(d1, more=f'api_keys_file = "{keys}"\nlog_level = "debug"')
        process.reload()
        assert process.post(**key).status_code == 401
        assert process.post(headers={"authorization": "Bearer sk-2-of-16-chars"}).status_code == 200
        assert "sk-" not in process.said
        assert not any(sim.violations for sim in engines.values())


def test_a_bad_file_is_refused_as_a_whole_and_what_needs_a_restart_is_named(start, tmp_path):
    """One line in the log says why; the router goes on as before."""
    config = tmp_path / "pdrelay.toml"
    with fleet() as (_, _, (_, p0, _, d0)):
        good = f'prefill = ["{p0}"]\ndecode = ["{d0}"]\n'
        config.write_text(good)
        process = start("--config", str(config))
        for bad, says in (
            ("max_queu = 1", "max_queu is not a setting: did you mean max_queue?"),
            ('api_keys_file = "/nowhere"', "/nowhere cannot be read: No such file or directory"),
            ("max_key_rate = 1", "max_key_tokens_per_minute need api_keys_file"),
        ):
            config.write_text(f"prefill = []\n{bad}\n")
            line = process.reload()
            assert "the settings stay as they were: " in line
            assert says in line
            assert process.post().status_code == 200

        config.write_text(f'{good}host = "::"\nretries = 1\n')
        assert process.reload().endswith("the settings were read again; host needs a restart")
        assert process.reload().endswith("the settings were read again; host needs a restart")
        assert process.post().status_code == 200
        assert "Traceback" not in process.said


def test_tls_towards_clients_and_towards_engines(start, tmp_path):
    """With certificates that both sides check, and a new one for the router while it serves."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server = ours.sign("server")
    client = ours.sign("client")
    router = theirs.sign("router")
    engine = theirs.sign("engine")
    mutual = {"ssl_certfile": engine.cert, "ssl_keyfile": engine.key, "ssl_ca_certs": theirs.own.cert}
    engines = sims()
    with (
        serving(engines["p0"], ssl_cert_reqs=ssl.CERT_REQUIRED, **mutual) as p0,
        serving(engines["d0"], ssl_cert_reqs=ssl.CERT_REQUIRED, **mutual) as d0,
    ):
        towards = ("--engine-ca", theirs.own.cert, "--engine-cert", router.cert, "--engine-key", router.key)
        own = ("--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", ours.own.cert)
        config = tmp_path / "pdrelay.toml"
        config.write_text("")
        engines_at = ("--prefill", f"https://{p0}", "--decode", f"https://{d0}")
        process = start(*engines_at, *own, *towards, "--config", str(config))
        knows = ssl.create_default_context(cafile=ours.own.cert)
        with pytest.raises(httpx.TransportError):  # it has no certificate
            process.post(verify=knows)
        with pytest.raises(httpx.ConnectError):  # it does not know ours
            process.post()
        knows.load_cert_chain(client.cert, client.key)
        answer = process.post(verify=knows)
        assert answer.json()["choices"][0]["text"] == expected_text(BODY)

        serials = [_serial(process, knows)]
        ours.sign("server")  # in place
        config.write_text('api_keys_file = "/nowhere"')
        assert "the settings stay as they were" in process.reload()
        assert _serial(process, knows) == serials[0]
        config.write_text("")
        assert process.reload().endswith("the settings were read again")
        serials.append(_serial(process, knows))
        assert serials[0] != serials[1]
        assert process.post(verify=knows).status_code == 200
        process.kill()


def _serial(process, context):
    """Return the serial number of the certificate that a new connection is shown."""
    with httpx.Client(verify=context, timeout=20) as client, client.stream("GET", f"{process.url}/ready") as response:
        shown = response.extensions["network_stream"].get_extra_info("ssl_object")
        return shown.getpeercert()["serialNumber"]


def test_a_router_without_engines_says_so_once_and_serves_those_of_its_file(tmp_path):
    """With a file that names them after the start; without a file none could come, and it does not start."""
    file = tmp_path / "pdrelay.toml"
    file.write_text("")
    process = Process(tmp_path / "router.log", "--config", str(file), env={"ADMIN_API_KEY": ""})
    try:
        with fleet() as (_, _, flags):
            process.started()
            file.write_text("prefill = ['{1}']\ndecode = ['{3}']".format(*flags))
            process.reload()
            until(lambda: process.post().status_code == 200)
    finally:
        process.kill()
    lost = Process(tmp_path / "lost.log", env={"ADMIN_API_KEY": ""})

    assert process.said.count("there are no engines, and requests get 503") == 1
    assert lost.child.wait(timeout=60) == 2
    assert lost.said.startswith("pdrelay serve: there are no engines, and none can be added: write --prefill and")
    assert lost.said.count("\n") == 1


def test_the_log_begins_with_what_runs_and_every_line_is_the_routers_own(start):
    """A report of a fault is a log; and its readers know pdrelay, not the libraries that it is made of."""
    with fleet() as (_, _, flags):
        process = start(*flags, "--drain-grace", "0")
        process.terminate()
        assert process.child.wait(timeout=20) == 0

    lines = process.said.splitlines()
    assert lines[0].endswith(f" INFO pdrelay_proxy.commands.serve pdrelay {find_build()}")
    assert "uvicorn" not in process.said
    assert re.search(r"INFO pdrelay_proxy.server running on http://127\.0\.0\.1:\d+\n", process.said)


def test_a_taken_port_for_other_routers_is_one_sentence(tmp_path):
    """It is opened when the server starts: a traceback in one long line said so, and no reason."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        words = ("--decode", "a:1", "--peers", "127.0.0.1:9", "--peer-port", port)
        process = Process(tmp_path / "router.log", *words, env={"PDRELAY_PEER_SECRET": "of these routers"})
        code = process.child.wait(timeout=60)

    assert code != 0
    assert "(peer_port) cannot be opened: it is taken, or not permitted\n" in process.said
    assert "Traceback" not in process.said


def test_a_taken_port_is_one_sentence(tmp_path):
    """With the exit code of a setting that is wrong: a supervisor need not try again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = ["--decode", "127.0.0.1:1", "--port", str(port)]
        refused = RouterProcess(tmp_path / "router.log", *argv)
        code = refused.child.wait(timeout=60)

    sentence = f"pdrelay serve: the router cannot listen at 127.0.0.1 port {port}: Address already in use"
    assert (code, refused.said.splitlines()[-1]) == (2, sentence)
    assert "Traceback" not in refused.said
