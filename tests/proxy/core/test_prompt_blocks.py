"""The next turn of a chat finds all of the last one, whoever writes the JSON."""

import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.prompt_blocks import BLOCK, BLOCKS_MOST, BYTES_MOST, PromptBlocks

COMPACT, SPACED = (",", ":"), (", ", ": ")
ODD = 'a "quoted" }, {"role":"user"} and ][ \\" },{" é\n'
TEXTS = st.lists(st.sampled_from(["", "hi", ODD, ODD * 9, "x" * 2000]), min_size=1, max_size=7)


def messages(texts):
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]


def blocks(value, separators=COMPACT, **context):
    raw = value if isinstance(value, bytes) else json.dumps(value, separators=separators).encode()
    return PromptBlocks(raw, {name: msgspec.Raw(text) for name, text in context.items()})


def common(one, other):
    """The bytes of the blocks that two prompts have in common."""
    pairs = zip(one.names, other.names, one.ends, strict=False)
    return max((end for mine, theirs, end in pairs if mine == theirs), default=0)


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
@given(texts=TEXTS, more=TEXTS)
def test_the_next_turn_has_all_of_the_last_one(separators, texts, more):
    """And what is between them, if an engine has written it."""
    texts = texts if len(texts) % 2 else texts[1:] or ["a"]
    first, second = blocks(messages(texts), separators), blocks(messages([*texts, *more]), separators)

    assert common(first, second) == first.size
    answer = json.dumps(messages(["", more[0]])[1], separators=separators)
    written = len(separators[0]) + len(answer)
    if len(more) == 1:
        written = second.size - first.size
    assert second.generated(second.ends.index(first.size)) == written


@given(texts=TEXTS, at=st.integers(0, 6), separators=st.sampled_from([COMPACT, SPACED]))
def test_what_was_edited_ends_what_is_common(texts, at, separators):
    """A client may change its history: nothing from there on is in a cache."""
    at %= len(texts)
    edited = [*texts[:at], texts[at] + "!", *texts[at + 1 :]]
    one, other = blocks(messages(texts), separators), blocks(messages(edited), separators)

    same = len(json.dumps(messages(texts[: at + 1]), separators=separators).encode())
    assert common(one, other) <= same


@pytest.mark.parametrize("field", ["model", "cache_salt", "tools", "system", "chat_template_kwargs"])
def test_what_stands_before_the_messages_matters(field):
    """A cache begins at the first token, and that of another salt or adapter is another one."""
    plain = blocks(messages(["hello"]))

    assert common(plain, blocks(messages(["hello"]), **{field: b'"x"'})) == 0
    assert common(plain, blocks(messages(["hello"]), temperature=b"1")) == plain.size


def test_several_messages_of_an_engine_are_its_own():
    """Tools are called in one message or several, and what the client answers is new."""
    first = [{"role": "user", "content": "weather?"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f"}}] * 2
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    found = blocks([*first, said, {"role": "tool", "tool_call_id": "1", "content": "sun"}])
    assert found.generated(0) == len(json.dumps(said, separators=COMPACT)) + 1

    items = [{"type": "reasoning", "content": []}, {"type": "function_call", "name": "f"}]
    found = blocks([*first, *items, {"type": "function_call_output", "output": "sun"}])
    assert found.generated(0) == len(json.dumps(items, separators=COMPACT)) - 2 + 1


@pytest.mark.parametrize("raw", [b"", b"[]", b'""', b"null", b"[1,2,3]", b'"a', b"\xff\xfe"])
def test_any_bytes_have_blocks(raw):
    """The engine says what is wrong with a prompt."""
    found = blocks(raw)

    assert found.ends == ([found.size] if found.size else [])


def test_a_text_is_compared_in_pieces():
    """A prompt that is no chat has no messages; its whole pieces are found again."""
    text = "0123456789" * 200
    one, other = blocks(text), blocks(text + " and more")

    assert one.size - BLOCK < common(one, other) <= one.size


@pytest.mark.parametrize("value", [[{"a": 1}] * 500_000, ["},{"] * 500_000, "x" * (16 << 20)])
def test_the_blocks_of_a_prompt_are_bounded(value):
    """Whatever a client sends: memory is counted in blocks."""
    found = blocks(value)

    assert len(found.names) == len(found.ends) <= BLOCKS_MOST
    assert found.ends == sorted(set(found.ends))
    assert found.ends[-1] <= BYTES_MOST < found.size


def test_a_long_conversation_is_followed_at_little_cost():
    """All of 256 KiB is compared, in some hundred blocks; only what was computed counts, and not once a policy asks."""
    text = "some words of a long document, {with: some} punctuation, and \n lines. " * 20
    value = json.dumps(messages([text] * 180)).encode()
    assert 250_000 < len(value) < 280_000
    found = blocks(value)
    assert found.ends[-1] == found.size == len(value) - 1
    assert len(found.ends) < 400
    assert len(blocks("x" * 262_144).ends) < 250

    spent = []
    for _ in range(5):
        start = time.thread_time()
        blocks(value)
        spent.append(time.thread_time() - start)
    assert min(spent) < 0.02  # measured: 0.0003
