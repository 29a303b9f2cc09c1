"""``pdrelay why``, against a router on a real socket."""

import argparse
import json
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from opentelemetry.sdk.trace import SpanProcessor

from pdrelay_proxy.console.router_client import run_command
from pdrelay_proxy.features.why.command import add_arguments, text
from pdrelay_proxy.features.why.feature import WhyFeature
from pdrelay_proxy.features.why.traces import Traces
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.sim import cluster, until

pytestmark = pytest.mark.edges


ROW = {"what": "prefill leg", "where": "prefill-0", "leg": "", "begin_ms": 1.0, "duration_ms": 60.0, "note": ""}
PART = {"what": "compute", "where": "prefill-0", "leg": "prefill-0", "begin_ms": 11.0, "duration_ms": 30.0,
        "note": "9 tokens"}  # fmt: skip
REQUEST = {
    "request_id": "pdrelay-0", "client_id": "mine", "path": "/v1/completions", "state": "over", "status": 200,
    "outcome": "ok", "mode": "pull", "single_reason": None, "began_at": 0.5, "duration_ms": 61.0,
    "retries": ["prefill-1 http_5xx"], "moves": ["decode-1 moved after 40.0 ms"], "error": None,
    "rows": [ROW, PART], "notes": ["decode-0: it is gone"],
}  # fmt: skip


@pytest.fixture
def why(command):
    return partial(command, "why")


def served(running):
    body = {"prompt": "a", "max_tokens": 2}
    return httpx.post(f"http://{running.router}/v1/completions", json=body, timeout=20).headers["x-request-id"]


def test_a_request_is_shown_as_rows(running, why):
    """With what the client got, and what each part took."""
    name = served(running)
    code, out, err = why(name)

    assert (code, err) == (0, "")
    assert out.startswith(f"{name}\n/v1/completions  200 ok  pull  ")
    assert "prefill leg prefill-0" in out
    assert "decode leg decode-0" in out


def test_an_unknown_request_is_an_error(why):
    """In a sentence."""
    code, out, err = why("pdrelay-nobody")

    assert (code, out) == (1, "")
    assert err.startswith("pdrelay why: ")
    assert "There is no request 'pdrelay-nobody' among those under way and the last 0 that are over" in err


def test_the_parts_of_a_leg_are_below_it_with_a_bar():
    """As long as its share of the whole."""
    lines = text({"requests": [REQUEST], "omitted": 2}).splitlines()

    assert lines[0] == "pdrelay-0 (client: mine)"
    assert lines[1] == "/v1/completions  200 ok  pull  1970-01-01 00:00:00.500Z  61.0 ms"
    assert lines[2:4] == ["retried: prefill-1 http_5xx", "cut: decode-1 moved after 40.0 ms"]
    assert lines[5].split("#")[0].split() == ["1.0", "60.0", "prefill", "leg", "prefill-0"]
    assert lines[6].split() == ["11.0", "30.0", "compute", "#" * 15, "9", "tokens"]
    assert lines[7] == "note: decode-0: it is gone"
    assert lines[-1] == "2 more have this name."


@pytest.mark.parametrize("words", ["\x1b[2J", "\x9b2J", "\x07", "\u202e", "\r"])
def test_words_of_engines_do_not_move_the_cursor(monkeypatch, capsys, words):
    """An engine's error may repeat what a client has sent, and the terminal is an operator's."""
    monkeypatch.setenv("ADMIN_API_KEY", "k")
    code = run_command("why", access(), lambda _: text({"requests": [REQUEST | {"error": f"a{words}b"}], "omitted": 0}))

    assert code == 0
    assert "error: a" in (out := capsys.readouterr().out)
    assert words not in out


def access():
    """What the flags say when none is given."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["pdrelay-0"])


WAIT = 0.2  # seconds


def upload(running):
    """Send the second half of a body later, and return the name of the request and how long its client waited."""
    body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode()
    host, port = running.router.split(":")
    began = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=30) as client:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Request-Id: slow"
        )
        client.sendall(f"{head}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:9])
        time.sleep(WAIT)
        client.sendall(body[9:])
        while client.recv(65536):
            pass
    return "slow", time.monotonic() - began


def streamed(running, *, stream=True):
    began = time.monotonic()
    body = {"prompt": "a", "max_tokens": 2, "stream": stream}
    response = httpx.post(f"http://{running.router}/v1/completions", json=body, timeout=30)
    return response.headers["x-request-id"], time.monotonic() - began


def queued(running):
    """Ask while another request has the only place, which it keeps for two tokens' time."""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(streamed, running)
        # One that is done already was not seen while it lasted.
        until(
            lambda: first.done() or any(entry.state == "open" for sim in running.engines.values() for entry in sim.log)
        )
        found = streamed(running)
        first.result()
    return found


class SlowProcessor(SpanProcessor):
    """Takes its time when a span of this name ends, once, on the router's thread: it is busy elsewhere."""

    def __init__(self, name):
        self.name = name

    def on_end(self, span):
        if span.name == self.name:
            self.name = None
            time.sleep(WAIT)


def busy_after(name):
    return {"make_features": [partial(WhyFeature, make_traces=partial(Traces, frozenset(), SlowProcessor(name)))]}


def retried(running):
    """Ask while each prefill engine fails once."""
    for sim in running.engines.values():
        if sim.role == "prefill":
            sim.inject(SimulatedFault(FaultKind.STATUS, times=1))
    return streamed(running)


def spent(ask, options, settings):
    """Ask a router; return the milliseconds of each row, of all by the router's clock, and of the client's."""
    chosen = Settings(admin_key="sesame", health_check_interval_s=0.0, **settings)
    with cluster(2, 1, chosen, **(options() if callable(options) else options)) as running:
        name, waited = ask(running)
        headers = {"X-Api-Key": "sesame"}
        (found,) = httpx.get(f"http://{running.router}/requests/{name}", headers=headers, timeout=20).json()["requests"]

    times = Counter()
    for each in found["rows"]:
        if not each["leg"]:
            times[each["what"]] += each["duration_ms"]
    return times, found["duration_ms"], waited * 1e3


@pytest.mark.parametrize(
    ("ask", "rows", "options", "settings"),
    [
        (upload, {"receive the body"}, {}, {}),
        (queued, {"queue", "stream"}, {"token_s": WAIT}, {"max_concurrency": 1}),  # behind the stream of another
        (streamed, {"prefill leg"}, {"prefill_s": WAIT}, {}),
        (partial(streamed, stream=False), {"decode leg"}, {"token_s": WAIT}, {}),
        (streamed, {"stream"}, {"token_s": WAIT}, {}),
        # What the router does by itself is late where it has no time for it.
        (streamed, {"hand over"}, lambda: busy_after("prefill leg"), {}),
        (retried, {"begin again"}, lambda: busy_after("prefill leg"), {}),
        (partial(streamed, stream=False), {"answer"}, lambda: busy_after("decode leg"), {}),
    ],
)
def test_200_ms_show_in_the_row_where_they_were_spent(monkeypatch, ask, rows, options, settings):
    """In no other one.

    The rows add up to what the client has waited, within 5 % and what a busy machine takes to hang up. Such a machine
    may spend as long in another row, too: then the request is sent anew. A row that is wrong is so each time.
    """
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    for _ in range(5):
        times, duration, waited = spent(ask, options, settings)
        long = {what for what, milliseconds in times.items() if milliseconds >= WAIT * 1e3 * 0.95}
        if long == rows and sum(times.values()) <= waited * 1.05:
            break

    assert long == rows
    assert sum(times.values()) == pytest.approx(duration, abs=1)
    assert sum(times.values()) <= waited * 1.05
