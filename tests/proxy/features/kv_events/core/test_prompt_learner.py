"""Ids out of prefill engines' answers: short lists at once, long ones between other work, and bounded."""

import asyncio
import json

import msgspec

from pdrelay_proxy.core.model import Api, GenerationRequest, RoutingHints
from pdrelay_proxy.core.raw_json import Fields, decode
from pdrelay_proxy.core.routing.routing_hints import hints_of_call
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.features.kv_events.core.known_prompts import KnownPrompts
from pdrelay_proxy.features.kv_events.core.prompt_learner import READINGS_MOST, PromptLearner
from pdrelay_proxy.features.kv_events.core.prompt_lookup import PromptLookup
from pdrelay_proxy.features.kv_events.core.told_ids import IDS_MOST, PIECE


def ask(text="hello"):
    return RoutingHints(prompt=json.dumps([{"role": "user", "content": text}]).encode())


def answer(ids):
    return TokensAnswer(prompt_token_ids=msgspec.Raw(json.dumps(ids).encode()))


def learner():
    known = KnownPrompts(100.0)
    lookup = PromptLookup(known, lambda: 0.0)
    return known, PromptLearner(known, lambda: 0.0, call_soon, lookup)


def call_soon(call):
    asyncio.get_running_loop().call_soon(call)


def count(known, text="hello"):
    found = known.find(ask(text).blocks, now=0)
    return found and found.tokens.count


def test_ids_of_texts_are_wanted_and_those_of_ids_are_known():
    """Nobody has to tell what the client has written."""
    _, learning = learner()
    wanted = []
    for prompt in ("hello", [1, 2, 3]):
        call = GenerationRequest(Api.COMPLETIONS, decode(json.dumps({"prompt": prompt}).encode(), Fields), ())
        wanted.append(learning.wants_ids(call, hints_of_call(call)))

    assert wanted == [True, False]


def test_a_short_list_is_learned_at_once():
    known, learning = learner()
    learning.ids_told(ask(), answer([1, 2, 3]))

    assert (count(known), dict(known.counts)) == (3, {"learned": 1})


def test_answers_without_ids_are_counted():
    """Of an engine that does not know the question, or of another API."""
    known, learning = learner()
    for said in (None, TokensAnswer(), answer([]), answer(["1"]), answer([-1]), answer([1 << 32])):
        learning.ids_told(ask(), said)

    assert (len(known), dict(known.counts)) == (0, {"missing": 6})


async def test_a_long_list_is_read_between_other_work():
    """No turn of the event loop has more than a piece of it."""
    known, learning = learner()
    ids = list(range(100_000))
    learning.ids_told(ask(), answer(ids))
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
        learning.ids_told(ask(f"{number}"), long)
    learning.ids_told(ask("short"), answer([1]))
    learning.ids_told(ask("longest"), answer([123456] * (IDS_MOST // 6)))
    while known.counts["learned"] < READINGS_MOST + 1:
        await asyncio.sleep(0)

    assert dict(known.counts) == {"learned": READINGS_MOST + 1, "skipped": 4}
    learning.ids_told(ask("again"), long)
    while known.counts["learned"] < READINGS_MOST + 2:
        await asyncio.sleep(0)


async def test_a_long_list_that_ends_in_nonsense_makes_room_for_the_next():
    known, learning = learner()
    for _ in range(READINGS_MOST + 1):
        learning.ids_told(ask(), answer([*range(10_000), "x"]))
        while learning._readings:
            await asyncio.sleep(0)

    assert dict(known.counts) == {"missing": READINGS_MOST + 1}
