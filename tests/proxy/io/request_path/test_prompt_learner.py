"""Ids out of prefill engines' answers: short lists at once, long ones between other work, and bounded."""

import asyncio
import json

import msgspec

from pdrelay_proxy.core.known_prompts import KnownPrompts
from pdrelay_proxy.core.model import RoutingHints
from pdrelay_proxy.core.protocol.prompt_ids import IDS_MOST, PIECE
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.io.request_path.prompt_learner import READINGS_MOST, PromptLearner


def ask(text="hello"):
    return RoutingHints(prompt=json.dumps([{"role": "user", "content": text}]).encode())


def answer(ids):
    return TokensAnswer(prompt_token_ids=msgspec.Raw(json.dumps(ids).encode()))


def learner():
    known = KnownPrompts(100.0)
    return known, PromptLearner(known, lambda: 0.0)


def count(known, text="hello"):
    found = known.find(ask(text).blocks, now=0)
    return found and found.tokens.count


def test_a_short_list_is_learned_at_once():
    known, learning = learner()
    learning.learn(ask(), answer([1, 2, 3]))

    assert (count(known), dict(known.counts)) == (3, {"learned": 1})


def test_answers_without_ids_are_counted():
    """Of an engine that does not know the question, or of another API."""
    known, learning = learner()
    for said in (None, TokensAnswer(), answer([]), answer(["1"]), answer([-1]), answer([1 << 32])):
        learning.learn(ask(), said)

    assert (len(known), dict(known.counts)) == (0, {"missing": 6})


async def test_a_long_list_is_read_between_other_work():
    """No turn of the event loop has more than a piece of it."""
    known, learning = learner()
    ids = list(range(100_000))
    learning.learn(ask(), answer(ids))
    assert not known.counts
    turns = 0
    while not known.counts:
        await asyncio.sleep(0)
        turns += 1

    assert count(known) == len(ids)
    assert turns >= len(json.dumps(ids)) // (PIECE * 2)


async def test_few_long_lists_are_read_at_a_time_and_others_are_left_out():
    """As are those of more ids than a megabyte of text has."""
    known, learning = learner()
    long = answer(list(range(10_000)))
    for number in range(READINGS_MOST + 3):
        learning.learn(ask(f"{number}"), long)
    learning.learn(ask("short"), answer([1]))
    learning.learn(ask("longest"), answer([123456] * (IDS_MOST // 6)))
    while known.counts["learned"] < READINGS_MOST + 1:
        await asyncio.sleep(0)

    assert dict(known.counts) == {"learned": READINGS_MOST + 1, "skipped": 4}
    learning.learn(ask("again"), long)
    while known.counts["learned"] < READINGS_MOST + 2:
        await asyncio.sleep(0)


async def test_a_long_list_that_ends_in_nonsense_makes_room_for_the_next():
    known, learning = learner()
    for _ in range(READINGS_MOST + 1):
        learning.learn(ask(), answer([*range(10_000), "x"]))
        while learning._readings:
            await asyncio.sleep(0)

    assert dict(known.counts) == {"missing": READINGS_MOST + 1}
