"""Which prefill engines' answers can say all about a prompt's cache blocks, and how their ids are read."""

import json

import pytest

from pdrelay_proxy.core.model import Api, GenerationRequest
from pdrelay_proxy.core.raw_json import Fields, decode, maybe
from pdrelay_proxy.core.routing.routing_hints import hints_of_call
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.features.kv_events.core.token_blocks import packed
from pdrelay_proxy.features.kv_events.core.told_ids import PIECE, ids_in, is_even, may_tell_ids, packed_ids

HELLO = [{"role": "user", "content": "hello"}]


def asked(api, **body):
    call = GenerationRequest(api, decode(json.dumps(body).encode(), Fields), ())
    return call, hints_of_call(call)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"messages": HELLO}),
        (Api.CHAT, {"messages": HELLO, "cache_salt": "s", "truncate_prompt_tokens": None}),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 'the word "image_url"'}]}]}),
        (Api.COMPLETIONS, {"prompt": "hello"}),
        (Api.COMPLETIONS, {"prompt": 'hello "image_url"'}),
    ],
)
def test_texts_and_chats_are_asked_for(api, body):
    assert may_tell_ids(*asked(api, **body))


def part(kind, **more):
    return [{"role": "user", "content": [{"type": kind, **more}]}]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"messages": part("image_url", image_url={"url": "http://x"})}),
        (Api.CHAT, {"messages": part("input_audio", input_audio={"data": "x"})}),
        (Api.CHAT, {"messages": part("video_url", video_url={"url": "http://x"})}),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"image_url": "http://x"}]}]}),
        (Api.CHAT, {"messages": part("image_embeds", image_embeds="x")}),
        (Api.CHAT, {"messages": HELLO, "truncate_prompt_tokens": 5}),
        (Api.CHAT, {"messages": [{"role": "user", "content": "x" * (1 << 20)}]}),
        (Api.COMPLETIONS, {"prompt": "hello", "prompt_embeds": "x"}),
        (Api.COMPLETIONS, {"prompt": "hello", "suffix": "x"}),
        (Api.GENERATE, {"token_ids": [1, 2, 3], "sampling_params": {}}),
        (Api.MESSAGES, {"messages": HELLO}),
        (Api.RESPONSES, {"input": "hello"}),
    ],
)
def test_others_are_not(api, body):
    """More than ids decides what is in their blocks; or they have ids; or the API cannot tell."""
    assert not may_tell_ids(*asked(api, **body))


@pytest.mark.parametrize(
    "answer",
    [{"prompt_token_ids": [1, 2, 3], "choices": [{}]}, {"choices": [{"prompt_token_ids": [1, 2, 3], "text": "x"}]}],
)
def test_ids_are_found_in_both_shapes_of_answers(answer):
    assert b"".join(packed_ids(ids_in(maybe(json.dumps(answer).encode(), TokensAnswer)))) == packed([1, 2, 3])


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"prompt_token_ids": None}, {"choices": [{}, {}]}, []])
def test_answers_without_ids_have_none(answer):
    """Engines of an older version ignore the question."""
    assert ids_in(maybe(json.dumps(answer).encode(), TokensAnswer)) == b""


@pytest.mark.parametrize("ids", [b"7", b"[1,", b'["1"]', b"[1.5]", b"[-1]", b"[4294967296]", b"{}", b"[1,,2]"])
def test_ids_that_are_none_are_an_error(ids):
    """Nothing is learned then."""
    with pytest.raises(EngineError):
        list(packed_ids(ids))


@pytest.mark.parametrize("written", [(",", ":"), (", ", ": ")])
def test_long_lists_come_in_pieces(written):
    """Of bounded size, and nothing is lost between them."""
    ids = [number * 37 % 150_000 for number in range(30_000)]
    pieces = list(packed_ids(json.dumps(ids, separators=written).encode()))

    assert b"".join(pieces) == packed(ids)
    assert len(pieces) > 4
    assert max(map(len, pieces)) < 4 * PIECE
    assert list(packed_ids(b"[]")) == []


def test_tools_may_stand_before_the_last_message():
    """A bound for the tokens before it would be wrong."""
    assert is_even(asked(Api.CHAT, messages=HELLO, tools=None)[1])
    assert not is_even(asked(Api.CHAT, messages=HELLO, tools=[{"type": "function"}])[1])
    assert is_even(asked(Api.COMPLETIONS, prompt="hello", documents=[])[1])
