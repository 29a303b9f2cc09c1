"""Answers are read at the border, and compared so that a wrong block shows and rounding does not."""

import json
from dataclasses import replace

import pytest

from pdrelay_tools.proving.core.answer import (
    Answer,
    Malformed,
    OneAnswer,
    differences,
    events_of,
    read,
    self_difference,
)
from pdrelay_tools.proving.core.finding import FindingName

LIKELY = ((("a", -0.1), ("b", -2.0)), (("c", -0.5), ("d", -0.50001)), (("e", -0.3), ("f", -1.0)))
ONE = OneAnswer("ace", ("a", "c", "e"), (-0.1, -0.5, -0.3), LIKELY, "length", "")
RIGHT = Answer((ONE,), 7, 3)


def changed(**fields):
    return replace(RIGHT, choices=(replace(ONE, **fields),))


def names(ours, tolerance=1e-3):
    return [each.name for each in differences(ours, RIGHT, tolerance)]


def completion(**fields):
    return json.dumps({"choices": [{"index": 0, "text": "ace", "finish_reason": "length", **fields}]}).encode()


def test_equal_answers_differ_in_nothing():
    assert names(RIGHT) == []


def test_rounding_is_no_difference():
    """Of a logprob, within what the reference differs from itself."""
    assert names(changed(logprobs=(-0.1005, -0.5, -0.3))) == []


def test_another_token_is_wrong_text():
    assert names(changed(text="bce", tokens=("b", "c", "e"))) == [FindingName.WRONG_TEXT]


def test_a_tie_may_fall_either_way():
    """The reference had both within the tolerance; what follows is another text, and not compared."""
    assert names(changed(text="adx", tokens=("a", "d", "x"), logprobs=(-0.1, -0.5, -3.0))) == []


def test_a_tie_does_not_hide_what_was_before_it():
    ours = changed(text="adx", tokens=("a", "d", "x"), logprobs=(-0.9, -0.5, -3.0))

    assert names(ours) == [FindingName.WRONG_LOGPROBS]


def test_wrong_logprobs_under_the_right_text_are_found():
    """A wrong block need not change the likeliest token."""
    assert names(changed(logprobs=(-0.1, -0.52, -0.3))) == [FindingName.WRONG_LOGPROBS]


def test_wrong_logprobs_of_other_tokens_are_found():
    """The token that was made can keep its logprob where the next likely one does not: it shows in fewer tokens."""
    first, *rest = RIGHT.choices[0].others
    moved = tuple((token, logprob - (0.05 if token != RIGHT.choices[0].tokens[0] else 0.0)) for token, logprob in first)

    assert [each.name for each in differences(changed(others=(moved, *rest)), RIGHT, 1e-3)] == [
        FindingName.WRONG_LOGPROBS
    ]


def test_an_answer_without_logprobs_is_not_equal_to_one_with_them():
    assert names(changed(tokens=(), logprobs=(), others=())) == [FindingName.WRONG_LOGPROBS]


@pytest.mark.parametrize("fields", [{"text": "acx"}, {"finish": "stop"}, {"tools": "f{}"}])
def test_texts_ends_and_tool_calls_are_compared(fields):
    """Also of answers without logprobs."""
    plain = {"tokens": (), "logprobs": (), "others": ()}
    right = replace(RIGHT, choices=(replace(ONE, **plain),))

    found = differences(changed(**plain, **fields), right, 1e-3)

    assert [each.name for each in found] == [FindingName.WRONG_TEXT]


def test_a_shorter_answer_is_wrong_text():
    assert names(changed(text="ac", tokens=("a", "c"), logprobs=(-0.1, -0.5))) == [FindingName.WRONG_TEXT]


def test_counts_of_prompts_are_compared():
    assert names(replace(RIGHT, prompt_tokens=8)) == [FindingName.WRONG_USAGE]


def test_counts_of_answers_are_compared():
    """Clients pay by them. Behind a tie the answers may be of other lengths."""
    assert names(replace(RIGHT, completion_tokens=4)) == [FindingName.WRONG_USAGE]
    assert names(replace(RIGHT, completion_tokens=None)) == [FindingName.WRONG_USAGE]
    tied = changed(text="ad", tokens=("a", "d"), logprobs=(-0.1, -0.5))
    assert names(replace(tied, completion_tokens=2)) == []


def test_a_missing_choice_is_wrong_text():
    assert names(replace(RIGHT, choices=())) == [FindingName.WRONG_TEXT]


def test_two_answers_of_one_engine_show_its_noise():
    assert self_difference(RIGHT, changed(logprobs=(-0.1, -0.5, -0.31))) == pytest.approx(0.01)


def test_a_whole_completion_is_read():
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"b": -2.0, "a": -0.1}]}
    body = json.loads(completion(logprobs=logprobs)) | {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}

    answer = read([json.dumps(body).encode()])

    assert answer.choices[0].others == ((("a", -0.1), ("b", -2.0)),)
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
