"""Which model a request means, and that its engines serve that one: several base models behind one router."""

import json
from dataclasses import replace

import pytest

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, facts_of_models
from pdrelay_proxy.core.model import Api, EngineResponse, LegOrder, Role, SingleEngineReason
from pdrelay_proxy.core.routing.routing_hints import TELLS_MODEL
from pdrelay_proxy.core.schemas import ModelCard
from pdrelay_proxy.errors import EngineError
from support.bodies import BASE
from support.scripted import JSON, Asked, Scripted, good_decode, prefilled, pulled_prefill, request_id, router_of

PROMPT = {"prompt": "a quiet river"}
ASKED = {
    **{api.name.lower(): (api.value, body) for api, body in BASE.items()},
    "several prompts": ("/v1/completions", BASE[Api.COMPLETIONS] | {"prompt": ["x", "y", "z"]}),
    "tokenize": ("/tokenize", PROMPT),
    "embeddings": ("/v1/embeddings", {"input": "x"}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": []}),
}
ONE_PROMPT = {name: asked for name, asked in ASKED.items() if name != "several prompts"}
UNNAMED = {"absent": {}, "null": {"model": None}, "empty": {"model": ""}}


def asks(path, body, **fields):
    bare = {name: value for name, value in body.items() if name != "model"}
    return Asked(path, json.dumps(bare | fields).encode())


def form(model, path="/v1/audio/transcriptions"):
    """A form as curl writes it; ``model``: the value of its part of that name, or no such part."""
    part = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    named = b"" if model is None else part % (b"model", model)
    body = named + part % (b'file"; filename="a.wav', b"RIFF") + b"--x--\r\n"
    return Asked(path, body, ((b"content-type", b"multipart/form-data; boundary=x"),))


async def answers(leg):
    """A decode engine's answer, to whatever it is asked."""
    said = json.loads(leg.body) if leg.content_type == b"application/json" else {}
    if said.get("stream"):
        return await good_decode(leg)
    return EngineResponse(200, JSON, b'{"choices":[{"index":0,"text":"x"}]}')


async def knows_none(leg):
    """An engine that serves another model, in vLLM's words."""
    error = {"message": "The model `a` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
    return EngineResponse(404, JSON, json.dumps({"error": error}).encode())


def serving(router, facts):
    """Let engines say what they serve: their names are those of ``facts``."""
    for name, found in facts.items():
        router.registry.learn(name, found)


def cards(*names, adapters=(), root=None):
    return EngineCapabilities(frozenset({*names, *adapters}), adapters=frozenset(adapters), root=root)


def two_models(engines, **options):
    """A prefill and a decode engine of model a, and the same of model b."""
    router = router_of(engines, 2, 2, asks_for_models=True, **options)
    serving(router, {"prefill-0": cards("a"), "prefill-1": cards("b"), "decode-0": cards("a"), "decode-1": cards("b")})
    return router


@pytest.mark.parametrize("fields", UNNAMED.values(), ids=UNNAMED)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_a_request_must_name_one_of_several_base_models(asked, streams, fields):
    """No engine gets it: P of one and D of the other would make a text of neither."""
    engines = Scripted(pulled_prefill, answers)
    router = two_models(engines)
    client = await router.serve(asks(*asked, **fields, stream=streams))
    error = json.loads(client.body)["error"]

    assert client.status == 400
    assert error["message"] == "name a model: the engines behind this router serve a, b"
    assert error.get("param", "model") == "model"
    assert not engines.legs


async def test_a_form_must_name_one_of_several_base_models():
    """Also where its part is there and empty, or no text."""
    engines = Scripted(pulled_prefill, answers)
    for value in (None, b"", b"\xff"):
        client = await two_models(engines).serve(form(value))
        assert client.status == 400

    assert not engines.legs


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_a_form_goes_to_an_engine_of_the_model_that_it_names(path):
    """As JSON does; a name that no engine has is told, with those there are."""
    engines = Scripted(pulled_prefill, answers)
    router = two_models(engines)
    for number in range(4):
        assert (await router.serve(form(b"b", path), f"r{number}")).status == 200
    unknown = await router.serve(form(b"c", path), "u")

    assert {leg.instance.id for leg in engines.legs} == {"decode-1"}
    assert (unknown.status, unknown.error) == (
        404,
        ("NotFoundError", "the model 'c' is not served here; there is a, b"),
    )


@pytest.mark.parametrize("fields", UNNAMED.values(), ids=UNNAMED)
@pytest.mark.parametrize("asked", ONE_PROMPT.values(), ids=ONE_PROMPT)
async def test_adapters_and_other_names_are_no_other_base_model(asked, fields):
    """An engine serves its base model beside them, so a request without a name is as good as before."""
    engines = Scripted(pulled_prefill, answers)
    router = router_of(engines, 2, 2, asks_for_models=True)
    serving(
        router,
        {
            "prefill-0": cards("a", "alias"),
            "prefill-1": cards("a", adapters=["one"]),
            "decode-0": cards("a", adapters=["two"]),
            "decode-1": cards("a", "alias", adapters=["one", "two"]),
        },
    )
    client = await router.serve(asks(*asked, **fields))

    assert client.status == 200
    if asked[0] in tuple(Api):
        assert {leg.instance.role for leg in engines.legs} == set(Role)
        named = {json.loads(leg.body).get("model") or None for leg in engines.legs}
        # Engines look at the name again: by now they may serve another model.
        assert named == ({None} if asked[0] == Api.MESSAGES else {"a"})


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("api", sorted(TELLS_MODEL))
async def test_before_any_engine_says_what_it_serves_the_first_one_of_a_request_names_it_to_the_other(
    api, mode, streams
):
    """Of two engines the one might serve another model: the decode engine checks the name, also before P answers."""

    async def prefill(leg):
        names = {Api.RESPONSES: "resp_{}_0", Api.COMPLETIONS: "cmpl-{}-0-1"}
        name = names.get(api, "chatcmpl-{}-1").format(request_id(leg))
        answer = prefilled(leg, transfer_mode=mode, remote_request_id=name)
        said = json.loads(answer.body) | {"model": "b"}
        return EngineResponse(200, JSON, json.dumps(said).encode())

    async def decode(leg):
        serves = {"decode-0": "a", "decode-1": "b"}[leg.instance.id]
        return await (answers if json.loads(leg.body).get("model") == serves else knows_none)(leg)

    engines = Scripted(prefill, decode)
    router = router_of(engines, 1, 2, asks_for_models=True)
    for number in range(4):
        client = await router.serve(asks(api.value, BASE[api], stream=streams), f"r{number}")
        assert client.status == 200

    assert {json.loads(leg.body).get("model") for leg in engines.of(Role.DECODE)} == {"b"}
    if mode == "push":
        assert client.record.push is LegOrder.CONCURRENT


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", [Api.GENERATE, Api.MESSAGES])
async def test_an_answer_that_names_no_model_cannot_tell_it(api, streams):
    """One engine serves such a request, while it is not known what engines serve."""
    engines = Scripted(pulled_prefill, answers)
    router = router_of(engines, 2, 2, asks_for_models=True)
    client = await router.serve(asks(api.value, BASE[api], stream=streams))

    assert (client.status, len(engines.legs)) == (200, 1)
    assert client.record.single_reason is SingleEngineReason.UNKNOWN_MODEL


@pytest.mark.parametrize("api", [Api.GENERATE, Api.MESSAGES])
async def test_what_no_client_may_set_is_left_out_while_no_model_is_known(api):
    """One engine gets the body, and would report its whole cache to each follower of its events."""
    extra = {"kv_cache_report_mode": "full", "mine": 0.10}
    fields = {
        Api.GENERATE: {"sampling_params": {"max_tokens": 5, "extra_args": extra}},
        Api.MESSAGES: {"vllm_xargs": extra},
    }
    engines = Scripted(pulled_prefill, answers)
    await router_of(engines, asks_for_models=True).serve(asks(api.value, BASE[api], **fields[api]))

    (leg,) = engines.legs
    assert b'"mine":0.1' in leg.body.replace(b" ", b"")
    assert b"kv_cache_report_mode" not in leg.body


async def test_one_adapters_name_at_two_base_models_is_no_model_in_common():
    """Its KV cache is that of the base model, and of what the adapter adds to it."""
    engines = Scripted(pulled_prefill, answers)
    router = router_of(engines, 1, 1, asks_for_models=True)
    serving(router, {"prefill-0": cards("a", adapters=["x"]), "decode-0": cards("b", adapters=["x"])})
    client = await router.serve(asks("/v1/completions", PROMPT, model="x", max_tokens=5))

    assert client.status == 200
    assert client.record.single_reason is SingleEngineReason.NO_MATCH
    assert [leg.instance.id for leg in engines.legs] == ["decode-0"]


async def test_engines_whose_model_lies_in_two_places_share_no_request():
    """Other weights under the old name, as far as a list of models shows them."""
    engines = Scripted(pulled_prefill, answers)
    router = router_of(engines, 2, 2, asks_for_models=True)
    old, new = cards("a", root="/models/1"), cards("a", root="/models/2")
    serving(router, {"prefill-0": old, "prefill-1": new, "decode-0": old, "decode-1": new})
    for number in range(8):
        await router.serve(asks("/v1/completions", PROMPT, max_tokens=5), f"r{number}")
    pairs = list(zip(engines.of(Role.PREFILL), engines.of(Role.DECODE), strict=True))

    assert {(one.instance.id, other.instance.id) for one, other in pairs} == {
        ("prefill-0", "decode-0"),
        ("prefill-1", "decode-1"),
    }


def adapter_cards(place, **facts):
    """One of model a whose adapter x lies there."""
    found = facts_of_models([ModelCard("a", root="/models/a"), ModelCard("x", parent="a", root=place)])
    return replace(found, **facts)


@pytest.mark.parametrize("is_away", [False, True])
async def test_engines_whose_adapter_lies_in_two_places_share_no_request_for_it(is_away):
    """It is rolled out engine by engine, and vLLM's own connector would load KV of the other weights.

    ``is_away``: also where the decode engine that was chosen cannot be reached, and another one takes its leg.
    """

    async def decode(leg):
        if is_away and leg.instance.id == "decode-0":
            raise EngineError("it is away", reached=False)
        return await answers(leg)

    engines = Scripted(pulled_prefill, decode)
    router = router_of(engines, 2, 2, asks_for_models=True, retries=4)
    old, new = adapter_cards("/x/1"), adapter_cards("/x/2")
    serving(router, {"prefill-0": old, "prefill-1": new, "decode-0": old, "decode-1": new})
    for number in range(8):
        client = await router.serve(asks("/v1/completions", PROMPT, model="x", max_tokens=5), f"r{number}")
        assert client.status == 200
    prefills = {request_id(leg): leg.instance.id for leg in engines.of(Role.PREFILL)}
    pairs = {(prefills.get(request_id(leg)), leg.instance.id) for leg in engines.of(Role.DECODE)}

    assert ("prefill-1", "decode-1") in pairs
    assert not pairs & {("prefill-0", "decode-1"), ("prefill-1", "decode-0")}


@pytest.mark.parametrize(
    ("model", "facts"), [("a", {}), ("x", {"fingerprint": "f"})], ids=["the base model", "our connector"]
)
async def test_the_place_of_an_adapter_keeps_no_other_request_from_two_engines(model, facts):
    """Our connector compares the weights themselves, wherever they lie."""
    engines = Scripted(pulled_prefill, answers)
    router = router_of(engines, 1, 1, asks_for_models=True)
    serving(router, {"prefill-0": adapter_cards("/x/1", **facts), "decode-0": adapter_cards("/x/2", **facts)})
    client = await router.serve(asks("/v1/completions", PROMPT, model=model, max_tokens=5))

    assert client.status == 200
    assert [leg.instance.id for leg in engines.legs] == ["prefill-0", "decode-0"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("role", Role)
async def test_engines_known_to_serve_a_model_come_before_those_that_have_not_said(role, streams):
    """As a router starts: every second request would be a 404, which clients take for final."""
    engines = Scripted(pulled_prefill, answers)
    router = router_of(engines, 2, 2, asks_for_models=True)
    everyone = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    serving(router, {name: cards("a") for name in everyone if name != f"{role}-0"})
    for number in range(6):
        client = await router.serve(
            asks("/v1/completions", PROMPT, model="a", max_tokens=5, stream=streams), f"r{number}"
        )
        assert client.status == 200

    assert {leg.instance.id for leg in engines.of(role)} == {f"{role}-1"}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("role", Role)
async def test_an_engine_that_does_not_know_the_model_is_not_the_last_word(role, asked, streams):
    """It had not said what it serves, or serves another model by now. It is not held against it."""
    strangers = {"prefill-0", "decode-0"} if role is Role.DECODE or asked[0] in tuple(Api) else set()

    async def prefill(leg):
        return await (knows_none if leg.instance.id in strangers else pulled_prefill)(leg)

    async def decode(leg):
        return await (knows_none if leg.instance.id in strangers else answers)(leg)

    router = router_of(Scripted(prefill, decode), 2, 2, asks_for_models=True, retries=4)
    for number in range(2):
        client = await router.serve(asks(*asked, model="a", stream=streams), f"r{number}")
        assert client.status == 200
    lives = [member.life for member in router.registry.members()]

    assert not [life for life in lives if life.state == "ejected"]


async def test_the_engines_words_reach_the_client_where_no_engine_knows_the_model():
    """Nothing is tried for ever."""
    engines = Scripted(knows_none, knows_none)
    router = router_of(engines, 1, 1, asks_for_models=True)
    client = await router.serve(asks("/v1/completions", PROMPT, model="a", max_tokens=5))

    assert client.status == 404
    assert client.error == ("NotFoundError", "The model `a` does not exist.")
    assert len(engines.legs) == 1


async def test_thousands_of_names_make_no_page_of_an_error():
    """Ten names and a number, base models first; nor does a name that has a megabyte."""
    engines = Scripted(pulled_prefill, answers)
    router = router_of(engines, 1, 1, asks_for_models=True)
    adapters = [f"adapter-{number:04}" for number in range(2000)]
    serving(router, dict.fromkeys(("prefill-0", "decode-0"), cards("zebra", adapters=adapters)))
    client = await router.serve(asks("/v1/completions", PROMPT, model="x" * 10**6))
    named = ", ".join(["zebra", *adapters[:9]])

    assert client.status == 404
    assert client.error == (
        "NotFoundError",
        f"the model '{'x' * 100}...' is not served here; there is {named}, and 1991 more",
    )
    assert client.record.error == client.error[1]
