"""The names of a prompt's blocks: equal for equal contents behind equal beginnings, and for nothing else."""

import json

import msgspec
import pytest

from pdrelay_proxy.features.kv_events.core.token_blocks import (
    _PIECES,
    _PIECES_MOST,
    PROMPT_MOST,
    ROOT,
    TokenPrompt,
    extras_of,
    key_of,
    packed,
    packed_json,
    token_prompt,
)


def names(ids, size=2, *, salt=None, lora=None):
    prompt = TokenPrompt(ids, salt)
    keys = prompt.keys(size, lora)
    while (len(keys) + 1) * size <= prompt.count:
        prompt.more(keys, size, lora)
    return keys


def test_a_block_is_named_by_all_that_comes_before_its_end():
    """A cache is of no use in the middle of a prompt."""
    assert names([1, 2, 3, 4])[0] == names([1, 2, 9, 9])[0]
    assert names([1, 2, 3, 4])[1] != names([9, 9, 3, 4])[1]
    assert len({*names([1, 2, 1, 2, 1, 2])}) == 3


def test_salts_adapters_and_sizes_keep_blocks_apart():
    """As vLLM does, from the first block on."""
    variants = [{}, {"salt": "a"}, {"salt": "b"}, {"lora": "a"}, {"lora": "b"}, {"lora": "a", "salt": "a"}, {"size": 4}]
    found = [names([1, 2, 3, 4], **variant) for variant in variants]

    assert len({name for keys in found for name in keys}) == sum(map(len, found))


def test_the_adapters_name_counts_once_though_events_have_it_twice():
    """In a field of its own, and as the first extra key."""
    name, salt = (msgspec.Raw(msgspec.msgpack.encode(text)) for text in ("fr", "s"))

    assert extras_of("fr", (name, salt)) == extras_of("fr", (salt,)) != extras_of("fr", (name,))
    assert extras_of(None, (name,)) != extras_of("fr", ())
    assert extras_of(None, ()) == b""
    assert key_of(ROOT, packed([1]), b"") != key_of(ROOT, packed([1]), extras_of("fr", ()))


@pytest.mark.parametrize("text", ["[1, 2, 3]", " [\n1,2,3]", "[ 4294967295]"])
def test_a_prompt_of_ids_is_read(text):
    """As clients write it."""
    assert token_prompt(text.encode(), {}).count == len(json.loads(text))


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ('"text"', {}),
        ("[]", {}),
        ("", {}),
        ('["a"]', {}),
        ("[[1, 2]]", {}),
        ('[{"role": "user"}]', {}),
        ("[1, -2]", {}),
        ("[1, 2.5]", {}),
        ("[1, 4294967296]", {}),
        ("[1, 2", {}),
        ("[1, true]", {}),
        ("[1," + " " * PROMPT_MOST + "2]", {}),
        ("[1, 2]", {"truncate_prompt_tokens": b"1"}),
        ("[1, 2]", {"features": b"{}"}),
        ("[1, 2]", {"cache_salt": b"3"}),
    ],
    ids=map(str, range(15)),
)
def test_other_prompts_are_none_of_ids(text, context):
    """Texts, several prompts, what no engine takes, and prompts of which the ids are not all."""
    assert token_prompt(text.encode(), {name: msgspec.Raw(value) for name, value in context.items()}) is None


@pytest.mark.parametrize("written", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
def test_ids_that_come_again_are_the_same(written):
    """A long list is read in pieces, and those that are remembered are of the very same text."""
    ids = [number * 37 % 150_000 for number in range(1000)]
    other = [*ids[:900], 7, *ids[901:]]
    for each in (ids, ids, other, ids[:900], []):
        assert packed_json(json.dumps(each, separators=written).encode()) == packed(each)


def test_few_pieces_are_remembered():
    """Whatever clients send."""
    for number in range(_PIECES_MOST + 5):
        packed_json(b"[%d]" % number)
    assert 0 < len(_PIECES) <= _PIECES_MOST


def test_what_was_no_list_of_ids_is_none_again():
    """Nothing is remembered of it."""
    for _ in range(2):
        assert packed_json(b"[1,true]") is None
        assert packed_json(b"[1,2],3]") is None


def test_a_salt_is_taken_and_null_is_none():
    """As vLLM reads it."""
    plain, null = token_prompt(b"[1, 2]", {}), token_prompt(b"[1, 2]", {"cache_salt": msgspec.Raw(b"null")})
    salted = token_prompt(b"[1, 2]", {"cache_salt": msgspec.Raw(b'"s"')})
    first = [prompt.more(prompt.keys(2, None), 2, None) for prompt in (plain, null, salted)]

    assert first[0] == first[1] != first[2]


def test_what_is_remembered_of_ids_is_bounded():
    """JSON may have as much white space between two ids as a body may have bytes."""
    _PIECES.clear()
    ids = b"[1," + b" " * 100_000 + b"2]"

    assert packed_json(ids) == packed([1, 2])
    assert sum(map(len, _PIECES)) < 2048
