"""What ``explain`` says of a request, beside what becomes of it."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.peer_metrics import PairFailure
from pdrelay_proxy.core.model import Api, GenerationRequest, LegOrder, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.core.raw_json import Fields, decode
from pdrelay_proxy.core.routing.explain import Explainer
from pdrelay_proxy.core.routing.routing_hints import TELLS_MODEL
from pdrelay_proxy.core.routing.session_ids import SessionIds
from pdrelay_proxy.errors import BadRequest, PathNotServed, ProxyError
from pdrelay_proxy.features import feature_policies
from pdrelay_proxy.features.pairs.core.pair_health import TRIAL_S
from pdrelay_proxy.settings import KvTransferMode, PolicyName, Settings
from support.bodies import BASE
from support.scripted import Scripted, call, good_decode, params_of, prefilled, pulled_prefill, router_of


def explainer_of(router):
    return Explainer(
        router.fleet.rehearsal,
        router.push_coordinates,
        lambda: router.settings.current,
        SessionIds(()),
        router.leg_bodies.model_of,
        model_of_unnamed=router.registry.models.of_unnamed,
        claim=None if router.requests.claims is None else router.requests.claims.claim,
    )


def asked(api=Api.COMPLETIONS, **fields):
    body = {name: value for name, value in BASE[api].items() if name != "model"} | fields
    return GenerationRequest(api, decode(json.dumps(body).encode(), Fields), ())


def rest(history, pair, now):
    """Have a pair fail so often that it rests."""
    history.health.failed(pair, PairFailure.HANDSHAKE, 3, now=now)
    history._settle(pair[1])


@pytest.mark.parametrize("rested_s", [30.0, 30.0 + TRIAL_S])
async def test_a_pair_that_is_to_be_tried_is_what_explain_says(rested_s):
    """Its trial is part of the choice, also the second one behind one that showed nothing; asking is no trial."""
    now = 0.0
    engines = Scripted(pulled_prefill, good_decode)
    router = router_of(engines, 2, 2, clock=lambda: now, asks_for_models=True)
    for member in router.registry.members():
        router.registry.learn(member.instance.id, EngineCapabilities(frozenset({"m"})))
    history = router.fleet.pair_history
    pair = ("prefill-1", "decode-1")
    rest(history, pair, now)
    if rested_s > 30.0:
        history.health.tried(pair, now=30.0)
    now = rested_s
    explainer = explainer_of(router)
    said = [explainer.explain(asked(model="m")) for _ in range(3)]
    await router.serve(call(model="m", max_tokens=5))
    sent = [engines.of(role)[0].instance.id for role in Role]

    assert {(one.prefill.id, one.decode.id) for one in said} == {pair}
    assert tuple(sent) == pair
    assert explainer.explain(asked(model="m")).prefill.id == "prefill-0"


async def test_an_engine_that_can_do_either_is_asked_what_explain_says():
    """An operator reads there whether the KV cache would be pushed."""

    async def pushing(leg):
        return prefilled(leg, transfer_mode="push")

    engines = Scripted(pushing, good_decode)
    pushed = KvTransferMode.PUSH
    router = router_of(engines, mode=pushed, settings=Settings(kv_transfer_mode=pushed))
    for member in router.registry.members():
        router.registry.learn(member.instance.id, EngineCapabilities(mode=EngineMode.AUTO))
    said = json.loads(explainer_of(router).explain(asked()).prefill_body)["kv_transfer_params"]
    await router.serve(call())

    assert said["transfer_mode"] == params_of(engines.of(Role.PREFILL)[0])["transfer_mode"] == "push"


@pytest.mark.parametrize("least", [0, 4096])
async def test_an_engine_that_lacks_the_path_is_what_explain_leaves_out(least):
    """As the request does, split or alone."""
    engines = Scripted(pulled_prefill, good_decode)
    router = router_of(engines, 2, 2, settings=Settings(min_split_new_bytes=least))
    decodes = router.registry.known(Role.DECODE)
    for member in router.registry.members():
        router.registry.learn(member.instance.id, EngineCapabilities(frozenset({"m"})))
    router.fleet.lacks_path(Api.COMPLETIONS, decodes[0])
    explain = explainer_of(router).explain
    said = explain(asked(model="m"))
    await router.serve(call(model="m"))

    assert [engine.instance for engine in engines.of(Role.DECODE)] == [said.decode] == [decodes[1]]
    assert [engine.instance for engine in engines.of(Role.PREFILL)] == ([said.prefill] if said.prefill else [])
    assert (said.prefill is None) == bool(least)


async def test_what_all_engines_lack_is_refused_by_explain_too():
    """In the words that the client gets."""
    router = router_of(Scripted(pulled_prefill, good_decode), 1, 2)
    for decode_engine in router.registry.known(Role.DECODE):
        router.fleet.lacks_path(Api.COMPLETIONS, decode_engine)
    client = await router.serve(call())

    with pytest.raises(PathNotServed) as refusal:
        explainer_of(router).explain(asked())
    assert str(refusal.value) in str(client.error)


@pytest.mark.parametrize("api", Api)
def test_a_request_without_a_model_is_explained_as_it_is_served(api):
    """Refused among several base models, under the name of one; alone while none is known, if no answer tells it."""
    router = router_of(Scripted(pulled_prefill, good_decode), 2, 2)
    explain = explainer_of(router).explain
    assert (explain(asked(api)).rule == "single: unknown_model") == (api not in TELLS_MODEL)
    if api is Api.COMPLETIONS:
        # the second where no feature divides arrays: then it is no matter of models
        assert explain(asked(api, prompt=["x", "y"])).rule in ("single: unknown_model", "single: several_prompts")

    for member in router.registry.members():
        router.registry.learn(member.instance.id, EngineCapabilities(frozenset({"m"})))
    found = explain(asked(api))
    named = {json.loads(body).get("model") for body in (found.prefill_body, found.decode_body)}
    assert named == ({None} if api is Api.MESSAGES else {"m"})

    router.registry.learn("decode-1", EngineCapabilities(frozenset({"other"})))
    with pytest.raises(BadRequest, match="name a model: the engines behind this router serve m, other"):
        explain(asked(api))


_KINDS = st.sampled_from([None, "a", "b"])  # fingerprints: of two that are known and differ, no pair fits
_MODELS = st.sampled_from([None, frozenset({"m"}), frozenset({"m", "other"}), frozenset({"other"})])
_FACTS = st.builds(
    EngineCapabilities,
    models=_MODELS,
    connector=st.sampled_from([None, "pdrelay", "pdrelay", "nixl"]),
    fingerprint=_KINDS,
    mode=st.sampled_from([None, EngineMode.PULL, EngineMode.PUSH, EngineMode.AUTO, EngineMode.AUTO]),
)
_LENGTHS = st.sampled_from(["hi", "a quiet river " * 4, "a quiet river " * 40])
_PROMPTS = _LENGTHS | st.lists(_LENGTHS, min_size=2, max_size=3)
_FIELDS = st.fixed_dictionaries(
    {"prompt": _PROMPTS, "max_tokens": st.sampled_from([1, 2, 9])},
    optional={"model": st.sampled_from(["m", "other", "nobody"]), "n": st.sampled_from([1, 2]), "echo": st.booleans()},
)
_RULES = st.fixed_dictionaries(
    {
        "min_split_new_bytes": st.sampled_from([0, 30, 300]),
        "decode_only_fallback": st.booleans(),
        "mode": st.sampled_from([KvTransferMode.AUTO, *KvTransferMode]),
    }
)
_NAMES = st.sampled_from([*PolicyName, *feature_policies()])
_POLICIES = _NAMES.map(lambda name: {"prefill_policy": name, "decode_policy": name})
_SESSIONS = st.sampled_from([(), ((b"x-session-id", b"one"),), ((b"x-session-id", b"two"),)])


class _Prefills:
    """Prefill engines that lend their blocks or push, as the router wants it or as each of them always does."""

    def __init__(self, wanted):
        self.wanted = wanted
        self.facts = {}

    async def __call__(self, leg):
        known = self.facts[leg.instance.id]
        mode = known.mode or EngineMode.PULL
        if self.wanted is not KvTransferMode.AUTO:
            mode = self.wanted
        elif mode is EngineMode.AUTO:
            mode = params_of(leg).get("transfer_mode", "pull")
        answer = prefilled(leg, engine=leg.instance.id, transfer_mode=str(mode))
        return replace(
            answer, body=json.dumps(json.loads(answer.body) | {"model": min(known.models or {"m"})}).encode()
        )


class _Engines(Scripted):
    """Whose blocks are freed when an array ends with a refusal."""

    async def post(self, leg, *, timeout_s):
        return prefilled(leg)


def _explained(router, asked):
    """Return the engines that explain names, whether their legs go out at once, whether it is a part; or a refusal."""
    call = GenerationRequest(Api.COMPLETIONS, decode(asked.body, Fields), asked.headers)
    try:
        said = explainer_of(router).explain(call)
    except ProxyError as refusal:
        return str(refusal)
    names = tuple(None if one is None else one.id for one in (said.prefill, said.decode))
    return names, "both legs at once" in said.rule, "each of" in said.rule


async def _served(router, asked, name):
    """Return the same of a request that is served; of several prompts that go their own ways, that of the first."""
    client = await router.serve(asked, name)
    first = router.ended.get(f"{name}-p0")
    record = client.record if first is None else first[0]
    if record.prefill is None and record.decode is None:
        return client.error[1]
    names = tuple(None if leg is None else leg.instance for leg in (record.prefill, record.decode))
    return names, record.push is LegOrder.CONCURRENT, first is not None


@settings(max_examples=150, deadline=None, phases=[Phase.generate])
@given(
    st.lists(_FACTS, min_size=1, max_size=3),
    st.lists(_FACTS, min_size=1, max_size=3),
    _RULES,
    _POLICIES,
    st.lists(st.tuples(_FIELDS, _SESSIONS, st.sampled_from(["", "ill", "rests", "lacks"])), min_size=1, max_size=9),
)
def test_what_explain_says_is_what_happens_next(prefills, decodes, rules, policies, requests):
    """Both are one decision: whatever is known of the engines, and whatever has come before."""
    asyncio.run(_compare(prefills, decodes, rules, policies, requests))


async def _compare(prefills, decodes, rules, policies, requests):
    now = 0.0
    answers = _Prefills(rules["mode"])
    router = router_of(
        _Engines(answers, good_decode),
        len(prefills),
        len(decodes),
        clock=lambda: now,
        asks_for_models=True,
        retries=0,
        settings=Settings(**policies),
        **rules,
    )
    for role, facts in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
        for instance, found in zip(router.registry.known(role), facts, strict=True):
            router.registry.learn(instance.id, found)
            answers.facts[instance.id] = found
    for number, (fields, session, event) in enumerate(requests):
        member = router.registry.members()[number % len(router.registry.members())]
        if event == "ill":
            member.life.failed("earlier", Failure.UNREACHABLE, now=now)
        elif event == "rests":
            rest(router.fleet.pair_history, ("prefill-0", "decode-0"), now)
        elif event == "lacks":
            router.fleet.lacks_path(Api.COMPLETIONS, member.instance)
        now += 7.0
        asked = call(headers=session, stream=True, **fields)
        said = [_explained(router, asked), _explained(router, asked)]
        served = await _served(router, asked, f"r{number}")
        if served[-1] is True and served[0][1] is None:
            # Another prompt was refused before the decode leg of the first one was sent.
            said = [((names[0], None), *other) for names, *other in said]
        assert [served, served] == said
