"""Going on with a stream that has broken off, wherever it has, and as often as it does."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.protocol.replay import Replay, can_resume, traced
from pdrelay_proxy.core.raw_json import encode
from support.greedy import events, read
from support.searching import examples

TEXT = {"prompt": "once upon", "stream": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0}
BASE = {Api.COMPLETIONS: TEXT, Api.CHAT: CHAT}


def fields_of(body):
    return parse(json.dumps(body).encode())


def broken_off(api, body, after):
    """Return what has been shown of a stream that broke off after so many events, and what may go on with it."""
    fields = fields_of(body)
    replay = Replay(api, fields)
    stream = list(events(json.loads(encode(traced(fields))), name="x"))
    return b"".join(replay.feed(one) for one in stream[:after]), replay


def run(api, body, breaks, per_event=1):
    """Serve a stream over engines that break off after so many events each; None: it could not go on."""
    fields = fields_of(body)
    replay = Replay(api, fields)
    asked = traced(fields)
    shown = b""
    tried = 0
    while True:
        stream = list(events(json.loads(encode(asked)), name=f"cmpl-{tried}", per_event=per_event))
        stop = breaks[tried] if tried < len(breaks) else len(stream)
        shown += b"".join(replay.feed(one) for one in stream[:stop])
        if stop >= len(stream):
            return shown
        if (ending := replay.ending()) is not None:
            return shown + ending
        asked = replay.again()
        if asked is None:
            return None
        tried += 1


@settings(max_examples=examples(300), deadline=None)
@given(
    api=st.sampled_from([Api.COMPLETIONS, Api.CHAT]),
    limit=st.integers(2, 30),
    breaks=st.lists(st.integers(1, 20), max_size=5),
    per_event=st.integers(1, 4),
    options=st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
)
def test_the_joined_stream_is_that_of_one_engine(api, limit, breaks, per_event, options):
    """Text, id, usage, reason of the end, and the end itself; half characters are not lost and not doubled."""
    if not options.get("include_usage"):
        options.pop("continuous_usage_stats", None)
    body = BASE[api] | {"max_tokens": limit, "stream_options": options or None}
    whole = b"".join(events(body, name="cmpl-0", per_event=1))

    joined = run(api, body, breaks, per_event)

    assert joined is not None
    assert read(joined) == read(whole)
    assert b"token_ids" not in joined.replace(b'token_ids":null', b"")


@pytest.mark.parametrize("api", BASE)
def test_an_unbroken_stream_is_that_of_an_engine_that_was_asked_for_no_ids(api):
    """To the byte: the client has not asked for them."""
    body = BASE[api] | {"max_tokens": 9, "stream_options": {"include_usage": True}}

    assert run(api, body, []) == b"".join(events(body, name="cmpl-0"))


def test_what_the_next_engine_is_asked():
    """Prompt and shown tokens as ids, and as many fewer tokens; in a chat the ids win over the messages."""
    for api, body in ((Api.COMPLETIONS, TEXT | {"min_tokens": 4}), (Api.CHAT, CHAT | {"max_completion_tokens": 9})):
        _, replay = broken_off(api, body | {"max_tokens": 9}, 5)
        asked = json.loads(encode(replay.again()))

        ids = asked["prompt"] if api is Api.COMPLETIONS else asked["kv_transfer_params"]["prompt_token_ids"]
        made = 9 - asked["max_tokens"]
        assert 0 < made <= 5
        assert ids[-made:] == [token for token in ids[-made:] if isinstance(token, int)]
        assert asked["return_token_ids"] is True
        if api is Api.COMPLETIONS:
            assert asked["min_tokens"] == max(0, 4 - made)
        else:
            assert asked["max_completion_tokens"] == asked["max_tokens"]
            assert asked["messages"] == CHAT["messages"]


def test_completions_make_sixteen_tokens_if_they_do_not_say():
    """vLLM's default, which would otherwise begin anew."""
    _, replay = broken_off(Api.COMPLETIONS, TEXT, 3)

    assert json.loads(bytes(replay.again()["max_tokens"])) in (13, 14, 15)


def test_a_chat_without_a_limit_has_none_afterwards():
    """Its limit is the model's length, which the longer prompt takes its share of."""
    _, replay = broken_off(Api.CHAT, CHAT, 4)

    assert "max_tokens" not in replay.again()


def test_an_error_in_the_stream_is_a_break():
    """What came before it in the same piece is shown; the error and its [DONE] are not."""
    fields = fields_of(TEXT)
    replay = Replay(Api.COMPLETIONS, fields)
    good = b"".join(list(events(json.loads(encode(traced(fields))), name="x"))[:2])
    shown = replay.feed(good + b'data: {"error":{"message":"no"}}\n\ndata: [DONE]\n\n')

    assert replay.broken
    assert b"error" not in shown
    assert b"DONE" not in shown
    assert replay.again() is not None
    assert not replay.broken


def test_what_cannot_be_continued():
    """Nothing was said yet; the engine tells no ids; it thinks, or calls tools."""
    assert Replay(Api.COMPLETIONS, fields_of(TEXT)).again() is None

    replay = Replay(Api.COMPLETIONS, fields_of(TEXT))
    replay.feed(next(iter(events(TEXT, name="x"))))
    assert replay.again() is None

    for delta in ({"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}):
        replay = Replay(Api.CHAT, fields_of(CHAT))
        replay.feed(next(iter(events(CHAT | {"return_token_ids": True}, name="x"))))
        choice = {"index": 0, "delta": delta, "token_ids": [1]}
        replay.feed(b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n")
        assert replay.again() is None


@pytest.mark.parametrize("delta", [{"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_what_is_no_text_behind_the_break_ends_in_an_error(delta):
    """A parser of reasoning begins anew at the next engine: a text that lacks what it has taken out is a wrong one."""
    fields = fields_of(CHAT)
    replay = Replay(Api.CHAT, fields)
    for piece in list(events(json.loads(encode(traced(fields))), name="x"))[:9]:
        replay.feed(piece)
    assert replay.again() is not None

    choice = {"index": 0, "delta": delta, "token_ids": [1], "finish_reason": None}
    assert replay.feed(b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n") == b": goes on\n"
    assert replay.broken
    assert replay.again() is None
    assert replay.ending() is None


def keeping_back(texts, literal):
    """Return what a parser of vLLM's with this literal tells of these tokens: what may begin it comes later."""
    kept = ""
    for number, text in enumerate(texts):
        text = kept + text
        end = next((at for at in range(len(text)) if literal.startswith(text[at:])), len(text))
        text, kept = text[:end], text[end:]
        delta = {"content": text} if text else {}
        yield {"id": "x", "choices": [{"index": 0, "delta": delta, "token_ids": [number]}]}


MADE = {  # by a literal, the texts of tokens 0, 1, 2 ...
    "<tool_call>": ["a", " <", "b", ">", "\n<", "i", "> c", "<", "/i>"],
    '">': ["a", ' "', "b", '."', '"', '"', "\n", '"', '"', ",", " d"],
    "]<]minimax[>[": ["a[", "0", "]", "]", " b", "].", "]", "]<", " d"],
    "call:": ["I", " like", " music", " and", " logic", "al", " talk", " ca", "lm", " 7", " magic", ".", " E"],
}


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(
    ("literal", "after"), [(literal, after) for literal, made in MADE.items() for after in range(1, len(made) + 1)]
)
def test_what_a_parser_keeps_back_is_not_lost(literal, after, temperature):
    """A stream that goes on behind a token of which the client lacks the end would lack it for good."""
    fields = fields_of(CHAT | {"temperature": temperature})
    made = MADE[literal]
    replay = Replay(Api.CHAT, fields, _prompt=[77])
    shown = []
    for chunk in list(keeping_back(made, literal))[:after]:
        line = replay.feed(b"data: " + json.dumps(chunk).encode() + b"\n")
        shown += [json.loads(line[5:])["choices"][0]["delta"].get("content", "")] if b"data:" in line else []
    rest = replay.rest()
    if rest is None:
        assert temperature, "a greedy stream goes on anywhere"
        return
    behind = len(json.loads(bytes(rest.tokens))) - 1
    for chunk in keeping_back(made[behind:], literal):
        line = replay.feed(b"data: " + json.dumps(chunk).encode() + b"\n")
        shown += [json.loads(line[5:])["choices"][0]["delta"].get("content", "")] if b"data:" in line else []

    assert "".join(shown) == "".join(made)


def test_a_sampled_chat_goes_on_behind_words_of_an_engine_that_tells_whole_ones():
    """Nearly all do; a stream shows it by a word that ends with the letter that begins a literal of another parser."""
    replay = Replay(Api.CHAT, fields_of(CHAT | {"temperature": 0.7}), _prompt=[77])
    told = []
    for chunk in keeping_back(["I", " like", " 2", " music", " and", " more"], "<tool_call>"):
        replay.feed(b"data: " + json.dumps(chunk).encode() + b"\n")
        told.append(replay.can_move())

    assert told == [False, False, True, True, True, True]


@settings(max_examples=examples(100), deadline=None)
@given(breaks=st.lists(st.integers(1, 20), max_size=4), per_event=st.integers(1, 4))
def test_a_sampled_stream_goes_on_only_from_a_safe_point(breaks, per_event):
    """What would have to be made again would be another text; where nothing has to be, it goes on as well."""
    body = TEXT | {"max_tokens": 20, "temperature": 0.7}
    joined = run(Api.COMPLETIONS, body, breaks, per_event)

    assert joined is None or read(joined) == read(b"".join(events(body, name="cmpl-0")))
    assert joined is not None or per_event > 1


def test_engines_that_do_not_agree_end_in_an_error():
    """Two engines may round differently: then the client gets an error, and no text that nobody has written."""
    fields = fields_of(TEXT)
    replay = Replay(Api.COMPLETIONS, fields)
    shown = replay.feed(said([1, 2], "ab", prompt_token_ids=[5]))
    assert replay.again() is not None

    assert b"ab" in shown
    assert replay.feed(said([1], "x")) == b": goes on\n"
    assert replay.broken
    assert replay.again() is None


def said(tokens, text, **more):
    choice = {"index": 0, "text": text, "token_ids": tokens, "finish_reason": None}
    return b"data: " + json.dumps({"id": "x", "choices": [choice | more]}).encode() + b"\n\n"


def test_keep_alives_and_odd_lines_pass():
    """They are no tokens."""
    replay = Replay(Api.COMPLETIONS, fields_of(TEXT))

    assert replay.feed(b": keep-alive\n\ndata: odd\n\n") == b": keep-alive\n\ndata: odd\n\n"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0, "seed": 7},
        {"temperature": 1.5},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "n": 1, "best_of": 1},
        {"echo": False, "logprobs": None, "stop": [], "tools": [], "response_format": None},
        {"stop_token_ids": [1], "ignore_eos": True, "repetition_penalty": 1.1, "user": "u"},
    ],
)
def test_what_does_not_look_back_can_be_continued(more):
    """Greedy or not: without a seed a token only depends on those before it."""
    assert can_resume(Api.COMPLETIONS, fields_of(TEXT | more))
    assert can_resume(Api.CHAT, fields_of(CHAT | more))


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 7, "temperature": None},
        {"seed": 7, "temperature": 0.5},
        {"stop": "x"},
        {"logprobs": 1},
        {"n": 2},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"tools": [{"type": "function"}]},
        {"return_token_ids": True},
        {"bad_words": ["x"]},
        {"of_tomorrow": 1},
        {"stream": False},
        {"vllm_xargs": {"a": 1}},
        {"seed": False},
    ],
)
def test_what_looks_back_or_is_unknown_is_not(more):
    """An honest error is better than a text that nobody would have written."""
    assert not can_resume(Api.COMPLETIONS, fields_of(TEXT | more))
    assert not can_resume(Api.CHAT, fields_of(CHAT | more))


def test_only_chats_of_texts_and_only_two_apis():
    """vLLM renders images anew and then ignores the ids: it would begin from the beginning."""
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    call = [{"role": "assistant", "content": None, "tool_calls": "x"}]

    assert not can_resume(Api.CHAT, fields_of(CHAT | {"messages": image}))
    assert not can_resume(Api.CHAT, fields_of(CHAT | {"messages": call}))
    assert not can_resume(Api.RESPONSES, fields_of({"input": "a", "stream": True}))
    assert not can_resume(Api.MESSAGES, fields_of(CHAT))


@pytest.mark.parametrize("text", ["x", "a"], ids=["another text", "less text"])
def test_engines_that_do_not_agree_at_the_end_have_not_finished_anything(text):
    """The last event of the second engine must not make a good end of a text that is neither one's nor the other's."""
    replay = Replay(Api.COMPLETIONS, fields_of(TEXT))
    replay.feed(said([1, 2], "ab", prompt_token_ids=[5]))
    assert replay.again() is not None
    replay.feed(said([1], text, finish_reason="stop"))

    assert replay.broken
    assert replay.ending() is None
    assert replay.again() is None


def test_a_usage_that_the_client_has_is_not_said_twice():
    """The engine broke off between it and the end."""
    replay = Replay(Api.COMPLETIONS, fields_of(TEXT | {"stream_options": {"include_usage": True}}))
    replay.feed(said([1], "a", prompt_token_ids=[5], finish_reason="stop"))
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    chunk = json.dumps({"id": "x", "choices": [], "usage": usage}).encode()
    assert b"usage" in replay.feed(b"data: " + chunk + b"\n\n")

    assert replay.ending() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_tokens_that_an_engine_hides_are_not_counted(options):
    """It shows none of a client that wants no reasoning: the router could only say that there were none."""
    replay = Replay(Api.CHAT, fields_of(CHAT | {"stream_options": options, "include_reasoning": False}))
    replay.feed(said(None, "a", prompt_token_ids=[5], finish_reason="stop"))

    assert replay.ending() == (None if options else b"data: [DONE]\n\n")
    assert replay.again() is None


def test_a_stream_can_move_where_a_token_is_whole():
    """A sampled one not behind half a character, and none before its last token, or behind an end."""
    sampled = fields_of(TEXT | {"temperature": 1, "max_tokens": 5})
    replay, greedy = Replay(Api.COMPLETIONS, sampled), Replay(Api.COMPLETIONS, fields_of(TEXT | {"max_tokens": 5}))
    seen = []
    for tokens, text, more in (
        ([1], "a", {"prompt_token_ids": [5]}),
        ([2, 3], "bc", {}),
        ([4], "d", {}),
        ([5], "e", {"finish_reason": "length"}),
    ):
        for one in (replay, greedy):
            one.feed(said(tokens, text, **more))
        seen.append((replay.can_move(), greedy.can_move()))

    assert seen == [(True, True), (False, True), (False, False), (False, False)]


def test_a_stream_of_which_the_router_knows_no_tokens_cannot_move():
    """Its engine has not told them, or it has become something else than a text."""
    untold, spoilt = (Replay(Api.COMPLETIONS, fields_of(TEXT)) for _ in range(2))
    untold.feed(said([], "a"))
    spoilt.feed(said([1], "a", prompt_token_ids=[5], delta={"tool_calls": [1]}))

    assert not untold.can_move()
    assert not spoilt.can_move()


def test_no_more_of_a_prompt_is_cached_than_one_engine_would_have_found():
    """The next engine has read the answer so far as a part of its prompt."""
    replay = Replay(Api.COMPLETIONS, fields_of(TEXT | {"stream_options": {"include_usage": True}}))
    replay.feed(said([1], "a", prompt_token_ids=[5, 6, 7]))
    assert replay.again() is not None
    usage = {
        "prompt_tokens": 4,
        "completion_tokens": 1,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    shown = replay.feed(b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n")

    assert json.loads(shown[6:])["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
