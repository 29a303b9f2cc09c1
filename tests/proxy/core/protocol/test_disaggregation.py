"""Which requests must not be split between two engines."""

import json

import msgspec
import pytest

from pdrelay_proxy.core.model import Api, SingleEngineReason
from pdrelay_proxy.core.protocol import disaggregation
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.protocol.disaggregation import may_share, solo_reason

BOTH = (Api.COMPLETIONS, Api.CHAT)
TEXT, CHAT = (Api.COMPLETIONS,), (Api.CHAT,)
RESPONSES = (Api.RESPONSES,)
MESSAGES = (Api.MESSAGES,)
GENERATE = (Api.GENERATE,)
EVERY = tuple(Api)
FUNCTION = {"type": "function", "name": "f"}


PLAIN = {
    Api.COMPLETIONS: {"prompt": "hi"},
    Api.CHAT: {"messages": []},
    Api.RESPONSES: {"input": "hi"},
    Api.MESSAGES: {"messages": [], "max_tokens": 9},
    Api.GENERATE: {"token_ids": [1], "sampling_params": {}},
}


def reason(api, **fields):
    return solo_reason(api, parse(json.dumps(PLAIN[api] | fields).encode()))


@pytest.mark.parametrize(
    ("apis", "name", "values", "expected"),
    [
        (
            TEXT,
            "prompt",
            [["a", "b"], [[1], [2]], ["a", "b", "c"], [], ["a", [1]], [True, 2]],
            SingleEngineReason.PROMPTS,
        ),
        (TEXT, "prompt_embeds", ["b64", ["b64", "b64"]], SingleEngineReason.EMBEDS),
        (BOTH, "n", [2, 0, -1, "2", 2.0, True], SingleEngineReason.N),
        (BOTH, "best_of", [2, "2", 0], SingleEngineReason.BEST_OF),
        (BOTH, "use_beam_search", [True, None, 1, "true"], SingleEngineReason.BEAM),
        (BOTH, "echo", [True, "yes", 1], SingleEngineReason.ECHO),
        (BOTH, "prompt_logprobs", [0, 1, -1, "1"], SingleEngineReason.PROMPT_LOGPROBS),
        (BOTH, "max_tokens", [1, 0, -1, "1", 1.0, 2.5, True], SingleEngineReason.FEW_TOKENS),
        (BOTH, "max_completion_tokens", [1, 0, "9"], SingleEngineReason.FEW_TOKENS),
        (BOTH, "truncate_prompt_tokens", [-1, 0, 128], SingleEngineReason.TRUNCATED),
        (EVERY, "stream", ["yes", 1], SingleEngineReason.UNUSUAL),
        (MESSAGES, "max_tokens", [1, 0, None, "9", True, 2.0], SingleEngineReason.FEW_TOKENS),
        (MESSAGES, "thinking", [{"budget_tokens": 9}, {"budget_tokens": "3"}, "on", 1], SingleEngineReason.UNUSUAL),
        (GENERATE, "sampling_params", [{"n": 2}, {"n": "1"}, {"n": True}], SingleEngineReason.N),
        (GENERATE, "sampling_params", [{"max_tokens": 1}, {"max_tokens": "9"}], SingleEngineReason.FEW_TOKENS),
        (
            GENERATE,
            "sampling_params",
            [{"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[1]]}],
            SingleEngineReason.PROMPT_LOGPROBS,
        ),
        (
            GENERATE,
            "sampling_params",
            [None, "x", [], {"min_tokens": -1}, {"min_tokens": 9, "max_tokens": 8}],
            SingleEngineReason.UNUSUAL,
        ),
        (GENERATE, "stream_options", [{"include_usage": True}], SingleEngineReason.UNUSUAL),
        (RESPONSES, "max_output_tokens", [1, 0, "9", 2.5], SingleEngineReason.FEW_TOKENS),
        (RESPONSES, "previous_response_id", ["resp_1", "", 0], SingleEngineReason.STORED),
        (
            RESPONSES,
            "tools",
            [[{"type": "mcp"}], [FUNCTION, {"type": "container"}], None, "x", [1]],
            SingleEngineReason.TOOLS,
        ),
        (RESPONSES, "truncation", ["auto", None, 1], SingleEngineReason.TRUNCATED),
        (RESPONSES, "store", ["yes", 1], SingleEngineReason.UNUSUAL),
        (BOTH, "stream_options", [{"include_usage": True}, {"include_usage": "yes"}, 7], SingleEngineReason.UNUSUAL),
        (BOTH, "min_tokens", [None, -1, "1"], SingleEngineReason.UNUSUAL),
        (TEXT, "logprobs", [True, -1, "1"], SingleEngineReason.UNUSUAL),
        (CHAT, "logprobs", [1, "true"], SingleEngineReason.UNUSUAL),
        (CHAT, "top_logprobs", [3, -1, "1"], SingleEngineReason.UNUSUAL),
        (BOTH, "logprob_token_ids", [[1], ["1"], 1], SingleEngineReason.UNUSUAL),
    ],
)
def test_what_would_be_wrong_in_two_halves_is_served_whole(apis, name, values, expected):
    """Wrong text with status 200 is the worst a router can do; so what is not plainly right is not split."""
    for api in apis:
        for value in values:
            assert reason(api, **{name: value}) is expected, value


@pytest.mark.parametrize(
    ("apis", "name", "values"),
    [
        (TEXT, "prompt", ["a", ["a"], [1, 2, 3], [[1, 2]], None, "", 7]),
        (TEXT, "prompt_embeds", [None]),
        (BOTH, "n", [1, None]),
        (BOTH, "best_of", [1, None]),
        (BOTH, "use_beam_search", [False]),
        (BOTH, "echo", [False, None]),
        (BOTH, "prompt_logprobs", [None]),
        (BOTH, "max_tokens", [2, 10**30, None]),
        (BOTH, "max_completion_tokens", [2, None]),
        (BOTH, "truncate_prompt_tokens", [None]),
        (EVERY, "stream", [True, False, None]),
        (MESSAGES, "max_tokens", [2, 10**30]),
        (MESSAGES, "thinking", [None, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 8}]),
        (MESSAGES, "n", [5]),
        (GENERATE, "sampling_params", [{"max_tokens": None}, {"n": 1, "logprobs": 5}, {"min_tokens": 2, "seed": 3}]),
        (GENERATE, "sampling_params.n", [2]),
        (RESPONSES, "max_output_tokens", [2, None]),
        (RESPONSES, "previous_response_id", [None]),
        (RESPONSES, "tools", [[], [FUNCTION]]),
        (RESPONSES, "truncation", ["disabled"]),
        (RESPONSES, "store", [True, False, None]),
        (BOTH, "stream_options", [{}, None]),
        (BOTH, "min_tokens", [0, 5]),
        (TEXT, "logprobs", [None, 0, 5]),
        (CHAT, "logprobs", [None, True, False]),
        (BOTH, "top_logprobs", [None, 0]),
        (BOTH, "logprob_token_ids", [None, []]),
        (EVERY, "seed", [1, "anything else is checked by the prefill engine"]),
    ],
)
def test_the_plain_values_are_split(apis, name, values):
    """Or the prefill engines would idle."""
    for api in apis:
        for value in values:
            assert reason(api, **{name: value}) is None, value


def test_combinations_that_are_plain_together():
    """Options of a stream, and refinements of logprobs."""
    assert reason(Api.CHAT, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": None}) is None
    assert reason(Api.CHAT, logprobs=True, top_logprobs=3, logprob_token_ids=[1, 2]) is None
    assert reason(Api.COMPLETIONS, logprobs=1, logprob_token_ids=[1, 2]) is None
    assert reason(Api.CHAT, logprobs=False, top_logprobs=3) is SingleEngineReason.UNUSUAL


def test_a_prompt_is_recognised_through_blanks():
    """JSON allows them anywhere; and two prompts in odd clothes are still two."""
    for text, expected in (
        (b'[ \n "a" ]', None),
        (b"[ \n 1 , 2 ]", None),
        (b'[ \t"a" , "b"]', SingleEngineReason.PROMPTS),
    ):
        fields = parse(b'{"prompt" : ' + text + b"}")
        assert solo_reason(Api.COMPLETIONS, fields) is expected


def test_chats_have_no_prompts():
    """vLLM ignores the field there."""
    assert reason(Api.CHAT, prompt=["a", "b"]) is None


def test_a_request_without_a_prompt_is_left_to_the_engines():
    """The prefill engine says what is missing."""
    assert solo_reason(Api.COMPLETIONS, {}) is None


def test_values_that_cannot_be_decoded_are_not_plain():
    """Raw values are only checked for their outline."""
    assert solo_reason(Api.CHAT, {"n": msgspec.Raw(b'"\xff"')}) is SingleEngineReason.N


def test_messages_need_a_limit():
    """The decode engine refuses without, while it reads the body; the prefill engine gets a limit from the router."""
    assert solo_reason(Api.MESSAGES, parse(b'{"messages":[]}')) is SingleEngineReason.UNUSUAL


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 2}, True),
        ({"n": 200}, True),
        *(({"n": n}, False) for n in (0, "2", True, 2.0)),
        ({"n": 2, "echo": True}, False),
        ({"n": 2, "max_tokens": 1}, False),
        ({"n": 2, "min_tokens": "x"}, False),
    ],
)
def test_several_answers_to_one_prompt_may_share_it(fields, expected):
    """If nothing else keeps the request from being split."""
    for api in BOTH:
        assert may_share(api, parse(json.dumps(PLAIN[api] | fields).encode())) is expected
    sampled = {"token_ids": [1], "sampling_params": fields}
    if "echo" not in fields:
        assert may_share(Api.GENERATE, parse(json.dumps(sampled).encode())) is expected


@pytest.mark.parametrize("api", Api)
def test_what_was_plain_once_is_looked_at_again_where_it_differs(api):
    """The same fields are found plain from memory; other values, another order or another call are not."""
    name = {Api.RESPONSES: "max_output_tokens"}.get(api, "max_tokens")
    eight, one = ({"sampling_params": {name: n}} if api is Api.GENERATE else {name: n} for n in (8, 1))
    for _ in range(2):
        assert reason(api, **eight, stream=True) is None
        assert reason(api, stream=True, **eight) is None
        assert reason(api, **one, stream=True) is SingleEngineReason.FEW_TOKENS
        assert reason(api, **eight, stream="yes") is SingleEngineReason.UNUSUAL


def test_what_is_remembered_is_bounded():
    """In number, and in bytes: clients can think of other values without end."""
    for number in range(disaggregation._SPLIT_MOST + 10):
        assert reason(Api.CHAT, max_tokens=number + 2) is None
    assert 0 < len(disaggregation._SPLIT[Api.CHAT]) <= disaggregation._SPLIT_MOST

    long = list(range(200))
    assert reason(Api.CHAT, logprobs=True, logprob_token_ids=long) is None
    assert not any(b"199]" in written for written in disaggregation._SPLIT[Api.CHAT])
