"""The client of a stream gets the prefill engine's token at once, and the text of one engine."""

import json

import pytest

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.model import Api, EngineResponse, Role
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.features.first_token.settings import FirstTokenFrom
from pdrelay_proxy.requests.lifecycle import RequestState
from support.greedy import HALF, event, events, first_answer, ids_of, next_token, read
from support.scripted import JSON, Scripted, call, never, params_of, prefilled, request_id, router_of, until

TEXT = {"stream": True, "temperature": 0, "max_tokens": 8, "prompt": "once"}
CHAT = {"stream": True, "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": "go on"}]}
BODIES = {Api.COMPLETIONS: TEXT, Api.CHAT: CHAT}
HI = {"role": "user", "content": "hi"}
USAGE = {"stream_options": {"include_usage": True}}
OFFER = {"apis": ["completions", "chat"], "max_model_len": 4096}
APIS = pytest.mark.parametrize("api", BODIES)
BROKEN = EngineError("broke off")


def first_of(body):
    """The token that the model makes of a prompt."""
    return next_token(ids_of(body))


class Engines(Scripted):
    """Engines of one model; each answer of the first ``plans`` decode legs behind the first request is the test's."""

    def __init__(self, *plans, offer=OFFER, spoil=lambda _: None):
        super().__init__(self._prefill, self._decode)
        self._plans = list(plans)
        self._offer = offer
        self._spoil = spoil
        self.is_taught = False
        self.released = []

    async def _prefill(self, leg):
        body = json.loads(leg.body)
        answer = first_answer(body, name=f"cmpl-{request_id(leg)}")
        params = json.loads(prefilled(leg, transfer_mode="pull", pdrelay_first_token=self._offer).body)
        self._spoil(answer)
        return EngineResponse(200, JSON, json.dumps(answer | params).encode())

    async def _decode(self, leg):
        stream = list(events(json.loads(leg.body), name=f"cmpl-{request_id(leg)}"))
        if not self.is_taught or not self._plans:
            return 200, stream
        plan = self._plans.pop(0)(stream)
        if isinstance(plan, Exception):
            raise plan
        return plan if isinstance(plan, tuple) else (200, plan)

    async def post(self, leg, *, timeout_s):
        self.released.append(params_of(leg))
        return EngineResponse(400, JSON, b'{"error":{"message":"too many"}}')

    def asked(self, role):
        """The bodies that engines of a role were asked, but for those of the first request."""
        return [json.loads(leg.body) for leg in self.of(role) if not request_id(leg).startswith("teach")]


async def started(engines, body, api, **options):
    """Send a request to a router that has an answer of each prefill engine."""
    options.setdefault("first_token_from", FirstTokenFrom.PREFILL)
    router = router_of(engines, **options)
    await router.serve(call(api, **BODIES[api]), name="teach")
    engines.is_taught = True
    return router, router.start(call(api, **body))


async def served(engines, body, api, **options):
    router, client = await started(engines, body, api, **options)
    await client.end()
    assert not engines.open
    assert router.is_idle()
    assert client.response.is_whole
    return client


def single(body):
    """What one engine streams."""
    return read(b"".join(events(body, name="cmpl-r")))


def assert_asked(asked, body):
    """A decode engine was asked what the client has asked; the prompt may be its ids."""
    rest = [name for name in body if name != "prompt"]
    assert {name: asked[name] for name in rest} == {name: body[name] for name in rest}
    assert ids_of(asked) == ids_of(body)


def is_whole(client, body):
    """Tell whether a client has read what one engine streams: text, id, usage and ends; and one role in a chat."""
    assert client.body.count(b'"role"') == ("messages" in body)
    assert read(client.body) == single(body)
    return True


@APIS
@pytest.mark.parametrize("resume", [False, True])
async def test_the_client_has_the_token_before_a_decode_engine_says_a_word(api, resume):
    """That is what it is for; the decode engine reads the same blocks, and goes on behind it."""
    body = BODIES[api]
    engines = Engines(lambda stream: [never(), *stream])
    _, client = await started(engines, body, api, resume_streams=resume)
    await until(lambda: client.response.begun)

    text, *_ = read(client.body)
    assert text == f" {first_of(body)}"
    (asked,) = engines.asked(Role.DECODE)
    prompt = [*ids_of(body), first_of(body)]
    assert ids_of(asked) == prompt
    assert asked["max_tokens"] == 7
    assert asked["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]
    client.hang_up()


@APIS
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        USAGE,
        {"max_tokens": 2},
        {"max_tokens": 2} | USAGE,
        {"min_tokens": 5},
        {"min_tokens": 8},
        {"ignore_eos": True},
        {"temperature": 0.8},
        {"stop_token_ids": [39]},
        {"stop_token_ids": list(range(0, 40, 3)), "min_tokens": 3} | USAGE,
    ],
    ids=repr,
)
async def test_the_client_gets_the_text_of_one_engine(api, change, resume):
    """One id, one usage, one end; P's token is the model's own."""
    body = BODIES[api] | change
    engines = Engines()
    client = await served(engines, body, api, resume_streams=resume)

    assert is_whole(client, body)
    (asked,) = engines.asked(Role.PREFILL)
    assert asked["min_tokens"] == min(1, body.get("min_tokens", 0))
    assert client.record.error is None
    assert client.record.retries == ()


@APIS
@pytest.mark.parametrize("change", [{}, USAGE, {"max_tokens": 2}], ids=repr)
async def test_an_answer_that_ends_with_its_first_token_is_the_prefill_engines(api, change):
    """No decode engine is asked, and the blocks are given back."""
    body = BODIES[api] | change | {"stop_token_ids": [first_of(BODIES[api])]}
    engines = Engines()
    client = await served(engines, body, api)

    assert is_whole(client, body)
    assert f'"stop_reason":{first_of(body)}'.encode() in client.body
    assert engines.asked(Role.DECODE) == []
    await until(lambda: engines.released)
    assert client.record.outcome == "ok"


def _half(answer):
    answer["choices"][0]["text"] = "\N{REPLACEMENT CHARACTER}"


def _reasoning(answer):
    answer["choices"][0]["message"] |= {"reasoning": "hm"}


def _call(answer):
    answer["choices"][0]["message"]["content"] = "<tool"


def _no_ids(answer):
    answer["choices"][0]["token_ids"] = None


def _empty(answer):
    answer["choices"][0]["text"] = ""


def _aborted(answer):
    answer["choices"][0]["finish_reason"] = "abort"


@pytest.mark.parametrize(
    ("api", "spoil"),
    [
        (Api.COMPLETIONS, _half),
        (Api.COMPLETIONS, _empty),
        (Api.COMPLETIONS, _no_ids),
        (Api.COMPLETIONS, _aborted),
        (Api.CHAT, _reasoning),
        (Api.CHAT, _call),
        (Api.CHAT, _no_ids),
    ],
)
async def test_a_token_that_may_be_something_else_in_a_stream_is_made_again(api, spoil):
    """The decode engine is asked what the client has asked."""
    engines = Engines(spoil=spoil)
    client = await served(engines, BODIES[api], api)

    assert is_whole(client, BODIES[api])
    (asked,) = engines.asked(Role.DECODE)
    assert_asked(asked, BODIES[api])


@APIS
@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": 1},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"skip_special_tokens": False},
        {"return_token_ids": True},
        {"presence_penalty": 0.5},
        {"temperature": 1, "seed": 3},
        {"stop": ["x"]},
        {"min_tokens": 9},
        {"n": 2},
        {"stream": False},
    ],
    ids=repr,
)
async def test_what_cannot_be_continued_is_asked_as_always(api, change):
    """By both legs."""
    body = BODIES[api] | change
    if api is Api.CHAT and "logprobs" in change:
        body |= {"logprobs": True}
    engines = Engines()
    await served(engines, body, api)

    assert all(asked["min_tokens"] == 1 for asked in engines.asked(Role.PREFILL))
    (asked,) = engines.asked(Role.DECODE)
    assert_asked(asked, body)


@APIS
@pytest.mark.parametrize(
    ("offer", "options"),
    [
        (None, {}),
        ({"apis": [], "max_model_len": 4096}, {}),
        ({"apis": ["completions", "chat"], "max_model_len": 7}, {}),
        (OFFER, {"first_token_from": FirstTokenFrom.DECODE}),
    ],
    ids=["another connector", "a reasoning parser", "no room", "the default"],
)
async def test_without_an_offer_everything_is_as_always(api, offer, options):
    """Engines of another connector, and of models whose token is not to be shown, say nothing."""
    engines = Engines(offer=offer)
    client = await served(engines, BODIES[api], api, **options)

    assert is_whole(client, BODIES[api])
    (asked,) = engines.asked(Role.DECODE)
    assert asked["max_tokens"] == 8


async def test_a_stream_with_the_prefill_engines_token_goes_on():
    """With a decode engine; one that fails is replaced by another one alone."""
    states = []

    def seen(answer):
        states.append(client.request.state)
        return answer

    engines = Engines(lambda _: seen(BROKEN), lambda stream: (200, seen(stream)))
    _, client = await started(engines, TEXT, Api.COMPLETIONS)
    await client.end()

    assert states == [RequestState.CONTINUING, RequestState.DECODING]
    assert is_whole(client, TEXT)


async def test_the_first_request_to_a_prefill_engine_teaches_the_router():
    """Until then its token must not be an end: another connector would keep nothing."""
    engines = Engines()
    router = router_of(engines, first_token_from=FirstTokenFrom.PREFILL)
    client = await router.serve(call(Api.COMPLETIONS, **TEXT))

    assert is_whole(client, TEXT)
    (leg,) = engines.of(Role.PREFILL)
    assert json.loads(leg.body)["min_tokens"] == 1


NEVER_BEGUN = {
    "it cannot be reached": lambda _: EngineError("down", reached=False),
    "it breaks off": lambda _: BROKEN,
    "it breaks off behind its head": lambda _: [BROKEN],
    "it is busy": lambda _: (503, [b'{"error":{"message":"full"}}'], JSON),
    "it fails": lambda _: (500, [b'{"error":{"message":"dead"}}'], JSON),
    "its first event is an error": lambda _: [event({"error": {"message": "dead", "code": 500}}), b"data: [DONE]\n\n"],
    "it sends no stream": lambda _: (200, [b"<html>"], "text/plain"),
    "it ends at once": lambda _: [],
}


@APIS
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("plan", NEVER_BEGUN.values(), ids=NEVER_BEGUN)
async def test_a_decode_engine_that_fails_before_its_first_event_is_replaced(api, plan, resume):
    """The client does not see it: it has the token, and the rest is that of one engine."""
    body = BODIES[api] | USAGE
    engines = Engines(plan)
    client = await served(engines, body, api, y=2, resume_streams=resume)

    assert is_whole(client, body)
    first, second = engines.asked(Role.DECODE)
    assert ids_of(second) == ids_of(first) == [*ids_of(body), first_of(body)]
    assert second["max_tokens"] == 7
    reads = "remote_block_ids" in (second.get("kv_transfer_params") or {})
    assert reads == (plan is NEVER_BEGUN["it cannot be reached"])
    assert len(client.record.retries) == 1
    assert len(engines.asked(Role.PREFILL)) == 1


@APIS
@pytest.mark.parametrize("resume", [False, True])
async def test_what_follows_the_token_is_of_the_weights_that_made_it(api, resume):
    """Also where its engine is removed meanwhile, and nothing is known of it any more."""

    class Removed(Engines):
        async def _prefill(self, leg):
            if self.is_taught:
                router.registry.remove("prefill-0", now=0.0)
            return await super()._prefill(leg)

    engines = Removed(NEVER_BEGUN["it cannot be reached"])
    router, client = await started(engines, BODIES[api], api, y=2, resume_streams=resume)
    for name, root in (("prefill-0", "/m/1"), ("decode-0", "/m/2"), ("decode-1", "/m/1")):
        router.registry.learn(name, EngineCapabilities(root=root, files={"": root}))
    await client.end()
    tried = {leg.instance.id for leg in engines.of(Role.DECODE) if not request_id(leg).startswith("teach")}

    assert tried == {"decode-1"}


@APIS
@pytest.mark.parametrize("resume", [False, True])
async def test_an_engine_that_goes_on_alone_is_told_the_model(api, resume):
    """Its client has named none: an engine that serves another one says so."""
    engines = Engines(NEVER_BEGUN["it breaks off"])
    await served(engines, BODIES[api] | {"model": None}, api, y=2, resume_streams=resume)

    assert engines.asked(Role.DECODE)[-1]["model"] == "m"


@APIS
@pytest.mark.parametrize("retries", [0, 2])
async def test_a_stream_that_breaks_off_later_ends_with_an_error(api, retries):
    """As always: a retry could not be told from a new answer."""
    client = await served(Engines(lambda stream: [*stream[:3], BROKEN]), BODIES[api], api, y=2, retries=retries)

    assert client.error == ("EngineError", "broke off")
    assert b"DONE" not in client.body
    text, *_ = single(BODIES[api])
    assert text.startswith(read(client.got)[0])


@APIS
@pytest.mark.parametrize("after", range(1, 8))
async def test_a_stream_that_breaks_off_later_is_resumed(api, after):
    """With the token of the prefill engine among those that are not made again."""
    body = BODIES[api] | USAGE
    engines = Engines(lambda stream: [*stream[:after], BROKEN])
    client = await served(engines, body, api, y=2, resume_streams=True)

    assert is_whole(client, body)


@APIS
@pytest.mark.parametrize("how", ["it breaks off", "it is busy"])
async def test_without_retries_the_client_is_told(api, how):
    """Behind the token that it has."""
    client = await served(Engines(NEVER_BEGUN[how]), BODIES[api], api, y=2, retries=0)

    assert client.error is not None
    assert client.error[0] in ("EngineError", "ServiceUnavailableError")
    assert b"DONE" not in client.body


async def test_a_refusal_is_told_behind_the_token():
    """Another engine would say the same."""
    engines = Engines(lambda _: (400, [b'{"error":{"message":"no"}}'], JSON))
    client = await served(engines, TEXT, Api.COMPLETIONS, y=2)

    assert client.error == ("EngineError", "decode-1 refused to go on with status 400")
    assert len(engines.asked(Role.DECODE)) == 1


async def test_a_prefill_engine_that_fails_is_replaced_before_anything_is_shown():
    """And the one that follows is taught first."""
    engines = Engines()
    router, client = await started(engines, TEXT, Api.COMPLETIONS, x=2, y=2)
    await client.end()
    left = [EngineError("down", reached=False)]
    good = engines.prefill

    async def prefill(leg):
        if left:
            raise left.pop()
        return await good(leg)

    engines.prefill = prefill
    client = await router.serve(call(Api.COMPLETIONS, **TEXT), name="again")

    assert read(client.body)[0] == single(TEXT)[0]
    assert len(client.record.retries) == 1


async def test_a_client_that_leaves_behind_the_token_closes_the_decode_leg():
    """Its blocks are the two engines' to settle."""
    engines = Engines(lambda stream: [never(), *stream])
    router, client = await started(engines, TEXT, Api.COMPLETIONS)
    await until(lambda: client.response.begun)
    client.hang_up()
    await client.end()

    assert not engines.open
    assert router.is_idle()
    assert client.record.outcome == "client_disconnected"


async def test_the_time_to_the_first_token_ends_with_the_prefill_engines():
    """In the record, and so in the histograms and the log; the decode engine's first event is a token like others."""
    now = [0.0]

    def slow(stream):
        now[0] = 5.0
        return stream

    client = await served(Engines(slow), TEXT, Api.COMPLETIONS, clock=lambda: now[0])

    assert client.record.ttft_s == 0.0
    assert client.record.last_token_at == 5.0


@APIS
async def test_half_a_character_is_not_shown(api):
    """Its text comes with that of the next token."""
    body = BODIES[api] | ({"prompt": "hi"} if api is Api.COMPLETIONS else {"messages": [HI]})
    assert first_of(body) % HALF == 0
    engines = Engines()

    assert is_whole(await served(engines, body, api), body)
    assert engines.asked(Role.DECODE)[0]["max_tokens"] == 8
