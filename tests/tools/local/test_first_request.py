"""What is read from an answer: never more than is there."""

import json

import httpx
import pytest

from pdrelay_tools.local import first_request
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.first_request import send_first_request
from pdrelay_tools.served_by import LegTiming, metric_total, parse_server_timing

ANSWER = {"choices": [{"message": {"role": "assistant", "content": "to the sea"}}]}
TIMING = 'prefill;desc="prefill-0";dur=41.2, decode;desc="decode-0";dur=12.3'


class Machine:
    """A router and a decode engine; `before` and `after` are the engine's metrics around the request."""

    def __init__(self, *, answer=ANSWER, status=200, before="", after="", error=None):
        self.answer = answer
        self.status = status
        self.metrics = before
        self.after = after
        self.error = error
        self.asked = []

    def __call__(self, request):
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics)
        if self.error:
            raise self.error
        self.asked.append(json.loads(request.content))
        self.metrics = self.after
        return httpx.Response(self.status, json=self.answer, headers={"server-timing": TIMING})


@pytest.fixture
def played(monkeypatch):
    """Let the next `ask` reach a machine that is played; the time for late metrics shrinks."""
    real_client = httpx.Client
    monkeypatch.setattr(first_request, "METRICS_WAIT_S", 0.2)

    def play(**options):
        machine = Machine(**options)
        monkeypatch.setattr(
            first_request.httpx, "Client", lambda **_: real_client(transport=httpx.MockTransport(machine))
        )
        return machine

    return play


def answer():
    return send_first_request("http://router", ["http://decode"], "tiny")


def test_an_answer_tells_where_it_was_made_and_what_was_moved(played):
    """This is what `pdrelay up` shows."""
    machine = played(
        before='vllm:pdrelay_bytes_transferred_total{engine="0"} 1000.0\n',
        after='vllm:pdrelay_bytes_transferred_total{engine="0"} 67536.0\n',
    )

    found = answer()

    assert found.text == "to the sea"
    assert found.legs == {"prefill": LegTiming("prefill-0", 41.2), "decode": LegTiming("decode-0", 12.3)}
    assert found.bytes_moved == 66536
    assert machine.asked[0]["temperature"] == 0


def test_without_a_metric_the_bytes_are_unknown(played):
    """Zero would be an invention."""
    played(before="# nothing\n", after="# nothing\n")

    assert answer().bytes_moved is None


def test_a_metric_that_does_not_move_is_zero_bytes(played):
    """The engine says so, also a moment later."""
    text = "vllm:pdrelay_bytes_transferred_total 5.0\n"
    played(before=text, after=text)

    assert answer().bytes_moved == 0


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (httpx.ReadTimeout("slow"), "the first request got no answer within 120 s"),
        (httpx.ConnectError("refused"), "did not get through to http://router/v1/chat/completions: refused"),
    ],
)
def test_a_request_that_fails_is_one_sentence(played, error, sentence):
    """Not a traceback of an HTTP library."""
    played(error=error)

    with pytest.raises(LocalError, match=sentence):
        answer()


def test_an_error_status_shows_what_the_router_said(played):
    """It knows the reason."""
    played(status=503, answer={"error": {"message": "no decode engine"}})

    with pytest.raises(LocalError, match=r"status 503: .*no decode engine"):
        answer()


@pytest.mark.parametrize("body", [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, []])
def test_an_answer_that_is_none_is_shown(played, body):
    """Whoever is at that port, it is not a chat model."""
    played(answer=body)

    with pytest.raises(LocalError, match="answered with something else"):
        answer()


@pytest.mark.parametrize(
    ("header", "legs"),
    [
        ("", {}),
        ('prefill;desc="prefill-0"', {"prefill": LegTiming("prefill-0", None)}),
        ('mode;desc="single", reason;desc="max_tokens", decode;desc="d";dur=3', {
            "mode": LegTiming("single", None), "reason": LegTiming("max_tokens", None), "decode": LegTiming("d", 3.0)}),
        ("gibberish", {}),
        ('decode;desc="d";dur=1.2.3', {"decode": LegTiming("d", 1.2)}),
        ('decode;desc="d";dur=...', {"decode": LegTiming("d", None)}),
    ],
)  # fmt: skip
def test_server_timing_is_read_as_far_as_it_is_understood(header, legs):
    """An older router says less."""
    assert parse_server_timing(header) == legs


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("", None),
        ("# HELP vllm:pdrelay_bytes_transferred_total Bytes.\n", None),
        ("vllm:pdrelay_bytes_transferred_total 7.0\n", 7),
        (
            'vllm:pdrelay_bytes_transferred_total{e="0"} 7.0\nvllm:pdrelay_bytes_transferred_total{e="1"} 1.5e+06\n',
            1500007,
        ),
        ('vllm:nixl_bytes_transferred_bucket{le="1"} 9.0\nvllm:nixl_bytes_transferred_sum{e="0"} 64.0\n', 64),
        ("vllm:nixl_bytes_transferred_sum 64.0\nvllm:pdrelay_bytes_transferred_total 64.0\n", 64),
        ("vllm:pdrelay_bytes_transferred_total_created 1e9\n", None),
        ("vllm:pdrelay_bytes_transferred_total NaN\n", None),
        ("vllm:pdrelay_bytes_transferred_total +Inf\n", None),
        ("vllm:pdrelay_bytes_transferred_total many\n", None),
    ],
)  # fmt: skip
def test_bytes_are_summed_over_labels(text, total):
    """Of the metric of whichever connector is there; ours may show both."""
    assert metric_total(text.encode()) == total
