"""What engines have of texts and chats: events about what is known of their tokens, and the guess for the rest."""

import itertools
import json
import random

import pytest

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.kv_events.core.event_reports import CacheSource
from pdrelay_proxy.io.request_path.caches import SENT
from support.chatting import LEAST, World, play, said

EVENTS, BOTH = CacheSource.EVENTS, CacheSource.EVENTS_AND_SENT
D0 = "decode-0"
D1 = "decode-1"
P0 = "prefill-0"
P1 = "prefill-1"


def text(words, seed=0):
    return said(random.Random(seed), words, words)


def chat(*texts, **more):
    messages = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(texts)]
    return {"model": "sim", "messages": messages, **more}


def cached(world, body, name=D0):
    """Return the bytes of a prompt that an engine has, as policies ask for them."""
    _, ask = world.request(body)
    (one,) = (each for role in Role for each in world.fleet.known(role) if each.id == name)
    return world.fleet.caches.matched(one, ask, is_there=True)


def served(world, body, answer="yes"):
    """Serve a request, and say which decode engine it was."""
    before = {name: world.truth(name, body) for name in (D0, D1)}
    world.serve(body, answer)
    world.told()
    (name,) = (name for name in before if world.truth(name, body) > before[name])
    return name


LONG, MORE = text(200), text(200, 1)
SIZE = len(json.dumps(chat(LONG)["messages"]))


def test_a_prompt_that_was_never_computed_is_known_by_what_was_sent():
    """As without events: that is nothing."""
    world = World()

    assert world.seen(chat(LONG)) == ({}, dict.fromkeys((P0, P1, D0, D1), SENT))


@pytest.mark.parametrize("body", [chat(LONG), {"model": "sim", "prompt": LONG}, chat(LONG, cache_salt="mine")])
def test_an_equal_prompt_is_known_exactly(body):
    """Every engine's tokens are those that vLLM would count, whoever has sent the prompt there."""
    world = World()
    other = ({D0, D1} - {served(world, body)}).pop()
    world.caches[other].use(world.ids(body), body.get("cache_salt"))
    world.told()
    tokens, sources = world.seen(body)

    assert tokens == {name: world.truth(name, body) for name in (P0, P1, D0, D1)}
    assert sorted(tokens.values()) == [0, *[tokens[other]] * 3]
    assert set(sources.values()) == {EVENTS}


def test_another_salt_is_another_prompt():
    """Nothing of it is known, so what was sent counts: nothing."""
    world = World()
    served(world, chat(LONG, cache_salt="mine"))

    assert world.seen(chat(LONG, cache_salt="yours"))[0] == {}


def test_the_beginning_of_the_next_turn_is_known_by_events_and_the_rest_by_what_was_sent():
    """The prefill engine has no answer; the decode engine has it, as far as anybody can tell."""
    world = World()
    name = served(world, chat(LONG), "an answer")
    body = chat(LONG, "an answer", "and then?")
    tokens, sources = world.seen(body)

    assert sources[name] == BOTH
    assert 0 < world.truth(name, body) - tokens[name] < 64
    whole = len(json.dumps(chat(LONG, "an answer")["messages"]))
    assert whole - 60 < cached(world, body, name) <= whole


def test_an_eviction_is_seen_at_once():
    """The guess would have sent the next turn to an engine that has nothing."""
    world = World()
    name = served(world, chat(LONG), "an answer")
    body = chat(LONG, "an answer", "and then?")
    assert cached(world, body, name) > len(LONG)
    world.caches[name].clear()
    world.told()

    assert cached(world, body, name) == 0
    assert world.seen(body)[1][name] == EVENTS
    world.caches[name].use(world.ids(body)[:320])
    world.told()
    assert cached(world, body, name) == pytest.approx(320 * SIZE / len(world.ids(chat(LONG))), rel=0.05)


def test_what_a_decode_engine_has_added_alone_counts_as_far_as_there_are_blocks():
    """Such turns bring no tokens: the blocks behind the known beginning are at least so many as are there."""
    world = World()
    said_so_far = [LONG, "an answer"]
    name = served(world, chat(LONG), "an answer")
    for turn in range(12):
        body = chat(*said_so_far, text(6, turn))
        assert world.serve(body, text(20, 90 + turn))
        world.told()
        said_so_far += [text(6, turn), text(20, 90 + turn)]
    body = chat(*said_so_far, "?")
    first = world.ids(chat(LONG))
    size = len(json.dumps(body["messages"]))
    assert cached(world, body, name) > size - LEAST

    world.caches[name].use([*range(10, 10 + 16 * (400 - len(first) // 16 - 1))])  # all but the first turn goes
    world.told()
    assert world.truth(name, body) >= len(first) - 16
    assert world.seen(body)[1][name] == BOTH
    assert cached(world, body, name) < SIZE + 200


def test_images_behind_a_known_beginning_do_not_count_by_their_bytes():
    """A link is short and a picture long, or the other way round: the guess stands."""
    world = World()
    name = served(world, chat(LONG), "an answer")
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "x" * 5000}}]}
    body = chat(LONG, "an answer")
    body["messages"].append(picture)
    world.serve(body, "a picture")
    world.told()
    body["messages"] += [{"role": "assistant", "content": "a picture"}, {"role": "user", "content": "and?"}]

    assert cached(world, body, name) > 5000


def test_a_prompt_on_its_way_to_a_prefill_engine_counts():
    """Its events come after it was scheduled; a decode engine must have it."""
    world = World()
    served(world, chat(LONG))
    body = chat(LONG, "yes", MORE)
    _, ask = world.request(body)
    _, other = world.fleet.known(Role.PREFILL)
    before = world.fleet.caches.matched(other, ask)
    world.fleet.caches.sent(other, ask)

    assert world.fleet.caches.matched(other, ask) > SIZE + len(MORE) > before
    world.now += 6
    assert world.fleet.caches.matched(other, world.request(body)[1]) < SIZE + 200


def test_a_prompt_that_a_prefill_engine_has_evicted_counts_while_it_computes_it_again():
    """It takes longer than its events do: an equal prompt meanwhile would be computed by another engine, too."""
    world = World()
    world.serve(chat(LONG), "yes")
    world.told()
    body = chat(LONG)
    engine = next(one for one in world.fleet.known(Role.PREFILL) if world.truth(one.id, body))
    world.fleet.caches.arrived(engine, world.request(body)[1])
    world.caches[engine.id].clear()
    world.told()
    world.now += 100
    ask = world.request(body)[1]
    evicted = world.fleet.caches.matched(engine, ask)
    world.fleet.caches.sent(engine, ask)
    world.now += 0.5

    assert evicted == 0
    assert world.fleet.caches.matched(engine, world.request(body)[1]) > SIZE - LEAST
    world.fleet.caches.arrived(engine, ask)
    world.now += 0.5
    assert world.fleet.caches.matched(engine, world.request(body)[1]) == 0


def test_an_adapter_has_blocks_of_its_own():
    """Those of the base model do not count for it; which one a model is, its engine's probe has shown."""
    world = World()
    for one in world.caches:
        facts = type(world.fleet.registry.facts(world.fleet.known(Role.PREFILL)[0]))
        world.fleet.registry.learn(one, facts(models=frozenset({"sim", "fr"}), adapters=frozenset({"fr"})))
    body = chat(LONG) | {"model": "fr"}
    world.serve(body, "oui")  # the pretended engine says nothing of an adapter: it is that of the base model
    world.told()

    assert set(world.seen(body)[0].values()) == {0}


def test_a_template_that_drops_what_was_thought_costs_no_more_than_the_seam():
    """The end of the known prompt is not in the next one: no engine is said to have more than it has."""
    world = World(thinks=True)
    name = served(world, chat(LONG), "an answer")
    body = chat(LONG, "an answer", "and then?")

    assert 0 < world.seen(body)[0][name] <= world.truth(name, body)


def imagined_in(world, seed, turns):
    """Play; return the engines that were said to have more tokens of a prompt than they had, of every third request."""
    imagined = []
    number = itertools.count()

    def look(body):
        if next(number) % 3 == 0:
            tokens, _ = world.seen(body)
            imagined.extend((name, count) for name, count in tokens.items() if count > world.truth(name, body))

    play(world, seed, turns, look)
    return imagined


@pytest.mark.parametrize("blocks", [300, pytest.param(800, marks=pytest.mark.slow)])
def test_chats_hit_what_they_would_if_all_were_known_and_nothing_is_imagined(blocks):
    """Random chats with evictions, restarts, and clients that change what was said.

    Of no engine are more tokens said to be cached than are. The requests hit at least 95 % of what they would if the
    router knew each cache; with less memory (200 blocks), what was sent alone brings it down to 87 %.
    """
    worlds = [World(blocks=blocks) for _ in range(2)]
    imagined = [imagined_in(world, seed, 250) for seed, world in enumerate(worlds)]
    oracles = [play(World(blocks=blocks, omniscient=True), seed, 250) for seed in range(2)]

    assert imagined == [[], []]
    assert [world.asked for world in worlds] == [oracle.asked for oracle in oracles]
    assert sum(world.hits for world in worlds) >= 0.95 * sum(oracle.hits for oracle in oracles)
    assert all(world.alone and world.known.counts["continued"] for world in worlds)


def test_nothing_is_imagined_where_a_template_rewrites_answers():
    """Every turn's end is another one in history."""
    assert imagined_in(World(blocks=300, thinks=True), 5, 150) == []


def test_what_was_found_for_a_request_ends_with_an_event():
    """What an engine stores or evicts meanwhile counts at once."""
    world = World()
    name = served(world, chat(LONG))
    _, ask = world.request(chat(LONG))
    (one,) = (each for each in world.fleet.known(Role.DECODE) if each.id == name)
    caches = world.fleet.caches
    had = caches.matched(one, ask)
    for number in range(8):
        world.serve(chat(text(200, 100 + number)), "other")
    caches.matched(one, ask)
    found = caches._latest

    world.told()
    caches.matched(one, ask)

    assert had > SIZE // 2
    assert caches._latest is not found
