"""Which requests have several prompts, and how the answers to them become one."""

import json

import msgspec
import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.features.prompt_arrays.core.prompt_arrays import (
    MergedAnswer,
    MergedStream,
    choices_of,
    one_of,
    prompts_of,
)


def fields(**values):
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in values.items()}


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (["a", "b"], ['"a"', '"b"']),
        (["", "b", "[1]"], ['""', '"b"', '"[1]"']),
        ([[1, 2], [3]], ["[1, 2]", "[3]"]),
        ("a", []),
        (["a"], []),
        ([[1]], []),
        ([1, 2, 3], []),
        ([], []),
        (None, []),
        (7, []),
        ({"a": "b"}, []),
        (["a", [1]], []),  # vLLM refuses a mixture
        ([[1], "a"], []),
        (["a", 1], []),
        ([["a"], ["b"]], []),
        ([[], [1]], []),
        (["a", None], []),
    ],
)
def test_which_are_several(prompt, found):
    """Texts or lists of ids, two or more; what is anything else stays whole, and an engine says what is wrong."""
    assert [bytes(raw).decode() for raw in prompts_of(Api.COMPLETIONS, fields(prompt=prompt))] == found


def test_white_space_and_other_calls():
    """JSON allows the one; the others have no such field."""
    raw = msgspec.Raw(b'[ \n"a" ,\t"b" ]')

    assert len(prompts_of(Api.COMPLETIONS, {"prompt": raw})) == 2
    assert not prompts_of(Api.COMPLETIONS, {})
    assert not prompts_of(Api.CHAT, {"prompt": raw})
    assert not prompts_of(Api.COMPLETIONS, {"prompt": msgspec.Raw(b'["a", "b"')})  # no JSON
    assert one_of({"prompt": raw, "n": msgspec.Raw(b"2")}, msgspec.Raw(b'"a"')) == {
        "prompt": msgspec.Raw(b'"a"'),
        "n": msgspec.Raw(b"2"),
    }
    assert [choices_of(fields(n=n)) for n in (1, 3, None, "3")] == [1, 3, 1, 1]


def answer(*texts, prompt=5, cached=None, **more):
    choices = [{"index": index, "text": text, "finish_reason": "length"} for index, text in enumerate(texts)]
    usage = {"prompt_tokens": prompt, "completion_tokens": 2 * len(texts), "total_tokens": prompt + 2 * len(texts)}
    usage["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
    return json.dumps({"id": "cmpl-x", "model": "m", "created": 3, "choices": choices, "usage": usage, **more}).encode()


def test_whole_answers():
    """In the order of the prompts, whichever came first; and all numbers added up."""
    merged = MergedAnswer("cmpl-me", 2)
    merged.take(1, answer("c", "d", prompt=7, cached=3))
    merged.take(0, answer("a", "b", metrics={"time_to_first_token_ms": 1}))
    merged.take(2, answer("e", "f", prompt=1, cached=1))

    whole = json.loads(merged.whole())

    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [*enumerate("abcdef")]
    assert whole["usage"] == {
        "prompt_tokens": 13,
        "completion_tokens": 12,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert (whole["id"], whole["model"], whole["created"], whole["metrics"]) == ("cmpl-me", "m", 3, None)


@pytest.mark.parametrize(
    "body",
    [
        b"no JSON",
        b"[]",
        b"{}",
        b'{"choices":[7]}',
        answer("a", "b"),
        b'{"choices":[{"index":-1}]}',
        b'{"choices":[{}]}',
    ],
)
def test_no_completions(body):
    """An engine that answers something else, or more than it was asked for."""
    merged = MergedAnswer("cmpl-me", 1)
    merged.take(0, answer("a"))
    merged.take(1, body)

    with pytest.raises(EngineError, match="an engine"):
        merged.whole()


def event(index=0, text="t", **more):
    choice = {"index": index, "text": text}
    return b"data: %b\n\n" % json.dumps({"id": "cmpl-x", "created": 3, "choices": [choice], **more}).encode()


def usage_event(prompt, completion):
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return b"data: %b\n\n" % json.dumps({"id": "cmpl-x", "created": 9, "choices": [], "usage": usage}).encode()


def read(lines):
    return [json.loads(line[6:]) for line in lines.decode().splitlines() if line.startswith("data: {")]


def test_streams():
    """One id and time, the numbers of the whole answer, one usage and one end."""
    merged = MergedStream("cmpl-me", 2)
    shown = merged.feed(1, b": comment\n\n" + event(1, "d") + event(0, "c"))
    shown += merged.feed(0, event(0, "a", created=4) + usage_event(5, 2) + b"data: [DONE]\n\n")
    shown += merged.feed(1, usage_event(7, 4))
    end = merged.end()

    assert [(e["choices"][0]["index"], e["choices"][0]["text"]) for e in read(shown)] == [(3, "d"), (2, "c"), (0, "a")]
    assert {(e["id"], e["created"]) for e in read(shown)} == {("cmpl-me", 3)}
    (last,) = read(end)
    assert last["usage"] == {"prompt_tokens": 12, "completion_tokens": 6, "total_tokens": 18}
    assert (last["id"], last["created"], last["choices"]) == ("cmpl-me", 3, [])
    assert end.endswith(b"}\n\ndata: [DONE]\n\n")
    assert b"DONE" not in shown


def test_streams_without_usage():
    """Nobody asked for it."""
    merged = MergedStream("cmpl-me", 1)
    merged.feed(0, event())

    assert merged.end() == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (b'data: {"error":{"message":"it broke","code":500}}\n\n', "it broke"),
        (b'data: {"error":"it broke"}\n\n', "it broke"),
        (b'data: {"error":{}}\n\n', "an engine sent an error"),
        (b"data: {\n\n", "no completion"),
        (b'data: {"choices":7}\n\n', "no completion"),
        (event(1), "numbered a choice 1"),
    ],
)
def test_broken_streams(lines, words):
    """An engine's own error, and what is no event of vLLM's."""
    with pytest.raises(EngineError, match=words):
        MergedStream("cmpl-me", 1).feed(0, lines)
