"""The benchmark of chats: its oracle knows what is cached, and it notices a wrong text.

A benchmark that does not notice them praises the router that makes the most of them.
"""

import random
from contextlib import aclosing

import pytest

from benchmarks.chats import report
from benchmarks.chats.oracle import EngineBlocks, Oracle
from benchmarks.chats.talk import Batch, Words
from support.sim import cluster
from xpyd_proxy.core.protocol.kv_event_stream import KvEventStream
from xpyd_proxy.local.model import ensure_model
from xpyd_proxy.testing.prefix_cache import PrefixCache
from xpyd_proxy.testing.rules import expected_text, prompt_tokens

pytestmark = pytest.mark.edges


CHATS, TURNS = 3, 3


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    model = tmp_path_factory.mktemp("model") / "tiny"
    ensure_model(model)
    return Words(model)


@pytest.fixture
def chats(words):
    """Chats as a simulated engine answers them."""
    found = words.chats(CHATS, TURNS, seed=1)
    for chat in found:
        for turn in range(TURNS):
            body = words.body(messages=chat.messages(turn))
            chat.answers.append(expected_text(body))
            chat.prompts.append([0] * prompt_tokens(body))
    return found


async def test_the_oracle_knows_what_is_cached():
    """After evictions, and of prompts with salts."""
    cache, blocks, stream, dice = PrefixCache(20), EngineBlocks(), KvEventStream(), random.Random(1)
    prompts = [([dice.randrange(2) for _ in range(16)] * 2 + [*range(n * 100, n * 100 + 70)], n % 3) for n in range(12)]
    salts = (None, "a", "b")
    seen = []
    async with aclosing(cache.frames()) as frames:
        for ids, salt in prompts * 2:
            cache.use(ids, salts[salt])
            while any(cache.readers) or not blocks.is_known:
                for payload in stream.feed(await anext(frames)):
                    blocks.apply(payload)
            seen += [(blocks.cached(each, salts[key]), cache.has(each, salts[key])) for each, key in prompts]

    assert [known for known, _ in seen] == [cached for _, cached in seen]
    assert {0, 96} < {cached for _, cached in seen}
    assert len(blocks) == 20


class Blind(Oracle):
    """An oracle that sees nothing."""

    def __init__(self):
        super().__init__({}, "")

    def cached(self, ids, salt):
        return {"d0": 0}


async def hold(words, chats):
    with cluster(1, 1, model="tiny") as found:
        sides = {"one": f"http://{found.router}", "two": f"http://{found.router}"}
        batch = Batch(words, chats, sides, Blind(), at_once=2, open_most=3, think_s=0.01)
        turns = await batch.hold()
        assert batch.count == 2 * CHATS * TURNS
    return turns


async def test_every_answer_is_compared(words, chats):
    """Those that are right are counted as right; a chat with a wrong one ends there."""
    turns = await hold(words, chats)
    assert len(turns) == 2 * CHATS * TURNS
    assert all(turn.is_right and turn.first for turn in turns)

    chats[1].answers[1] += " wrong"
    turns = await hold(words, chats)
    assert [(turn.chat, turn.turn) for turn in turns if not turn.is_right] == [(1, 1)] * 2
    assert len(turns) == 2 * (CHATS * TURNS - 1)


async def test_the_page_says_what_was_seen(words, chats, tmp_path):
    """With a side that is better than the other one."""
    turns = await hold(words, chats)
    for turn in turns:
        turn.most, turn.cached = 100, 50 if turn.side == "one" else 100
    sides = {side: report.summary(turns, side) for side in ("one", "two")}
    phase = {"chats": 3, "seconds": 1.0, "blocks": 9, "working_set": 90, "counted": {}, "sides": sides, "after": {}}
    settings = {"prefill": 1, "decode": 1, "turns": 3, "at_once": 2}
    machine = {"cores": 2, "processor": "x", "system": "y"}
    report.write({"machine": machine, "settings": settings, "phases": {"evictions": phase}}, tmp_path / "chats.json")
    page = (tmp_path / "chats.md").read_text()

    assert "| `one` | 9 of 9 | 0.500 |" in page
    assert "| `two` | 9 of 9 | 1.000 |" in page
    assert "1.00, met" in page
    assert (tmp_path / "chats.svg").exists()
