"""``pdrelay chat``, against a router on a real socket: an answer as it comes, and below it how it was served."""

import io
import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdrelay_proxy.cli import main
from pdrelay_proxy.settings import Settings
from pdrelay_tools.chat.chat_client import ChatTurn
from pdrelay_tools.chat.command import facts_of
from pdrelay_tools.chat.kv_meter import KvMeter
from pdrelay_tools.served_by import LegTiming
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.cluster import free_ports
from support.sim import cluster

pytestmark = pytest.mark.edges


@pytest.fixture
def running(monkeypatch):
    """A router, and one engine of each role."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    with cluster(1, 1, Settings(admin_key="sesame", health_check_interval_s=0.0)) as found:
        yield found


@pytest.fixture
def chat(running, monkeypatch, capsys):
    """Pipe lines into the command; give its exit code, output and errors."""

    def talk(*lines, url=None, flags=()):
        piped = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped))
        code = main(["chat", "--url", url or running.router, *flags])
        return code, *capsys.readouterr()

    return talk


def asked(running):
    """What the decode engine was asked, question by question."""
    return [json.loads(entry.body) for entry in running.engines["d0"].log]


def test_an_answer_is_followed_by_how_it_was_served(chat):
    """Who asks why it was slow has the names at hand."""
    code, out, err = chat("Where does the river end?")

    answer, facts = out.splitlines()
    assert (code, err) == (0, "")
    assert answer
    assert re.fullmatch(
        r"  P prefill-0, D decode-0, first token after \d+ ms, (\d+\.\d|unknown) tokens/s, KV moved: unknown "
        r"\(the engines have no metric for it, or cannot be reached from here\)",
        facts,
    )


def test_the_conversation_is_kept(chat, running):
    """Until /new, which keeps the system message."""
    chat("One?", "", "Two?", "/new", "Three?", flags=["--system", "Be brief.", "--max-tokens", "3"])

    roles = [[message["role"] for message in body["messages"]] for body in asked(running)]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert {body["max_tokens"] for body in asked(running)} == {3}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "gpt"], "does not serve gpt: it serves sim"),
        (["--url", "ftp://x"], "'ftp://x' is not the URL of a server"),
        (["--max-tokens", "0"], "'0' is not a number of tokens"),
    ],
)
def test_a_wrong_flag_is_one_sentence(chat, capsys, flags, says):
    """Before anything is typed."""
    try:
        code, _, err = chat("One?", flags=flags)
    except SystemExit as exc:  # argparse's
        code, err = exc.code, capsys.readouterr().err

    assert code in (1, 2)
    assert says in err
    assert err.startswith("pdrelay chat: ")
    assert err.count("\n") == 1


def test_a_router_that_is_not_there_is_one_sentence(chat):
    """It may have another port."""
    (port,) = free_ports(1)
    code, out, err = chat("One?", url=f"127.0.0.1:{port}/v1")

    assert (code, out) == (1, "")
    assert err.startswith(f"pdrelay chat: the router at http://127.0.0.1:{port} cannot be asked: ")


def test_a_key_is_asked_for_and_taken_from_the_environment(chat, monkeypatch, tmp_path):
    """A key among the arguments would be seen by every user of the machine."""
    (tmp_path / "keys").write_text("me:sesame-for-clients\n")
    with cluster(1, 1, Settings(api_keys_file=str(tmp_path / "keys"))) as locked:
        code, _, err = chat("One?", url=locked.router)
        monkeypatch.setenv("OPENAI_API_KEY", "sesame-for-clients")
        again = chat("One?", url=locked.router)

    assert code == 1
    assert "answers with status 401" in err
    assert "OPENAI_API_KEY" in err
    assert again[0] == 0


@pytest.mark.parametrize(
    ("kind", "says"),
    [(FaultKind.STATUS, "answers with status 503: "), (FaultKind.ERROR_EVENT, "the answer broke off: injected")],
)
def test_an_answer_that_fails_is_one_sentence(chat, running, kind, says):
    """What follows in a pipe builds on it, and is not asked."""
    after = None if kind is FaultKind.STATUS else 1
    running.engines["d0"].inject(SimulatedFault(kind, after=after, status=503))
    code, _, err = chat("One?", "Two?")

    assert code == 1
    assert says in err
    assert err.count("\n") == 1


class Impatient(io.StringIO):
    """Somebody who presses Ctrl-C at the first word."""

    pressed = False

    def write(self, text):
        super().write(text)
        if text.strip() and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return len(text)


def test_ctrl_c_stops_the_answer_and_not_the_conversation(chat, running, monkeypatch):
    """What was written until then belongs to it."""
    screen = Impatient()
    monkeypatch.setattr(sys, "stdout", screen)
    code, *_ = chat("One?", "Two?")

    assert code == 0
    assert screen.getvalue().count("; stopped\n") == 1
    assert [len(body["messages"]) for body in asked(running)] == [1, 3]


class CountingEngine(BaseHTTPRequestHandler):
    """A router's list of two engines, and either engine's metrics, which go up from look to look."""

    looks = 0
    others = 0

    def do_GET(self):
        cls = type(self)
        address = "{}:{}".format(*self.server.server_address)
        if self.path == "/instances":
            rows = [{"id": name, "address": address} for name in ("prefill-0", "decode-0")]
            body = json.dumps({"instances": rows})
        else:
            cls.looks += 1
            ended = 0 if cls.looks <= 4 else 1 + self.others
            body = f"vllm:pdrelay_bytes_transferred_total {2048.0 * ended}\nvllm:request_success_total {float(ended)}\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@contextmanager
def serving(handler):
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield "http://{}:{}".format(*server.server_address)
        finally:
            server.shutdown()


@pytest.mark.parametrize(("others", "said"), [(0, "4,096 bytes"), (1, "8,192 bytes, those of other requests included")])
def test_bytes_are_what_both_engines_count_once_they_count_the_request(monkeypatch, others, said):
    """They publish a moment after the answer; and nobody keeps others from asking meanwhile."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    slept = []
    with serving(type("Engine", (CountingEngine,), {"looks": 0, "others": others})) as url:
        meter = KvMeter(url)
        meter.start()

        assert meter.moved(["prefill-0", "decode-0"], sleep=slept.append) == said
        assert slept


class SilentEngine(CountingEngine):
    """The same list, and engines that begin to answer and never end."""

    def do_GET(self):
        if self.path == "/instances":
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b"vllm:request_success_total 1.0\n")
                time.sleep(0.05)


def test_engines_that_never_end_an_answer_hold_nothing_up(monkeypatch):
    """Whoever types a question shall not wait for the counters of all engines in turn."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    with serving(SilentEngine) as url:
        meter = KvMeter(url)
        meter.start()

        assert meter.moved(["prefill-0"]).startswith("unknown (the engines have no metric")


class ServingEngine(CountingEngine):
    """A router, too."""

    words = "Yes."

    def do_GET(self):
        if self.path != "/v1/models":
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("server-timing", 'prefill;desc="prefill-0", decode;desc="decode-0"')
        self.end_headers()
        event = {"choices": [{"delta": {"content": self.words}}]}
        self.wfile.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())


def test_a_letter_that_the_terminal_has_not_fails_no_answer(chat, monkeypatch):
    """A model answers in any language."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)
    monkeypatch.setattr(sys, "stdout", screen)
    with serving(type("Engine", (ServingEngine,), {"words": "Łódź é"})) as url:
        code, *_ = chat("One?", url=url)

    assert code == 0
    assert screen.buffer.getvalue().startswith("?ód? é\n".encode("latin-1"))


class InterruptedEngine(ServingEngine):
    """While it is asked whether it has counted a request, Ctrl-C is pressed, once."""

    def do_GET(self):
        if type(self).looks >= 2 and self.key.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        with suppress(OSError):  # the command has hung up
            super().do_GET()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_bytes_are_counted_ends_no_conversation(chat):
    """The answer is there, and the next question may be typed already."""
    with serving(type("Engine", (InterruptedEngine,), {"looks": 0, "key": threading.Lock()})) as url:
        code, out, err = chat("One?", "Two?", url=url)

    assert (code, err) == (0, "")
    assert out.count("Yes.\n") == 2
    assert out.count("KV moved: unknown (stopped)") == 1


def test_without_the_admin_key_the_bytes_are_unknown(running, monkeypatch, tmp_path):
    """Nothing else is missing then."""
    monkeypatch.delenv("ADMIN_API_KEY")
    monkeypatch.chdir(tmp_path)  # without the key of a `pdrelay up`
    meter = KvMeter(f"http://{running.router}")
    meter.start()

    assert meter.moved(["decode-0"]) == "unknown (without the admin key)"


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (ChatTurn(), "P and D unknown, no token, tokens/s unknown, KV moved: unknown (the router does not say who"),
        (
            ChatTurn("a b", {"decode": LegTiming("d", 3.0), "reason": LegTiming("short", None)}, 3, 0.1, 0.3, True),
            "D d alone (short), first token after 100 ms, 10.0 tokens/s, KV moved: 5 bytes",
        ),
        (
            ChatTurn("a", {"decode": LegTiming("d", 3.0), "prefill": LegTiming("p", 1.0)}, None, 0.1, 0.1, True),
            "P p, D d, first token after 100 ms, tokens/s unknown, KV moved: 5 bytes",
        ),
    ],
)  # fmt: skip
def test_what_is_not_known_is_said_so(turn, says):
    """Zero would be an invention."""
    assert facts_of(turn, "5 bytes").startswith(says)
