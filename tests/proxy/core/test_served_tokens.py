"""How many tokens a client was served."""

import json

import pytest

from xpyd_proxy.core.model import InstanceId, RequestId
from xpyd_proxy.core.request_record import LegRecord, RequestRecord
from xpyd_proxy.core.served_tokens import served_tokens

CHUNK = b'data: {"choices":[{"delta":{"content":" a"}}]}\n\n'


def tokens(*pieces, status=200, events=0, prompt=None):
    """Return what is charged where the prompt seems to have 1000 tokens; ``prompt``: as the prefill engine says."""
    record = RequestRecord(RequestId("r"), prefill=LegRecord(InstanceId("p")))
    for piece in pieces:
        record.wrote(piece)
    record.prefill.tokens = prompt
    return served_tokens(record, status, 1000, events)


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [], "usage": {"prompt_tokens": 30, "total_tokens": 37, "completion_tokens": 7}},
        {"type": "message", "usage": {"input_tokens": 30, "output_tokens": 7, "cache_read_input_tokens": 900}},
        {"usage": {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 9}, "output_tokens": 7}},
    ],
    ids=["completions", "messages", "responses"],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_what_the_engine_has_counted_is_believed(body, separators):
    """In the words of each API; what was cached is part of the prompt there."""
    assert tokens(json.dumps(body, separators=separators).encode()) == 37


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
