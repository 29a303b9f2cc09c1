"""Files of traces, good and hostile, and the generator."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_tools.planning.replay import trace_files
from pdrelay_tools.planning.replay.trace_files import Arrivals, read_trace
from pdrelay_tools.planning.replay.traces import Conversations, NoReplay

ARRIVALS = Arrivals(per_s=2.0, think_s=5.0, block_tokens=16, speed=2.0, seed=0)
MOONCAKE = {"timestamp": 3000, "input_length": 1100, "output_length": 600, "hash_ids": [0, 1, 2]}


@pytest.fixture
def read(tmp_path):
    """Write a file and read it as a trace."""

    def written(content):
        path = tmp_path / "trace"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_trace(path, ARRIVALS)

    return written


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


def test_mooncake(read):
    """Timestamps are milliseconds, divided by the speed; prompts share the blocks that have equal ids."""
    other = {**MOONCAKE, "timestamp": 4000, "input_length": 1024, "hash_ids": [0, 7]}
    trace = read(lines(MOONCAKE, other))

    assert (trace.block_tokens, [turn.at_s for turn in trace.turns]) == (512, [1.5, 2.0])
    assert [list(trace.full_blocks(turn)) for turn in trace.turns] == [[0, 1], [0, 7]]
    assert [len(trace.answer_blocks(turn)) for turn in trace.turns] == [1, 1]
    assert not set(trace.answer_blocks(trace.turns[0])) & set(trace.answer_blocks(trace.turns[1]))


def test_mooncake_conversations_are_found(read):
    """The second has all full blocks of the first and goes on: the block after them is what the answer has filled."""
    more = {"timestamp": 9000, "input_length": 1900, "output_length": 5, "hash_ids": [0, 1, 8, 9]}
    trace = read(lines(MOONCAKE, more, {**more, "hash_ids": [0, 5, 6, 7]}))

    assert [turn.session for turn in trace.turns] == ["r0", "r0", "r2"]
    assert list(trace.answer_blocks(trace.turns[0])) == [8]


@pytest.mark.parametrize(
    "content", ["100,20\n200,30\n", "prompt_tokens, output_tokens\n100,20\n\n200,30",
    lines({"prompt_tokens": 100, "output_tokens": 20}, {"prompt_tokens": 200, "output_tokens": 30})],
)  # fmt: skip
def test_lengths(read, content):
    """Nothing is shared, and requests come at the rate that is given."""
    trace = read(content)
    first, second = trace.turns

    assert [(turn.prompt_tokens, turn.output_tokens) for turn in trace.turns] == [(100, 20), (200, 30)]
    assert 0 < first.at_s < second.at_s
    assert not set(first.blocks) & set(second.blocks)


def test_conversations(read):
    """A turn for each answer; four characters are a token; equal beginnings are equal blocks."""
    talk = [{"role": "system", "content": "s" * 80}, {"role": "user", "content": "u" * 40},
            {"role": "assistant", "content": "a" * 100}, {"role": "user", "content": "?"},
            {"role": "assistant", "content": "b" * 8}, {"role": "user", "content": "no answer"}]  # fmt: skip
    other = [talk[0], {"role": "user", "content": "v" * 60}, {"role": "assistant", "content": "c"}]
    trace = read(json.dumps([{"id": "one", "messages": talk}, {"id": 2, "messages": other}, {"id": 3, "messages": []}]))

    assert [(turn.session, turn.prompt_tokens, turn.output_tokens, turn.goes_on) for turn in trace.turns] == [
        ("one", 30, 25, None), ("one", 56, 2, 0), ("2", 35, 1, None),
    ]  # fmt: skip
    assert trace.full_blocks(trace.turns[0])[0] == trace.full_blocks(trace.turns[2])[0]
    assert trace.full_blocks(trace.turns[0])[-1:] != trace.full_blocks(trace.turns[2])[1:]
    assert trace.turns[1].at_s == ARRIVALS.think_s


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (lines(MOONCAKE, {**MOONCAKE, "input_length": 0}), "line 2: Expected `int` >= 1"),
        (lines({**MOONCAKE, "input_length": 10**12}), "line 1: Expected `int` <= 10000000"),
        (lines({**MOONCAKE, "hash_ids": [1]}), "line 1: 1,100 tokens are 3 hash_ids, not 1"),
        (lines({**MOONCAKE, "hash_ids": [0, 1, -1]}), "line 1: Expected `int` >= 0"),
        (lines({**MOONCAKE, "timestamp": -1}), "line 1: Expected `float` >= 0"),
        (lines(MOONCAKE)[:-3], "line 1: Input data was truncated"),
        (lines({**MOONCAKE, "timestamp": 0}).replace(": 0,", ": NaN,", 1), "line 1: JSON is malformed"),
        (
            "100,20\n100",
            "line 2: expected prompt_tokens,output_tokens, two whole numbers from 1 to 10000000, not '100'",
        ),
        (
            "100,20\nmany,20",
            "line 2: expected prompt_tokens,output_tokens, two whole numbers from 1 to 10000000, not 'many,20'",
        ),
        (
            "100,1.5",
            "line 1: expected prompt_tokens,output_tokens, two whole numbers from 1 to 10000000, not '100,1.5'",
        ),
        ("1" * 99, "not '" + "1" * 60 + "'"),
        (b"\xff\xfe1,2", "line 1: expected prompt_tokens,output_tokens"),
        (b'{"prompt_tokens": 1, "\xff": 2}', "line 1: Object missing required field"),
        ("prompt_tokens,output_tokens", "no requests"),
        ("[]", "no conversation with an answer"),
        ('[{"id": 1, "messages": [{"role": "assistant", "content": "first"}]}]', "no conversation with an answer"),
        ('[{"id": 1, "messages": [{"role": "user", "content": 5}]}]', "messages: Expected `str`"),
        ("[" * 100_000, "must be a list of conversations"),
        ('[{"id": 1, "messages": [], "more": ' + "[" * 100_000, "must be a list of conversations"),
        ('{"filetype": "generate_conversations"}', "line 1: Object missing required field"),
    ],
)
def test_what_cannot_be_read(read, content, why):
    """One sentence with the line."""
    with pytest.raises(NoReplay) as found:
        read(content)

    assert why in str(found.value)


def test_what_is_too_much(read, monkeypatch, tmp_path):
    """Limits on bytes and requests."""
    monkeypatch.setattr(trace_files, "MOST_REQUESTS", 2)
    with pytest.raises(NoReplay, match="more than 2 requests"):
        read("1,1\n1,1\n1,1")
    monkeypatch.setattr(trace_files, "MOST_BYTES", 4)
    with pytest.raises(NoReplay, match="larger than 4 bytes"):
        read("1,1\n1,1\n1,1")
    with pytest.raises(NoReplay, match="cannot be read: No such file"):
        read_trace(tmp_path / "absent", ARRIVALS)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_trace_or_a_sentence(tmp_path_factory, content):
    """Nothing else comes out."""
    path = tmp_path_factory.mktemp("trace") / "trace"
    path.write_bytes(content)
    with suppress(NoReplay):
        assert read_trace(path, ARRIVALS).turns


def test_generated_conversations_grow():
    """Each prompt has the prompt and the answer before it, all share the system prompt, and a seed is one trace."""
    kind = Conversations(20, 3, 1.0, 4.0, 100, 50, 30)
    trace = kind.generate(16, 7)

    assert trace == kind.generate(16, 7) != kind.generate(16, 8)
    assert len(trace.turns) == 60
    assert len({tuple(trace.full_blocks(turn)[:6]) for turn in trace.turns}) == 1
    for before, turn in zip(trace.turns, trace.turns[1:], strict=False):
        if turn.goes_on is not None:
            assert turn.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert list(turn.blocks) == list(before.blocks)


def test_the_text_is_equal_as_far_as_the_blocks_are():
    """Policies compare it: messages as JSON, of users and of engines in turn, four bytes for a token."""
    trace = Conversations(2, 3, 1.0, 4.0, 160, 50, 30).generate(16, 0)
    first, third, other = (json.loads(trace.text(number)) for number in (0, 2, 3))
    head = trace.text(0)[:-1]
    tail = trace.text(2)

    assert tail.startswith(head)
    assert [one["role"] for one in third] == ["user", "assistant"] * 2 + ["user"]
    assert sum(len(one["content"]) for one in third) == trace.turns[2].prompt_tokens * 4
    assert first[0]["content"][:640] == other[0]["content"][:640]
    assert first[0]["content"][640:704] != other[0]["content"][640:704]
