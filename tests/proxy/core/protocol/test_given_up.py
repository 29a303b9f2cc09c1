"""Answers that an engine has given up, as vLLM writes them."""

import json

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.given_up import is_given_up, was_given_up
from pdrelay_proxy.core.protocol.sse import WholeLines
from pdrelay_proxy.errors import EngineError
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


def saying(api, after=None, **more):
    """What an engine says of which nothing more comes behind so many tokens; None: all of it comes."""
    said = Saying(api, {"max_tokens": 4, "max_output_tokens": 4} | PROMPTS[api] | more, "x")
    if after is not None:
        said.abort(after)
    return said


@APIS
@pytest.mark.parametrize("after", [None, 0, 1, 3])
def test_of_whole_answers(api, after):
    """/v1/responses calls an answer completed that has a token."""
    whole = json.dumps(saying(api, after).whole(), separators=(",", ":")).encode()

    assert is_given_up(whole) is (after is not None and (after == 0 or api is not Api.RESPONSES))


@APIS
@pytest.mark.parametrize("options", [None, OPTIONS])
@pytest.mark.parametrize("after", [None, 0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("read", [None, 7, 25, 1000])
def test_the_end_of_a_stream_that_was_given_up_does_not_pass(api, options, after, n, read):
    """However many bytes of it come at a time; None: event by event. The end of a whole one passes."""
    own = {"stream_options": options, "n": n} if api in (Api.COMPLETIONS, Api.CHAT) else {}
    events = list(saying(api, after, **own).events())
    raw = b"".join(events)
    reads = events if read is None else [raw[at : at + read] for at in range(0, len(raw), read)]
    lines, passed = WholeLines("d0"), []
    if after is None or (after and api is Api.RESPONSES):
        passed.extend(map(lines.feed, reads))
        assert (b"".join(passed), lines.finish()) == (raw, (b"", True))
    elif raw != b"data: [DONE]\n\n":  # a leg looks at that, for then there is no first event
        with pytest.raises(EngineError, match="gave up"):
            passed.extend(map(lines.feed, reads))
        assert lines.finish() == (b"", False)
        assert not any(end in b"".join(passed) for end in ENDS)


@pytest.mark.parametrize(
    "text", ['"finish_reason":"abort"', '"finish_reason":null', '"stop_reason":null', '"output_tokens":0', '"abort"']
)
@APIS
def test_a_model_may_write_about_it(api, text):
    """In a text, and in what a client has sent with its request."""
    whole = saying(api).whole() | {"metadata": {"a": text}, "tools": [{"finish_reason": "abort", "output_tokens": 0}]}
    events = saying(api).events()
    last = [*events][-2:]

    assert not is_given_up(json.dumps(whole, separators=(",", ":")).encode())
    assert not was_given_up(b"".join(last).replace(b'"model":"m"', b'"model":%b' % json.dumps(text).encode()))


def test_of_one_that_ends_with_an_error_no_more_is_said():
    """The engine has said so itself."""
    lines = WholeLines("d0")
    for each in (b'data: {"choices":[{"finish_reason":null}]}\n\n', b'data: {"error":{"code":500}}\n\n'):
        lines.feed(each)

    assert lines.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
