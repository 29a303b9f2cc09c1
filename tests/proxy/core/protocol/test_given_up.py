"""Answers that an engine has given up, as vLLM writes them."""

import json

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.given_up import is_given_up
from pdrelay_proxy.core.protocol.sse import WholeLines
from pdrelay_proxy.errors import EngineError
from support.engine_styles import STYLES
from support.story_engines import Saying

PROMPTS = {
    Api.COMPLETIONS: {"prompt": "hi"},
    Api.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Api.RESPONSES: {"input": "hi"},
    Api.MESSAGES: {"messages": [{"role": "user", "content": "hi"}]},
}
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
ENDS = b"[DONE]", b'"type":"message_stop"', b'"type":"response.completed"'
APIS = pytest.mark.parametrize("api", PROMPTS)
VLLM = STYLES["vLLM"]
STYLE = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


def saying(api, after=None, **more):
    """What an engine says of which nothing more comes behind so many tokens; None: all of it comes."""
    said = Saying(api, {"max_tokens": 4, "max_output_tokens": 4} | PROMPTS[api] | more, "x")
    if after is not None:
        said.abort(after)
    return said


@APIS
@STYLE
@pytest.mark.parametrize("after", [None, 0, 1, 3])
def test_of_whole_answers(api, after, style):
    """/v1/responses calls an answer completed that has a token."""
    whole = style.json(saying(api, after).whole())

    assert is_given_up(whole) is (after is not None and (after == 0 or api is not Api.RESPONSES))


@APIS
@STYLE
@pytest.mark.parametrize("options", [None, OPTIONS])
@pytest.mark.parametrize("after", [None, 0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_the_end_of_a_stream_that_was_given_up_does_not_pass(api, options, after, n, style):
    """However many bytes of it come at a time. The end of a whole one passes."""
    own = {"stream_options": options, "n": n} if api in (Api.COMPLETIONS, Api.CHAT) else {}
    events = [style.event(event) for event in saying(api, after, **own).events()]
    raw = b"".join(events)
    for reads in (events, *([raw[at : at + size] for at in range(0, len(raw), size)] for size in (7, 25, 1000))):
        lines = WholeLines("d0")
        passed = []
        if after is None or (after and api is Api.RESPONSES):
            passed.extend(map(lines.feed, reads))
            assert b"".join(passed).replace(b"\r\n", b"\n") == raw.replace(b"\r\n", b"\n")
            assert lines.finish() == (b"", True)
        elif len(events) > 1:  # a leg looks at that, for then there is no first event
            with pytest.raises(EngineError, match="gave up"):
                passed.extend(map(lines.feed, reads))
            assert lines.finish() == (b"", False)
            assert not any(last in b"".join(passed) for last in ENDS)


TEXTS = (
    *('"finish_reason":"abort"', '"finish_reason":null', '"stop_reason":null', '"output_tokens":0', '"abort"'),
    '"status":"cancelled"',
)
OWN = {
    "finish_reason": None,
    "stop_reason": None,
    "status": "cancelled",
    "usage": {"output_tokens": 0},
    "choices": [{"finish_reason": "abort"}],
}


@pytest.mark.parametrize("text", [*TEXTS, "finish_reason", "stop_reason", "output_tokens", "cancelled", "abort"])
@APIS
@STYLE
def test_a_model_may_write_about_it(api, text, style):
    """In a text."""
    raw = json.dumps(text).encode()
    lines = WholeLines("d0")

    assert not is_given_up(style.json(saying(api).whole() | {"model": text}))
    for event in saying(api).events():
        assert lines.feed(style.event(event.replace(b'"model":"m"', b'"model":%b' % raw)))


def test_a_client_of_responses_may_write_about_it():
    """What it has sent stands in its answer: else it could have engines ejected."""
    *before, last = saying(Api.RESPONSES).events()
    said = json.loads(last.partition(b"data: ")[2])
    said["response"]["tools"] = [OWN]
    lines = WholeLines("d0")
    for event in before:
        lines.feed(event)

    assert lines.feed(b"event: response.completed\ndata: %b\n\n" % VLLM.json(said))
    assert not is_given_up(VLLM.json(said["response"]))


def test_a_model_with_harmony_says_that_its_answer_is_cancelled():
    """In /v1/responses (vllm/entrypoints/openai/responses/serving.py)."""
    whole = saying(Api.RESPONSES).whole() | {"status": "cancelled"}
    last = VLLM.json({"type": "response.completed", "response": whole})

    assert is_given_up(VLLM.json(whole))
    with pytest.raises(EngineError):
        WholeLines("d0").feed(b"event: response.completed\ndata: %b\n\n" % last)


def test_of_one_that_ends_with_an_error_no_more_is_said():
    """The engine has said so itself."""
    lines = WholeLines("d0")
    for each in (b'data: {"choices":[{"finish_reason":null}]}\n\n', b'data: {"error":{"code":500}}\n\n'):
        lines.feed(each)

    assert lines.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


@pytest.mark.parametrize("text", [b'"text":"a"', b'"delta":{"role":"assistant","content":"a"}'])
def test_another_engine_than_vllm_may_end_a_text_without_a_reason(text):
    """Nothing is missing there: vLLM gives none only where there is no text."""
    event = b'data: {"choices":[{"index":0,%b,"finish_reason":null}]}\n\n' % text
    lines = WholeLines("d0")
    for each in (event, event, b"data: [DONE]\n\n"):
        assert lines.feed(each) == each

    assert lines.finish() == (b"", True)
