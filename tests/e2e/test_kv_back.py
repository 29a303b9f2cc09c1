"""KV of an answer goes back to the prefill engine in the next turn, instead of being computed there once more."""

import json
import random
from types import SimpleNamespace

import httpx
import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector
from support.cluster import Watch, engine_spec, nothing_held, start_engine, wait_until
from support.hand_chats import ANSWER, COMPUTED, FIRST, LATER, LOADED, TURNS, Chat, alone, engine_id, generate
from support.shapes import TWO_RANKS
from support.words import one_token_words

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

BLOCK = 32  # tokens of a block of the engines here
PATIENCE = 20  # s that P waits for D to say what it has: one that is well may get no core for the usual second
GENERATED = "vllm:generation_tokens_total"
BOTH = {
    "role": None,
    "connector": Connector.PDRELAY,
    "extra_connector_config": {"return_kv": True, "return_timeout": PATIENCE},
    "max_model_len": 4096,
}


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: who moves prompts makes no difference to what is looked up."""
    if params.get("pairs") == "one" or params.get("chats") == 6:
        return True
    if params.get("both") is not TransferMode.PUSH:
        return test == "test_chats_over_the_router" and not params["stream"]  # as half of the chats of the next test
    return test != "test_p_computes_only_what_neither_engine_has" or not params["stream"]


@pytest.fixture(scope="module", params=TransferMode, ids=str)
def both(request, fleet, model, reference):
    """Engines that lend and take KV in both directions; p1 has larger blocks. What goes back is read in either mode."""
    mode = request.param
    options = {**BOTH, "mode": mode}
    specs = {name: engine_spec(f"both-{mode}-{name}", model, **options) for name in ("p0", "d0", "d1")}
    specs["p1"] = engine_spec(f"both-{mode}-p1", model, **options, block_size=64)
    children = {name: start_engine(fleet, spec) for name, spec in specs.items()}
    fleet.wait_ready(list(children.values()), timeout_s=300)
    yield SimpleNamespace(**specs, reference=reference, children=children, options=options)
    fleet.stop(*children.values())


@pytest.fixture(scope="module")
def routers(both, start_router):
    """1P1D and 2P2D with return_kv, where every turn goes over a prefill engine."""
    args = ("--prefill-policy", "prefix", "--decode-policy", "prefix", "--return-kv", "true")
    args += ("--health-check-interval", "0.5")
    mode = both.options["mode"]
    one = start_router(f"router-back-{mode}-1", [both.p0], [both.d0], args=args)
    two = start_router(f"router-back-{mode}-2", [both.p0, both.p1], [both.d0, both.d1], args=args)
    return SimpleNamespace(one=one, two=two)


def has_nothing_held(*specs):
    for spec in specs:
        wait_until(lambda spec=spec: nothing_held(spec), seconds=20, what=f"{spec.name} is idle")


@pytest.mark.parametrize("stream", [False, True])
def test_p_computes_only_what_neither_engine_has(both, stream):
    """Its own cache has the last prompt, D's has the answer to it, but for the last token and a partial block.

    Only what D's cache lacks is handed over: all but the last token, which D computes.
    """
    chat = Chat(both.p0, both.d0, seed=1, salt=f"streamed {stream}")
    wanted = alone(both.reference, 1)

    for number, answer in enumerate(wanted):
        before = len(chat.tokens)
        text, p = chat.turn(stream=stream)
        assert text == answer, f"turn {number}"
        prompt = len(chat.tokens) - len(answer)
        kept = (before - 1) // BLOCK * BLOCK if number else 0  # tokens of whole blocks that D has computed
        assert p.computed == prompt - kept
        assert p.handed_over == prompt - 1 - kept
        assert (p.loaded > 0) == (number > 0)
    has_nothing_held(both.p0, both.d0)


def test_blocks_of_two_sizes(both):
    chat = Chat(both.p1, both.d0, seed=2)

    answers = [chat.turn() for _ in range(TURNS)]

    assert [text for text, _ in answers] == alone(both.reference, 2)
    assert all(p.loaded > 0 for _, p in answers[1:])
    has_nothing_held(both.p1, both.d0)


@pytest.mark.parametrize("change", ["history", "salt", "no name", "a stranger's name"])
def test_nothing_is_read_that_is_not_the_prompts(both, change):
    """A client may rewrite its history, and two tenants never share a block."""
    chat = Chat(both.p0, both.d0, seed=3, salt=f"change {change}")
    chat.turn()
    options = {}
    if change == "history":
        chat.tokens[5] += 1
    elif change == "salt":
        chat.salt = "another tenant"
    else:
        options = {"asks": change != "no name", "cached_on": "nobody-7"}

    with Watch(both.d0) as d:
        answer, p = chat.turn(**options)

    prompt = chat.tokens[: -len(answer)]
    assert answer == generate(both.reference, {"prompt": prompt, "cache_salt": f"alone {change}"})
    assert p.loaded == 0
    assert d.delta("vllm:pdrelay_prefixes_leased_total") == 0
    has_nothing_held(both.p0, both.d0)


@pytest.fixture(scope="module")
def words(model):
    """Words that are a token each, whatever stands beside them: an answer has the same tokens in the next turn."""
    return one_token_words(model)


def says(url, words, seed, *, stream, first=FIRST, later=LATER, answer=ANSWER, counted=None):
    """Hold a chat over a router, or with one engine; ``counted`` gets the tokens of the conversation so far."""
    dice = random.Random(seed)
    answers = []
    messages = []
    for _ in range(TURNS):
        text = "".join(dice.choices(list(words.values()), k=later if answers else first))
        messages.append({"role": "user", "content": text})
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": answer,
            "temperature": 0,
            "allowed_token_ids": list(words),
            "stream": stream,
            "cache_salt": f"chat {seed} {stream} {url[-5:]}",
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
        assert response.status_code == 200, response.text
        assert "pdrelay_cached" not in response.text + str(response.headers)
        answers.append(text_of(response, stream=stream))
        messages.append({"role": "assistant", "content": answers[-1]})
        if counted is not None:
            counted.append(usage_of(response, stream=stream)["total_tokens"])
    return answers


def usage_of(response, *, stream):
    if not stream:
        return response.json()["usage"]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return next(event["usage"] for event in reversed(events) if event.get("usage"))


def text_of(response, *, stream):
    if not stream:
        return response.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pairs", ["one", "two"])
def test_chats_over_the_router(both, routers, words, pairs, stream):
    """The client sends what any client sends; where the conversation is cached, the router knows."""
    url = getattr(routers, pairs)
    with Watch(both.p0) as p0, Watch(both.p1) as p1:
        answers = [says(url, words, seed, stream=stream) for seed in range(3)]

    assert answers == [says(both.reference.base_url, words, seed, stream=stream) for seed in range(3)]
    print(
        f"{pairs}, stream={stream}: P computed {p0.delta(COMPUTED) + p1.delta(COMPUTED):.0f}, loaded "
        f"{p0.delta(LOADED) + p1.delta(LOADED):.0f}"
    )
    assert p0.delta("vllm:pdrelay_prefixes_found_total") + p1.delta("vllm:pdrelay_prefixes_found_total") > 0
    assert p0.delta(LOADED) + p1.delta(LOADED) > 0
    assert p0.delta("vllm:pdrelay_prefixes_unanswered_total") + p1.delta("vllm:pdrelay_prefixes_unanswered_total") == 0
    has_nothing_held(both.p0, both.p1, both.d0, both.d1)


@pytest.mark.parametrize("chats", [2, 6])
def test_hardly_a_token_is_computed_twice(both, routers, words, chats):
    """Chats of 5 turns, streamed and not, over the router: what all engines compute, and what there is to compute.

    Beside what is new, a turn costs three tokens and what is no whole block of D: the last token of the answer before,
    P's own token, and the last token of the prompt, which D computes.
    """
    sizes = {"first": 600, "later": 260, "answer": 240}
    seeds = range(10 * chats, 11 * chats)
    alone = [says(both.d1.base_url, words, seed, stream=seed % 2 == 1, **sizes) for seed in seeds]
    new = 0
    answers = []
    with Watch(both.p0) as p, Watch(both.d0) as d:
        for seed in seeds:
            counted = []
            answers.append(says(routers.one, words, seed, stream=seed % 2 == 1, counted=counted, **sizes))
            new += counted[-1]
        has_nothing_held(both.p0, both.d0)
    computed = sum(engine.delta(name) for engine in (p, d) for name in (COMPUTED, GENERATED))
    print(f"{both.options['mode']}: {computed / new:.3f} tokens computed for each new one")

    assert answers == alone
    assert computed <= 1.05 * new


def test_a_decode_engine_of_two_ranks(both, fleet, model):
    """P reads each head from its rank, and D answers when both ranks have ended their step."""
    spec = engine_spec(f"both-{both.options['mode']}-two-ranks", model, **both.options, extra_args=TWO_RANKS)
    child = start_engine(fleet, spec)
    fleet.wait_ready([child], timeout_s=300)
    chat = Chat(both.p0, spec, seed=4)

    answers = [chat.turn() for _ in range(TURNS)]
    has_nothing_held(both.p0, spec)
    fleet.stop(child)

    assert [text for text, _ in answers] == alone(both.reference, 4)
    assert all(p.loaded > 0 for _, p in answers[1:])


def test_through_host_memory(fleet, model, engines):
    """Where NIXL cannot reach the cache: D stages what P reads, part by part, and P copies it into its own."""
    options = {
        **BOTH,
        "extra_connector_config": {**BOTH["extra_connector_config"], "host_staging": True, "staging_blocks": 16},
    }
    p, d = engine_spec("staged-p", model, **options, block_size=64), engine_spec("staged-d", model, **options)
    children = [start_engine(fleet, spec) for spec in (p, d)]
    fleet.wait_ready(children, timeout_s=300)
    chat = Chat(p, d, seed=5)

    with Watch(d) as decode, Watch(p) as prefill:
        answers = [chat.turn() for _ in range(TURNS)]
        has_nothing_held(p, d)
    fleet.stop(*children)

    assert [text for text, _ in answers] == alone(engines.reference, 5)
    assert all(turn.loaded > 0 for _, turn in answers[1:])
    assert decode.delta("vllm:pdrelay_prefixes_leased_total") == TURNS - 1
    assert decode.delta("vllm:pdrelay_bytes_staged_out_total") > 0
    assert prefill.delta("vllm:pdrelay_bytes_staged_in_total") > 0


def test_a_decode_engine_that_dies_between_two_turns(both, fleet, model):
    """P finds out when it asks, or before; the turn is computed as without return_kv."""
    victim = engine_spec(f"both-{both.options['mode']}-victim", model, **both.options)
    child = start_engine(fleet, victim)
    fleet.wait_ready([child], timeout_s=300)
    chat = Chat(both.p0, victim, seed=9, salt="victim")
    name = engine_id(victim)
    chat.turn()
    chat.turn()
    fleet.stop(child)
    chat.d = both.d0
    answer, p = chat.turn(cached_on=name)

    assert answer == alone(both.reference, 9)[2]
    assert p.computed > LATER + ANSWER - 2 * BLOCK
    has_nothing_held(both.p0, both.d0)
