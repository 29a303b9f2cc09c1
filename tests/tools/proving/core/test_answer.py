"""Answers are read at the border, and compared so that a wrong block shows and rounding does not."""

import json
from dataclasses import replace

import pytest

from pdrelay_tools.proving.core.answer import (
    Answer,
    ChoiceAnswer,
    Malformed,
    differences,
    events_of,
    read,
    self_difference,
)
from pdrelay_tools.proving.core.finding import FindingName

LIKELY = ((("a", -0.1), ("b", -2.0)), (("c", -0.5), ("d", -0.50001)), (("e", -0.3), ("f", -1.0)))
ONE = ChoiceAnswer("ace", ("a", "c", "e"), (-0.1, -0.5, -0.3), LIKELY, "length", "")
RIGHT = Answer((ONE,), 7, 3)


def changed(**fields):
    return replace(RIGHT, choices=(replace(ONE, **fields),))


def completion(**fields):
    return json.dumps({"choices": [{"index": 0, "text": "ace", "finish_reason": "length", **fields}]}).encode()


WRONG_TEXT = FindingName.WRONG_TEXT
WRONG_LOGPROBS = FindingName.WRONG_LOGPROBS
WRONG_USAGE = FindingName.WRONG_USAGE
UNLIKE = ((("a", -0.1), ("b", -2.05)), *LIKELY[1:])
DIFFERENCES = {
    "none": (RIGHT, []),
    "rounding, within what the reference differs from itself": (changed(logprobs=(-0.1005, -0.5, -0.3)), []),
    "another token": (changed(text="bce", tokens=("b", "c", "e")), [WRONG_TEXT]),
    # The reference had both within the tolerance; what follows is another text, and not compared.
    "a tie": (changed(text="adx", tokens=("a", "d", "x"), logprobs=(-0.1, -0.5, -3.0)), []),
    "before a tie": (changed(text="adx", tokens=("a", "d", "x"), logprobs=(-0.9, -0.5, -3.0)), [WRONG_LOGPROBS]),
    # A wrong block need not change the likeliest token.
    "logprobs under the right text": (changed(logprobs=(-0.1, -0.52, -0.3)), [WRONG_LOGPROBS]),
    # The token that was made can keep its logprob where the next likely one does not: it shows in fewer tokens.
    "logprobs of other tokens": (changed(top_logprobs=UNLIKE), [WRONG_LOGPROBS]),
    "no logprobs": (changed(tokens=(), logprobs=(), top_logprobs=()), [WRONG_LOGPROBS]),
    "a shorter answer": (changed(text="ac", tokens=("a", "c"), logprobs=(-0.1, -0.5)), [WRONG_TEXT]),
    "a missing choice": (replace(RIGHT, choices=()), [WRONG_TEXT]),
    "the count of the prompt": (replace(RIGHT, prompt_tokens=8), [WRONG_USAGE]),
    # Clients pay by them. Behind a tie the answers may be of other lengths.
    "the count of the answer": (replace(RIGHT, completion_tokens=4), [WRONG_USAGE]),
    "no count of the answer": (replace(RIGHT, completion_tokens=None), [WRONG_USAGE]),
    "the count behind a tie": (
        replace(changed(text="ad", tokens=("a", "d"), logprobs=(-0.1, -0.5)), completion_tokens=2),
        [],
    ),
}


@pytest.mark.parametrize(("ours", "found"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_wrong_block_shows_and_rounding_does_not(ours, found):
    assert [each.name for each in differences(ours, RIGHT, 1e-3)] == found


@pytest.mark.parametrize("fields", [{"text": "acx"}, {"finish": "stop"}, {"tools": "f{}"}])
def test_texts_ends_and_tool_calls_are_compared(fields):
    """Also of answers without logprobs."""
    plain = {"tokens": (), "logprobs": (), "top_logprobs": ()}
    right = replace(RIGHT, choices=(replace(ONE, **plain),))

    found = differences(changed(**plain, **fields), right, 1e-3)

    assert [each.name for each in found] == [FindingName.WRONG_TEXT]


def test_two_answers_of_one_engine_show_its_noise():
    assert self_difference(RIGHT, changed(logprobs=(-0.1, -0.5, -0.31))) == pytest.approx(0.01)


def test_a_whole_completion_is_read():
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"b": -2.0, "a": -0.1}]}
    body = json.loads(completion(logprobs=logprobs)) | {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}

    answer = read([json.dumps(body).encode()])

    assert answer.choices[0].top_logprobs == ((("a", -0.1), ("b", -2.0)),)
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("ace", 7, 3)


def test_the_events_of_a_chat_become_one_answer():
    """Its tool calls, too, and choices in any order."""
    tool = {"tool_calls": [{"index": 0, "id": "random", "function": {"name": "f", "arguments": '{"a"'}}]}
    more = {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}
    deltas = [(1, {"content": "x"}, None), (0, tool, None), (0, more, "tool_calls"), (1, {"content": "y"}, "stop")]

    answer = read(
        [
            json.dumps({"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}).encode()
            for index, delta, finish in deltas
        ]
    )

    assert [(one.text, one.tools, one.finish) for one in answer.choices] == [
        ("", 'f{"a":1}', "tool_calls"),
        ("xy", "", "stop"),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"choices": [{"index": "0"}]}',
        b'{"choices": [{"index": 0, "text": "a"}]}',
        b'{"error": {"message": "no"}}',
        b'{"error": "no"}',
        b'{"choices": [{"index": 0, "text": "a", "finish_reason": "stop", "logprobs": {"token_logprobs": [NaN]}}]}',
    ],
)
def test_what_is_no_answer_is_malformed(body):
    """Whatever an engine sends, the suite goes on."""
    with pytest.raises(Malformed):
        read([body])


def test_a_stream_ends_with_done():
    """An end without it is no end."""
    assert events_of(b'data: {"a": 1}\n\ndata: [DONE]\n\n') == ([b'{"a": 1}'], True)
    assert events_of(b'data: {"a": 1}\n\ndata: {"b"') == ([b'{"a": 1}', b'{"b"'], False)
    assert events_of(b"") == ([], False)
