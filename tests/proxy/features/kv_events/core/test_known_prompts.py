"""The tokens of a text, as a prefill engine has told them: for later texts that begin alike, and no more of them."""

import json

import msgspec
import pytest

from pdrelay_proxy.core.prompt_blocks import PromptBlocks
from pdrelay_proxy.features.kv_events.core.known_prompts import SEAM, KnownPrompts
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt

LIFETIME = 100.0
SYSTEM = {"role": "system", "content": "you are a lighthouse keeper, and answer in verse " * 10}


def blocks_of(messages, **context):
    """Blocks of a prompt as clients write it."""
    raw = json.dumps(messages, separators=(",", ":")).encode()
    return PromptBlocks(raw, {name: msgspec.Raw(json.dumps(value).encode()) for name, value in context.items()})


def user(text):
    return {"role": "user", "content": text}


def chat(*texts):
    """A chat in which both sides speak in turn."""
    return [SYSTEM, *({"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts))]


def ids(count, start=0):
    return list(range(start, start + count))


def learn(known, messages, tokens, now=0.0, *, is_even=True, **context):
    known.learn(blocks_of(messages, **context), TokenPrompt(tokens), is_even=is_even, now=now)


def found(known, messages, now=0.0, **context):
    """Return how many tokens are known, and whether they are all."""
    prefix = known.find(blocks_of(messages, **context), now=now)
    return prefix and (prefix.count, prefix.is_all)


@pytest.fixture
def known():
    return KnownPrompts(LIFETIME)


def test_an_equal_prompt_is_known_whole_and_one_that_goes_on_up_to_the_seam(known):
    """A template ends a prompt with the beginning of the answer, which may be another one in history."""
    learn(known, chat("hello"), ids(200))

    assert found(known, chat("hello")) == (200, True)
    assert found(known, chat("hello", "good evening", "and now?")) == (200 - SEAM, False)
    whole = blocks_of(chat("hello")).size
    assert known.find(blocks_of(chat("hello", "yes")), now=0).size == whole * (200 - SEAM) // 200
    assert found(known, [user("something else")]) is None


def test_fields_that_shape_the_prompt_keep_prompts_apart(known):
    """Another salt, model or list of tools: another beginning."""
    learn(known, chat("hello"), ids(200), cache_salt="mine", model="m")

    assert found(known, chat("hello"), cache_salt="mine", model="m") == (200, True)
    assert found(known, chat("hello"), cache_salt="yours", model="m") is None
    assert found(known, chat("hello"), cache_salt="mine", model="other") is None
    assert found(known, chat("hello"), cache_salt="mine", model="m", tools=[]) is None


def test_a_turn_takes_the_place_of_the_one_before_it(known):
    """Its ids are held once, and what was known exactly stays known."""
    learn(known, chat("hello"), ids(200))
    before = known.bytes
    learn(known, chat("hello", "yes", "and?"), ids(260))

    assert (len(known), dict(known.counts)) == (1, {"learned": 2, "continued": 1})
    assert known.bytes < 2 * before
    assert found(known, chat("hello", "no")) == (200 - SEAM, False)
    assert found(known, chat("hello", "yes", "and?")) == (260, True)


def test_keys_of_cache_blocks_are_made_once_for_a_conversation(known):
    """Each turn would hash all of it again."""
    first, second = TokenPrompt(ids(200)), TokenPrompt(ids(260))
    keys = first.keys(16, None)
    for _ in range(12):
        first.more(keys, 16, None)
    known.learn(blocks_of(chat("hello")), first, is_even=True, now=0)
    known.learn(blocks_of(chat("hello", "yes", "and?")), second, is_even=True, now=0)

    assert second.keys(16, None) == keys


def test_a_template_that_rewrites_what_came_earlier_is_noticed(known):
    """Some move the system prompt to the last message: what both turns have in common counts from then on."""
    learn(known, chat("hello"), ids(200))
    learn(known, chat("hello", "yes", "and?"), [*ids(50), *ids(210, 5000)])

    assert len(known) == 2
    assert found(known, chat("hello", "no")) == (50 - SEAM, False)


def test_a_common_beginning_has_at_least_the_tokens_that_its_rest_cannot_have(known):
    """No tokenizer makes more tokens than bytes. A document with two questions is known for a third one."""
    document = user("an old document " * 400)
    learn(known, [document, user("who wrote it?")], ids(2000))
    prefix = known.find(blocks_of([document, user("when?")]), now=0)

    rest = len(json.dumps(user("who wrote it?"), separators=(",", ":"))) + 1
    assert (prefix.count, prefix.is_all) == (2000 - rest - SEAM, False)
    assert prefix.size <= len(json.dumps([document])) - 1


def test_where_a_template_may_write_something_behind_the_beginning_it_has_no_bound(known):
    """Tools, in front of the last message."""
    document = user("an old document " * 400)
    learn(known, [document, user("who wrote it?")], ids(2000), is_even=False)

    assert found(known, [document, user("when?")]) is None
    assert found(known, [document, user("who wrote it?"), user("when?")]) == (2000 - SEAM, False)


def test_texts_are_known_in_whole_blocks(known):
    """The end of a text is in the middle of one."""
    text = "once upon a time there was a router " * 100
    learn(known, text, ids(900))

    assert found(known, text) == (900, True)
    count, is_all = found(known, text + "and then")
    assert (400 < count < 900, is_all) == (True, False)


def test_what_is_not_compared_whole_is_not_learned(known):
    """Two prompts that differ behind a megabyte are no equals."""
    learn(known, [user("x" * (1 << 20))], ids(1000))

    assert len(known) == 0


def test_prompts_are_forgotten_that_are_not_used_or_too_many():
    """The oldest first; memory is bounded in bytes."""
    known = KnownPrompts(LIFETIME)
    learn(known, chat("hello"), ids(200))
    learn(known, [user("another")], ids(200), now=90)
    known.used(known.find(blocks_of(chat("hello")), now=90), now=90)
    assert found(known, chat("hello"), now=180) == (200, True)
    assert found(known, chat("hello"), now=191) is None
    learn(known, [user("third")], ids(200), now=191)
    assert (len(known), known.counts["expired"]) == (1, 2)

    small = KnownPrompts(LIFETIME, most=10_000)
    for number in range(50):
        learn(small, [user(f"number {number}")], ids(100))
    assert small.bytes <= 10_000
    assert small.counts["evicted"] == 50 - len(small) > 40
    assert found(small, [user("number 0")]) is None
    assert found(small, [user("number 49")]) == (100, True)
    learn(small, [user("too long")], ids(5000))
    assert (len(small), small.bytes) == (0, 0)


def test_nothing_is_left_of_what_is_forgotten():
    """Each block's name is in a table of its own."""
    known = KnownPrompts(LIFETIME, most=60_000)
    for number in range(200):
        learn(known, chat(f"{number % 7}", *(f"{turn}" for turn in range(number % 5))), ids(150 + number))
    learn(known, [user("x")], ids(1), now=1e6)

    assert (len(known), len(known._owners)) == (1, 1)
