"""Chats of several turns on real engines, beside an oracle that sees all caches: as ``make bench-chats``, but short."""

import asyncio
import tempfile

import pytest

from benchmarks.chats.bench import EVICTIONS, RESTART, in_phase, small_cache, working_set
from benchmarks.chats.fleet import engines_of
from benchmarks.chats.report import HIT_GOAL, hit_rate
from benchmarks.chats.talk import Words, answer_alone

pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(400)]  # four more engines, a minute each

CHATS, TURNS = 10, 6


@pytest.fixture(scope="module")
def words(model):
    return Words(model)


@pytest.fixture(scope="module")
def chats(reference, words):
    """Chats that a single engine has answered."""
    found = words.chats(CHATS, TURNS, seed="e2e")
    asyncio.run(answer_alone(reference.base_url, words, found))
    return found


def held(phase, policy, fleet, model, words, chats):
    """Return what the phase has shown, and of it what one configuration has."""
    roomy = 2 * working_set(chats, [policy])
    blocks = small_cache(chats, [policy]) if phase == EVICTIONS else roomy
    with (
        tempfile.TemporaryDirectory(prefix="pdrelay-") as folder,
        engines_of(fleet, model, folder, prefill=2, decode=2, blocks=blocks) as engines,
    ):
        seen = in_phase(phase, fleet, engines, words, chats, [policy])
    assert not seen["wrong"]
    assert seen["sides"][policy]["right"] == CHATS * TURNS
    return seen, seen["sides"][policy]


@pytest.mark.parametrize("policy", ["prefix, ids"])
@pytest.mark.parametrize("phase", [EVICTIONS, RESTART])
def test_requests_go_where_their_beginning_is_cached(fleet, model, words, chats, phase, policy):
    """After evictions and after a restart, too: what the best of all engines has, the chosen one has nearly.

    Of chats the router has no token ids, so it does not see what was evicted: ``make bench-chats`` shows theirs.
    """
    seen, found = held(phase, policy, fleet, model, words, chats)
    rate = hit_rate(seen["after"].get(policy) or found)
    print(f"\n{phase}, {policy}: {found}; hit rate beside the oracle's: {rate}")

    assert rate >= HIT_GOAL
    if seen["counted"]:
        assert seen["counted"]["p"]["computed"] == found["computed"]["p"]
