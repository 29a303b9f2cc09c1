"""How many tokens a client was served."""

import json

import pytest

from pdrelay_proxy.core.model import InstanceId, RequestId
from pdrelay_proxy.core.request_record import LegRecord, MoveRecord, RequestRecord
from pdrelay_proxy.core.served_tokens import served_tokens

CHUNK = b'data: {"choices":[{"delta":{"content":" a"}}]}\n\n'


def tokens(*pieces, path="/v1/completions", status=200, events=0, prompt=None):
    """Return what is charged where the prompt seems to have 1000 tokens; ``prompt``: as the prefill engine says."""
    record = RequestRecord(RequestId("r"), path, prefill=LegRecord(InstanceId("p")))
    for piece in pieces:
        record.wrote(piece)
    record.prefill.tokens = prompt
    return served_tokens(record, status, 1000, events)


@pytest.mark.parametrize("first", [20, None])
def test_tokens_that_a_move_has_made_part_of_a_prompt_count_once(first):
    """The engine that a stream leaves counts prompt and answer so far as its prompt; None: there was no prefill."""
    record = RequestRecord(RequestId("r"), "/v1/completions")
    for counted in (first, 25, 28):
        record.prefill = None if counted is None else LegRecord(InstanceId("p"))
        if counted is not None:
            record.prefill.tokens = counted
        if counted != 28:
            record.move_on(MoveRecord(InstanceId("d"), 0.0))
    record.wrote(CHUNK)

    assert served_tokens(record, 200, 21, 10) == (first or 21) + 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            {"choices": [], "usage": {"prompt_tokens": 30, "total_tokens": 37, "completion_tokens": 7}},
        ),
        ("/v1/embeddings", {"data": [], "usage": {"prompt_tokens": 37, "total_tokens": 37, "completion_tokens": None}}),
        (
            "/v1/responses",
            {"usage": {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 9}, "output_tokens": 7}},
        ),
        (
            "/v1/messages",
            {"type": "message", "usage": {"input_tokens": 21, "output_tokens": 7, "cache_read_input_tokens": 9}},
        ),
        ("/v1/systemone", {"answers": {}, "usage": {"input_tokens": 30, "output_tokens": 7}}),
        ("/v1/decisions", {"answers": {}, "usage": {"input_tokens": 30, "output_tokens": 7}}),
        ("/v1/decisions", {"answers": {}, "usage": {"prompt_tokens": 30, "completion_tokens": 7}}),
        ("/v2/embed", {"embeddings": {}, "meta": {"billed_units": {"input_tokens": 30, "image_tokens": 7}}}),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_what_the_engine_has_counted_is_believed(path, body, separators):
    """In the words of each API; what was cached is part of the prompt, and messages tell it apart from their input."""
    assert tokens(json.dumps(body, separators=separators).encode(), path=path) == 37


SCHEMA = {"usage": {"input_tokens": 0, "output_tokens": 0}, "prompt_tokens": 0, "completion_tokens": 0}
RESPONSE = {
    "object": "response",
    "usage": {"input_tokens": 30, "output_tokens": 7},
    "tools": [{"type": "function", "name": "f", "parameters": {"properties": SCHEMA} | SCHEMA}],
    "metadata": SCHEMA,
}


def test_what_an_answer_repeats_of_its_request_is_not_its_usage():
    """A response has the tools of its request in it, whose schema is any JSON."""
    whole = json.dumps(RESPONSE).encode()
    event = json.dumps({"type": "response.completed", "response": RESPONSE, "tools": SCHEMA}).encode()
    stream = b"event: response.completed\ndata: " + event + b"\n\n"

    assert tokens(whole, path="/v1/responses") == 37
    assert tokens(b"event: response.output_text.delta\ndata: {}\n\n", stream, path="/v1/responses", events=3) == 37


def test_a_stream_of_messages_ends_with_its_usage():
    """Two events before the last one."""
    delta = {"type": "message_delta", "delta": {}, "usage": {"input_tokens": 30, "output_tokens": 7}}
    event = b"event: message_delta\ndata: " + json.dumps(delta).encode() + b"\n\n"
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    assert tokens(event + stop, path="/v1/messages", events=9) == 37
    assert tokens(event, stop, path="/v1/messages", events=9) == 37


@pytest.mark.parametrize("comment", [b"", b": quiet\n\n"])
@pytest.mark.parametrize(
    ("path", "usage", "end"),
    [
        ("/v1/completions", {"prompt_tokens": 30, "completion_tokens": 7}, b"data: [DONE]\n\n"),
        (
            "/v1/messages",
            {"input_tokens": 30, "output_tokens": 7},
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        ),
    ],
)
def test_a_usage_counts_however_the_end_behind_it_comes(path, usage, end, comment):
    """Line by line, where something between router and engine cuts the bytes anew; with comments of the engine's."""
    event = b"data: " + json.dumps({"id": "x" * 100, "choices": [], "usage": usage}).encode() + b"\n\n"

    assert tokens(CHUNK, *(event + comment + end).splitlines(keepends=True), path=path, events=9) == 37


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {"type": "duration", "seconds": 60},
        {"prompt_tokens": "many"},
        {"prompt_tokens": 30, "completion_tokens": 10**400},
        {"prompt_tokens": -30, "completion_tokens": 7},
        7,
        [],
    ],
)
def test_an_answer_without_tokens_costs_what_the_prompt_seems_to_have(usage):
    """A transcription tells seconds, and absurd numbers are none."""
    assert tokens(json.dumps({"text": "a", "usage": usage}).encode()) == 1000


@pytest.mark.parametrize("answer", [b"1\n00:00:00,000 --> 00:00:01,000\na\n", b"{", b'"usage"', b"data: {\n\n"])
def test_an_answer_that_is_no_json_costs_the_same(answer):
    """Subtitles, or the half of something."""
    assert tokens(answer) == 1000


def test_the_usage_at_the_end_of_a_stream_counts():
    """The last one, of several with continuous_usage_stats."""
    first = b'data: {"usage":{"prompt_tokens":30,"completion_tokens":6}}\n\n'
    last = b'data: {"usage":{"prompt_tokens":30,"completion_tokens":7}}\n\ndata: [DONE]\n\n'

    assert tokens(CHUNK, first, last, events=9) == 37


def test_a_stream_without_usage_has_one_token_an_event():
    """And the prompt that the prefill engine has counted; if nobody has, the guess."""
    assert tokens(CHUNK, events=12, prompt=30) == 42
    assert tokens(CHUNK, events=12) == 1012


def test_text_that_looks_like_usage_is_text():
    """Else a model could be told to write that its answer was short."""
    text = json.dumps({"choices": [{"text": '"completion_tokens": 0, "prompt_tokens": 0'}]}).encode()

    assert tokens(text, events=5, prompt=30) == 35


def test_what_has_failed_costs_nothing_and_what_a_client_left_costs_what_it_got():
    """499: the engines have worked for it."""
    assert tokens(events=5, prompt=30, status=503) == 0
    assert tokens(events=5, prompt=30, status=400) == 0
    assert tokens(events=5, prompt=30, status=499) == 35
