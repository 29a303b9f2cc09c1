"""Beside vLLM's OffloadingConnector, with a tier in memory and one of files: on P, on D and on both.

What is measured is printed: ``pytest -s tests/e2e/test_offloading.py``.
"""

import random
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from pdrelay_proxy.core.protocol.push import EngineMode, TransferMode
from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import SOON, Watch, engine_spec, nothing_held, wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import bodies, run
from support.offloading_engines import COMPUTED, LOADED, READ, STORED, Chat, tier_rests, with_tier
from support.questions import compare, ids
from support.router_orders import states, wait_known
from support.storm import salt
from support.victims import Victim, hang_up
from support.words import one_token_words

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CHATS, TURNS = 5, 3
# 2,047 tokens: less than all chats have together at their end, so that engines evict what a later turn needs.
SMALL = {"kv_cache_mib": 8, "max_model_len": 1024}
LEASE = 5  # s; what nobody comes for is kept for as long
LOADS, SKIPPED = "vllm:pdrelay_loads_total", "vllm:pdrelay_loads_skipped_local_total"
BOTH = ("p_tier", "d_tier")
PAIRS = [("p", "d"), ("p_tier", "d"), ("p", "d_tier"), BOTH, ("p_tier", "d_tier_first")]


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: in push the tier does the same, shown once for each scene."""
    return params.get("mode") is TransferMode.PUSH and params.get("pair", BOTH) != BOTH


@pytest.fixture(scope="module")
def engines(fleet, model, tmp_path_factory):
    """P and D without a tier; P and D with one, and a D where it is listed first."""
    named = {}
    for name in ("p", "d", "p_tier", "d_tier", "d_tier_first"):
        spec = engine_spec(
            f"offloading-{name}", model, role=Role.PREFILL if name[0] == "p" else Role.DECODE,
            connector=Connector.PDRELAY, mode=EngineMode.AUTO, **SMALL,
            extra_connector_config={"kv_lease_duration": LEASE},
        )  # fmt: skip
        if "tier" in name:
            spec = with_tier(spec, tmp_path_factory.mktemp(name), ours_first=name != "d_tier_first")
        named[name] = Victim(spec, fleet)
    for victim in named.values():
        victim.start()
    fleet.wait_ready([victim.child for victim in named.values()], timeout_s=300)
    yield SimpleNamespace(**named, all=list(named.values()), fleet=fleet)
    fleet.stop(*(victim.child for victim in named.values() if victim.child in fleet.children))


@pytest.fixture
def open_router(start_router, request):
    """Start a router for a pair."""

    def start(prefill, decode, mode=TransferMode.PULL):
        args = ("--kv-transfer-mode", str(mode), "--health-check-interval", "0.5")
        name = f"router-{request.node.name}"
        url = start_router(name, [prefill.spec], [decode.spec], args=args, env={"ADMIN_API_KEY": ADMIN_KEY})
        wait_known(url)
        return url

    return start


@pytest.fixture(scope="module")
def words(model):
    return one_token_words(model)


def hold(url, words, engines=()):
    """Hold chats, a turn of each after the other; return them, and what the engines did in all turns but the first."""
    said = salt()
    chats = [Chat(words, seed, said) for seed in range(CHATS)]
    for chat in chats:
        chat.turn(url)
    with ExitStack() as stack:
        watches = [stack.enter_context(Watch(engine.spec)) for engine in engines]
        for _ in range(1, TURNS):
            for chat in chats:
                chat.turn(url)
    return chats, watches


@pytest.fixture(scope="module")
def alone(reference, words):
    """What one engine says in all chats."""
    return [chat.answers for chat in hold(reference.base_url, words)[0]]


def are_at_rest(*victims):
    """Wait until engines hold nothing, and nothing is under way to a tier or from it."""
    for victim in victims:
        wait_until(lambda v=victim: nothing_held(v.spec), seconds=SOON, what=f"{victim.spec.name} holds nothing")
        wait_until(lambda v=victim: tier_rests(v.spec), seconds=SOON, what=f"the tier of {victim.spec.name} is at rest")


def said_of(watch, name):
    """Return how a counter has moved that vLLM shows from its first value on."""
    return watch.after.get(name, 0.0) - watch.before.get(name, 0.0)


@pytest.mark.parametrize("mode", TransferMode, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_chats_are_right_and_the_tier_of_p_spares_what_its_cache_has_evicted(
    engines, open_router, words, alone, pair, mode
):
    """The KV of all turns moves from P to D, unless D's tier is listed first: then D computes what its tier lacks."""
    p, d = (getattr(engines, name) for name in pair)
    chats, (at_p, at_d) = hold(open_router(p, d, mode), words, [p, d])
    turns = CHATS * (TURNS - 1)
    new = sum(sum(chat.new[1:]) for chat in chats)
    print(f"\n{'-'.join(pair)}, {mode}: prompts of {sum(sum(chat.prompts[1:]) for chat in chats)} tokens, {new} new")
    for name, watch in (("P", at_p), ("D", at_d)):
        moved = {key: int(said_of(watch, key)) for key in (COMPUTED, LOADS, SKIPPED, STORED, LOADED)}
        print(f"{name}: {moved}")

    assert [chat.answers for chat in chats] == alone
    if p is engines.p_tier:
        assert at_p.delta(COMPUTED) == new
        assert at_p.delta(LOADED) > 0
    else:
        assert at_p.delta(COMPUTED) > 1.2 * new
    if d is engines.d_tier_first:
        assert at_d.delta(LOADS) + at_d.delta(SKIPPED) == turns
        assert at_d.delta(LOADED) > 0
    else:
        assert at_d.delta(LOADS) == at_d.delta(COMPUTED) == turns  # of each prompt, D computes the last token
        assert said_of(at_d, LOADED) == 0
    assert (said_of(at_d, STORED) > 0) == (d is not engines.d)
    are_at_rest(p, d)


@pytest.mark.parametrize("name", ["p", "p_tier"])
def test_a_p_that_is_back_loads_from_files_what_it_had_computed(engines, open_router, words, alone, name):
    """It was killed, not asked to end: what is in files, is there for whoever comes."""
    p = getattr(engines, name)
    d = engines.d
    url = open_router(p, d)
    chat = Chat(words, 0, salt())
    computed = []
    read = []
    for turn in range(TURNS):
        if turn == TURNS - 1:
            are_at_rest(p)
            p.kill()
            p.start()
            engines.fleet.wait_ready([p.child], timeout_s=300)
            wait_until(lambda: states(url) == ["healthy"] * 2, seconds=SOON, what="the router has seen that P is back")
        with Watch(p.spec) as watch:
            chat.turn(url)
        computed.append(int(watch.delta(COMPUTED)))
        read.append(int(said_of(watch, READ)))
    print(f"\n{name}: prompts {chat.prompts}, new {chat.new}, computed {computed}; read from files {read} bytes")

    assert chat.answers == alone[0]
    assert computed[:-1] == chat.new[:-1]
    assert computed[-1] == (chat.new if name == "p_tier" else chat.prompts)[-1]
    assert (read[-1] > 0) == (name == "p_tier")
    are_at_rest(p, d)


@pytest.mark.parametrize("mode", TransferMode, ids=str)
def test_nothing_is_held_for_clients_that_leave(engines, open_router, reference_answer, mode):
    """Before the first token and after it, of prompts that no cache has, and of those that only P's tier has."""
    p, d = (getattr(engines, name) for name in BOTH)
    url = open_router(p, d, mode)
    dice = random.Random(str(mode))
    prompts = [[dice.randrange(10, 500) for _ in range(400)] for _ in range(8)]  # more than P's cache
    place = urlsplit(url)
    router = SimpleNamespace(host=place.hostname, port=place.port)
    for after in (None, b"data:", None):
        for prompt in prompts:
            hang_up(router, {"prompt": prompt, "max_tokens": 200, "stream": True}, after=after)
    are_at_rest(p, d)
    _, wrong = compare(url, [ids(prompt) for prompt in prompts], reference_answer)

    assert wrong == {}
    are_at_rest(p, d)


@pytest.mark.parametrize("mode", TransferMode, ids=str)
def test_p_holds_nothing_for_a_d_that_dies(engines, open_router, reference, mode):
    """In the middle of its answers; when it is back, all is as before."""
    p, d = (getattr(engines, name) for name in BOTH)
    url = open_router(p, d, mode)
    asked = list(bodies(6, 150, seed=5, salt=f"dies {mode}"))
    expected = run(reference.base_url, asked)
    streams = run(url, asked, d.kill, behind=5)
    found = Counter(one.verdict(other) for one, other in zip(streams, expected, strict=True))
    are_at_rest(p)
    d.start()
    engines.fleet.wait_ready([d.child], timeout_s=300)
    wait_until(lambda: states(url) == ["healthy"] * 2, seconds=SOON, what="the router has seen that D is back")
    again = Counter(one.verdict(other) for one, other in zip(run(url, asked), expected, strict=True))
    print(f"\nD killed: {dict(found)}; when it is back: {dict(again)}")

    assert found.keys() <= {"right", "honest", "broken"}
    assert again == {"right": len(asked)}
    are_at_rest(p, d)
