"""What ``explain`` says of a request, beside what becomes of it."""

import json

import pytest

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.pair_health import TRIAL_S, PairFailure
from pdrelay_proxy.core.model import Api, GenerationRequest, Role
from pdrelay_proxy.core.raw_json import Fields, decode
from pdrelay_proxy.core.routing.explain import Explainer
from pdrelay_proxy.core.routing.routing_hints import TELLS_MODEL
from pdrelay_proxy.core.routing.session_ids import SessionIds
from pdrelay_proxy.errors import BadRequest, PathNotServed
from pdrelay_proxy.settings import Settings
from support.bodies import BASE
from support.scripted import Scripted, call, good_decode, pulled_prefill, router_of


def explainer_of(router):
    return Explainer(
        router.fleet.rehearsal,
        router.push_coordinates,
        lambda: router.settings.current,
        SessionIds(()),
        router.leg_bodies,
        model_of_unnamed=router.registry.model_of_unnamed,
    )


def asked(api=Api.COMPLETIONS, **fields):
    body = {name: value for name, value in BASE[api].items() if name != "model"} | fields
    return GenerationRequest(api, decode(json.dumps(body).encode(), Fields), ())


@pytest.mark.parametrize("rested_s", [30.0, 30.0 + TRIAL_S])
async def test_a_pair_that_is_to_be_tried_is_what_explain_says(rested_s):
    """Its trial is part of the choice, also the second one behind one that showed nothing; asking is no trial."""
    now = 0.0
    engines = Scripted(pulled_prefill, good_decode)
    router = router_of(engines, 2, 2, clock=lambda: now, asks_for_models=True, pair_failures=1)
    for member in router.registry.members():
        router.registry.learn(member.instance.id, EngineCapabilities(frozenset({"m"})))
    health, pair = router.registry.pairs, ("prefill-1", "decode-1")
    health.failed(pair, PairFailure.HANDSHAKE, 3, now=now)
    router.registry.settle_rests("decode-1")
    if rested_s > 30.0:
        health.tried(pair, now=30.0)
    now = rested_s
    explainer = explainer_of(router)
    said = [explainer.explain(asked(model="m")) for _ in range(3)]
    await router.serve(call(model="m", max_tokens=5))
    sent = [engines.of(role)[0].instance.id for role in Role]

    assert {(one.prefill.id, one.decode.id) for one in said} == {pair}
    assert tuple(sent) == pair
    assert explainer.explain(asked(model="m")).prefill.id == "prefill-0"


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

    for member in router.registry.members():
        router.registry.learn(member.instance.id, EngineCapabilities(frozenset({"m"})))
    found = explain(asked(api))
    named = {json.loads(body).get("model") for body in (found.prefill_body, found.decode_body)}
    assert named == ({None} if api is Api.MESSAGES else {"m"})

    router.registry.learn("decode-1", EngineCapabilities(frozenset({"other"})))
    with pytest.raises(BadRequest, match="name a model: the engines behind this router serve m, other"):
        explain(asked(api))
