"""Whether the KV cache has arrived, as far as an answer tells."""

import json

import pytest

from pdrelay_proxy.core.protocol.kv_transfer_check import Arrival, arrival, cached_share


def usage(cached):
    return {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}


def events(*values):
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values) + b"data: [DONE]\n\n"


TOKEN = {"choices": [{"index": 0, "text": '{"usage": {"prompt_tokens_details": {"cached_tokens": 7}}}'}]}


@pytest.mark.parametrize(("cached", "says"), [(0, Arrival.NONE), (1, Arrival.ARRIVED), (None, Arrival.UNKNOWN)])
def test_a_whole_answer_tells(cached, says):
    """Zero is the alarm; null is an engine that does not count."""
    assert arrival(json.dumps({"choices": [], "usage": usage(cached)}).encode()) is says


@pytest.mark.parametrize(("cached", "says"), [(0, Arrival.NONE), (5, Arrival.ARRIVED)])
def test_the_end_of_a_stream_tells(cached, says):
    """Also when it begins in the middle of an event, and keep-alives stand between."""
    end = b'x": "half"}\n\n' + events(TOKEN, {"choices": [], "usage": usage(cached)})

    assert arrival(end) is says
    assert arrival(end.replace(b"data: [DONE]", b": keep-alive\n\ndata: [DONE]")) is says


@pytest.mark.parametrize(
    "end",
    [
        b"",
        events(TOKEN),
        events(TOKEN, {"choices": [], "usage": None}),
        events(TOKEN, {"choices": [], "usage": {"prompt_tokens_details": None}}),
        events({"usage": "odd"}),
        b"data: {\n\ndata: [DONE]\n\n",
    ],
)
def test_what_does_not_tell_is_unknown(end):
    """Tokens that look like a usage are only text, and broken events break nothing."""
    assert arrival(end) is Arrival.UNKNOWN


@pytest.mark.parametrize(
    ("usage", "share"),
    [
        ('{"prompt_tokens":200,"prompt_tokens_details":{"cached_tokens":50}}', 0.25),
        ('{"prompt_tokens":200,"prompt_tokens_details":{"cached_tokens":0}}', 0.0),
        ('{"prompt_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}', None),
        ('{"prompt_tokens_details":{"cached_tokens":5}}', None),
        (f'{{"prompt_tokens":200,"prompt_tokens_details":{{"cached_tokens":{10**400}}}}}', None),
        ('{"prompt_tokens":200,"prompt_tokens_details":null}', None),
        ('{"prompt_tokens":200}', None),
    ],
)
def test_an_engine_may_say_how_much_of_a_prompt_it_had(usage, share):
    """In a whole answer, and in the last event of a stream."""
    whole = f'{{"choices":[],"usage":{usage}}}'

    assert cached_share(whole.encode()) == share
    assert cached_share(f"data: {whole}\n\ndata: [DONE]\n\n".encode()) == share
