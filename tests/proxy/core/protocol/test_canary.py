"""Which requests are repeated, as what, and when two texts differ for no good reason."""

import json

import msgspec
import pytest

from pdrelay_proxy.core.model import Api, GenerationRequest
from pdrelay_proxy.core.protocol.canary import (
    MARGIN,
    REQUEST_MOST,
    TOKENS_MOST,
    CanaryOutcome,
    compared,
    may_repeat,
    repetition,
    shown_text,
)

CHAT, TEXT = Api.CHAT, Api.COMPLETIONS
MESSAGES = [{"role": "user", "content": "hi"}]


def call(api=TEXT, **fields):
    common = {"prompt": "once"} if api is TEXT else {"messages": MESSAGES}
    body = {"temperature": 0, **common, **fields}
    return GenerationRequest(api, msgspec.json.decode(json.dumps(body), type=dict[str, msgspec.Raw]), ())


@pytest.mark.parametrize(
    "suited",
    [
        call(),
        call(CHAT),
        call(stream=True, max_tokens=5, n=1, seed=3),
        call(temperature=0.0, stop=["x"]),
        call(prompt=[1, 2]),
    ],
)
def test_greedy_requests_of_one_prompt_may_be_repeated(suited):
    """Streamed or not, chats or completions."""
    assert may_repeat(suited)


@pytest.mark.parametrize(
    "unsuited",
    [
        call(temperature=0.7),
        call(temperature=None),
        call(n=2),
        call(tools=[]),
        call(echo=True),
        call(best_of=2),
        call(prompt=["a", "b"]),
        call(prompt=[[1], [2]]),
        call(prompt="x" * REQUEST_MOST),
        call(temperature="0"),
        GenerationRequest(Api.RESPONSES, call().fields, ()),
    ],
)
def test_what_has_several_right_answers_is_not_repeated(unsuited):
    """Nor what has another form, or is long."""
    assert not may_repeat(unsuited)


def test_the_repetition_is_short_whole_and_has_logprobs():
    """All that shapes the text stays; the rest would only cost."""
    given = call(CHAT, max_completion_tokens=500, min_tokens=200, stream=True, stream_options={}, stop="x", user="u")
    body = json.loads(msgspec.json.encode(repetition(given)))

    assert body == {
        "temperature": 0, "messages": MESSAGES, "stop": "x", "user": "u", "stream": False, "logprobs": True,
        "top_logprobs": 5, "max_completion_tokens": TOKENS_MOST, "min_tokens": TOKENS_MOST,
    }  # fmt: skip
    body = json.loads(msgspec.json.encode(repetition(call(max_tokens=7))))
    assert (body["max_tokens"], body["logprobs"]) == (7, 5)


@pytest.mark.parametrize("api", [CHAT, TEXT])
def test_the_repetition_shows_texts_of_tokens(api):
    """With vLLM's ``return_tokens_as_token_ids`` no place would be found, so rounding would be a fault of the pair."""
    fields = repetition(call(api, return_tokens_as_token_ids=True))

    assert "return_tokens_as_token_ids" not in fields


def event(**fields):
    return b"data: " + json.dumps({"choices": [fields]}).encode() + b"\n\n"


def test_the_text_of_a_stream_and_of_a_whole_answer_is_read():
    """Of chats and completions."""
    done = b'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
    chat = event(delta={"role": "assistant", "content": ""}) + event(delta={"content": "a"}) + event(delta={})
    whole = json.dumps({"choices": [{"message": {"content": "ab", "tool_calls": []}}]}).encode()

    assert shown_text(chat + event(delta={"content": "b"}) + done, streams=True) == "ab"
    assert shown_text(event(text="a") + event(text="b") + done, streams=True) == "ab"
    assert shown_text(whole, streams=False) == "ab"
    assert shown_text(json.dumps({"choices": [{"text": "ab"}]}).encode(), streams=False) == "ab"


@pytest.mark.parametrize(
    ("body", "streams"),
    [
        (event(text="a"), True),  # it broke off
        (event(text="a") + b'data: {"error":{"message":"m"}}\n\ndata: [DONE]\n\n', True),
        (event(delta={"reasoning_content": "hm"}) + b"data: [DONE]\n\n", True),
        (event(delta={"tool_calls": [{}]}) + b"data: [DONE]\n\n", True),
        (b"data: {\n\ndata: [DONE]\n\n", True),
        (b"", True),
        (b"no JSON", False),
    ],
)
def test_an_answer_with_something_beside_its_text_is_not_compared(body, streams):
    """Nor one that is none."""
    assert shown_text(body, streams=streams) is None


def repeated(api, *places, finish="length"):
    """Return an engine's answer: of each place the token with its logprob, and others."""
    text = "".join(token for (token, _), *_ in places)
    if api is CHAT:
        content = [
            {
                "token": token,
                "logprob": logprob,
                "top_logprobs": [{"token": one, "logprob": its} for one, its in [(token, logprob), *others]],
            }
            for (token, logprob), *others in places
        ]
        choice = {"message": {"content": text}, "logprobs": {"content": content}, "finish_reason": finish}
    else:
        logprobs = {
            "tokens": [token for (token, _), *_ in places],
            "token_logprobs": [logprob for (_, logprob), *_ in places],
            "top_logprobs": [dict([own, *others]) for own, *others in places],
        }
        choice = {"text": text, "logprobs": logprobs, "finish_reason": finish}
    return json.dumps({"choices": [choice]}).encode()


SURE = (("a", -0.1), ("x", -3.0))
TIE = (("b", -0.7), ("c", -0.7 - MARGIN))
UNSURE = (("b", -0.7), ("c", -0.8 - MARGIN))


@pytest.mark.parametrize("api", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("shown", "places", "outcome"),
    [
        ("ab", [SURE, UNSURE], "equal"),
        ("ab and on", [SURE, UNSURE], "equal"),  # more than is compared
        ("xb", [SURE, UNSURE], "different"),
        ("ac", [SURE, UNSURE], "different"),
        ("ac", [SURE, TIE], "skipped"),
        ("axyz", [SURE, TIE], "different"),  # neither of the two
        ("a", [SURE, TIE], "skipped"),  # it may have ended there
        ("acab", [SURE, TIE, SURE], "skipped"),  # all behind the tie is another text
        ("", [SURE], "different"),
    ],
)
def test_a_difference_counts_unless_two_tokens_were_about_as_likely(api, shown, places, outcome):
    """Sums in bf16 depend on the batch."""
    assert compared(api, shown, repeated(api, *places)) == outcome


def test_a_tie_whose_token_begins_the_shown_one_is_found_later():
    """``the`` begins ``there``: the texts part a place behind the one where the other token won."""
    places = [(("the", -0.7), ("there", -0.8)), (("m", -0.1),)]

    assert compared(TEXT, "there", repeated(TEXT, *places)) == CanaryOutcome.SKIPPED


def test_numbers_in_place_of_tokens_accuse_nobody():
    """An engine that was started with --return-tokens-as-token-ids shows no texts, so a tie cannot be found."""
    places = json.loads(repeated(TEXT, (("token_id:7", -0.7), ("token_id:8", -0.7))))
    places["choices"][0]["text"] = "b"

    assert compared(TEXT, "c", json.dumps(places).encode()) == CanaryOutcome.SKIPPED


def test_a_text_that_ended_is_compared_to_its_end():
    """The repetition stopped by itself, the client's text went on."""
    assert compared(TEXT, "aab", repeated(TEXT, SURE, finish="stop")) == CanaryOutcome.DIFFERENT
    assert compared(TEXT, "a", repeated(TEXT, SURE, finish="stop")) == CanaryOutcome.EQUAL


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"choices":[{"text":"b","logprobs":null}]}', b'{"error":{}}'])
def test_an_answer_that_cannot_be_compared_has_failed(answer):
    """And accuses nobody."""
    assert compared(TEXT, "a", answer) == CanaryOutcome.FAILED
