"""A request with several prompts: a request of its own for each, and one answer."""

import asyncio
import json

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.model import EngineResponse, Role, SingleEngineReason
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.settings import Settings
from support.scripted import (
    DONE,
    JSON,
    Scripted,
    call,
    good_decode,
    never,
    prefilled,
    pulled_prefill,
    request_id,
    router_of,
    until,
)

PROMPTS = ["zero", "one", "two"]


def asked(leg):
    return json.loads(leg.body)


def answer(leg):
    """What an engine answers: the prompt itself."""
    prompt = asked(leg)["prompt"]
    choices = [{"index": 0, "text": f"<{prompt}>"}]
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    return EngineResponse(200, JSON, json.dumps({"id": "x", "choices": choices, "usage": usage}).encode())


def events(leg):
    prompt = asked(leg)["prompt"]
    said = [{"choices": [{"index": 0, "text": part}]} for part in ("<", str(prompt), ">")]
    usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}}
    return [b"data: %b\n\n" % json.dumps({"id": "x"} | each).encode() for each in (*said, usage)] + [DONE]


async def decode(leg):
    return (200, events(leg)) if asked(leg).get("stream") else answer(leg)


async def pushed_prefill(leg):
    return prefilled(leg)


def of_stream(body):
    """Return the texts by index, and what the last event says."""
    texts = {}
    last = None
    lines = body.decode().splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines:
        if line.startswith("data: {"):
            last = json.loads(line[6:])
            for choice in last["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts, last


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefill", [pulled_prefill, pushed_prefill], ids=["pull", "push"])
async def test_each_goes_over_two_legs(prefill, stream):
    """The engines of a role take turns; choices and usage are those of all prompts, and requests have their own ids."""
    engines = Scripted(prefill, decode)
    router = router_of(engines, x=2, y=2)
    client = await router.serve(call(prompt=PROMPTS, stream=stream, max_tokens=9))

    if stream:
        texts, last = of_stream(client.body)
    else:
        last = json.loads(client.body)
        texts = {choice["index"]: choice["text"] for choice in last["choices"]}
    assert texts == {0: "<zero>", 1: "<one>", 2: "<two>"}
    assert last["id"] == "cmpl-r"
    assert last["usage"]["prompt_tokens"] == 12
    for role in Role:
        assert {asked(leg)["prompt"] for leg in engines.of(role)} == set(PROMPTS)
        assert {request_id(leg) for leg in engines.of(role)} == {"r-p0", "r-p1", "r-p2"}
        assert len({leg.instance.id for leg in engines.of(role)}) == 2
    assert all(asked(leg)["kv_transfer_params"] for leg in engines.of(Role.DECODE))
    assert b'mode;desc="each_prompt"' in client.response.lines
    assert client.record.answered
    assert not engines.open
    assert router.is_idle()
    counters = router.telemetry.counters
    assert sum(counters.requests.values()) == 1  # for the client it is one
    assert sum(counters.routed.values()) == 3


@pytest.mark.parametrize(("count", "most"), [(1, 16), (3, 24), (20, 64)])
async def test_some_at_a_time(count, most):
    """The more, the more engines there are; the rest follow as parts end."""
    gate = asyncio.Event()
    seen = 0

    async def slow(leg):
        nonlocal seen
        seen = max(seen, len({request_id(leg) for leg in engines.open}))
        await gate.wait()
        return answer(leg)

    engines = Scripted(pulled_prefill, slow)
    router = router_of(engines, count, count)
    client = router.start(call(prompt=[f"p{place}" for place in range(most + 20)]))
    await until(lambda: len(engines.of(Role.DECODE)) == most)
    assert len(engines.of(Role.PREFILL)) == most
    gate.set()
    await client.end()

    texts = [choice["text"] for choice in json.loads(client.body)["choices"]]
    assert texts == [f"<p{place}>" for place in range(most + 20)]
    assert seen == most
    assert router.is_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_that_of_all(stream):
    """In the engine's own words, and the others are dropped."""
    refusal = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'

    async def prefill(leg):
        if asked(leg)["prompt"] != "one":
            await never()
        return EngineResponse(400, JSON, refusal)

    engines = Scripted(prefill, decode)
    router = router_of(engines)
    client = await router.serve(call(prompt=PROMPTS, stream=stream))

    assert (client.status, client.body) == (400, refusal)
    assert not engines.open
    assert router.is_idle()
    assert not engines.of(Role.DECODE)


@pytest.mark.parametrize(
    ("late", "error"),
    [
        (EngineResponse(400, JSON, b'{"error":{"message":"too long"}}'), ("BadRequestError", "too long")),
        (EngineResponse(500, JSON, b'{"error":{"message":"it broke"}}'), ("EngineError", "it broke")),
    ],
    ids=["refused", "failed"],
)
async def test_what_fails_behind_the_first_token_is_an_error_event(late, error):
    """The status is sent; the stream ends without a [DONE]."""
    shown = asyncio.Event()

    async def prefill(leg):
        if asked(leg)["prompt"] == "one":
            await shown.wait()
            return late
        return await pulled_prefill(leg)

    async def slow(leg):
        return 200, [events(leg)[0], never()]

    engines = Scripted(prefill, slow)
    router = router_of(engines, retries=0)
    client = router.start(call(prompt=PROMPTS, stream=True))
    client.response.on_write = lambda _: shown.set()
    await client.end()

    kind, words = client.error
    assert error[1] in words or late.status == 500
    assert kind == error[0]
    assert DONE not in client.body
    assert not engines.open
    assert router.is_idle()


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": ""}], ids=["absent", "null", "empty"])
async def test_prompts_without_a_model_mean_the_one_that_all_engines_serve(fields):
    """Both engines of each get its name, and look at it again: by now they may serve another model."""
    engines = Scripted(pulled_prefill, decode)
    router = router_of(engines, 2, 2, asks_for_models=True)
    for member in router.registry.members():
        router.registry.learn(member.instance.id, EngineCapabilities(frozenset({"a"})))
    client = await router.serve(call(prompt=PROMPTS, **fields))

    assert client.status == 200
    assert {leg.instance.role for leg in engines.legs} == set(Role)
    assert {asked(leg).get("model") for leg in engines.legs} == {"a"}


async def test_a_part_is_tried_again_by_itself():
    """The others go on."""
    failed = []

    async def prefill(leg):
        if asked(leg)["prompt"] == "one" and not failed:
            failed.append(leg)
            raise EngineError("it broke off")
        return await pulled_prefill(leg)

    engines = Scripted(prefill, decode)
    router = router_of(engines, x=2)
    client = await router.serve(call(prompt=PROMPTS))

    assert client.status == 200
    assert sorted(request_id(leg) for leg in engines.of(Role.PREFILL)) == ["r-p0", "r-p1", "r-p1-r1", "r-p2"]
    assert router.is_idle()


async def test_a_client_that_leaves_ends_all_parts():
    """At once, whatever they wait for."""

    async def waiting(_):
        await never()

    engines = Scripted(waiting, decode)
    router = router_of(engines)
    client = router.start(call(prompt=PROMPTS))
    await until(lambda: len(engines.open) == 3)
    client.hang_up()
    await client.end()

    assert client.record.status == 499
    assert not engines.open
    assert router.is_idle()


async def test_a_slow_client_has_all_engines_wait():
    """Also those that are asked later."""
    engines = Scripted(pulled_prefill, decode)
    router = router_of(engines)
    client = router.start(call(prompt=PROMPTS, stream=True))
    client.request.pause()
    await until(lambda: len(engines.of(Role.DECODE)) == 3)
    for _ in range(50):
        await asyncio.sleep(0)
    paused = len(client.response.pieces)
    client.request.resume()
    await client.end()

    assert paused <= 3  # what was read with the heads
    assert of_stream(client.body)[0] == {0: "<zero>", 1: "<one>", 2: "<two>"}
    assert router.is_idle()


class Counted:
    """Engines that note how many prompts they have at a time."""

    def __init__(self):
        self.most = 0
        self.now = 0

    async def prefill(self, leg):
        self.now += 1
        self.most = max(self.most, self.now)
        return await pulled_prefill(leg)

    async def decode(self, leg):
        self.now -= 1
        return await decode(leg)


@pytest.mark.parametrize("limits", [{"max_concurrency": 1}, {"max_key_concurrency": 1}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_part_takes_a_place_of_its_own(limits, stream):
    """The limits are of prompts; the place of the request serves one of them, so that it never waits for itself."""
    sides = Counted()
    router = router_of(Scripted(sides.prefill, sides.decode), limits=Settings(**limits))
    client = await router.serve(call(prompt=["x"] * 20, stream=stream))

    assert client.status == 200
    assert sides.most == 1
    assert router.is_idle()


async def test_places_that_others_leave_are_taken_by_the_next_parts():
    """And one that waits comes before them."""
    waiting = asyncio.Event()

    async def slow(leg):
        await waiting.wait()
        return await pulled_prefill(leg)

    engines = Scripted(slow, decode)
    router = router_of(engines, limits=Settings(max_concurrency=3))
    first, whole = router.start(call(prompt="first")), router.start(call(prompt=PROMPTS * 2))
    await until(lambda: len(engines.legs) == 3)
    behind = router.start(call(prompt="behind"))
    first.hang_up()
    await until(lambda: len(engines.legs) == 4)
    assert asked(engines.legs[3])["prompt"] == "behind"
    behind.hang_up()
    whole.request.check_deadlines(0.0)
    await until(lambda: len(engines.legs) == 5)
    waiting.set()
    await whole.end()

    assert whole.status == 200
    assert router.is_idle()


async def test_a_rate_counts_prompts():
    """A request that is let in uses up the seconds that come."""
    now = [100.0]
    router = router_of(
        Scripted(pulled_prefill, decode), clock=lambda: now[0], limits=Settings(max_key_rate=1), max_key_rate=1
    )
    assert (await router.serve(call(prompt=PROMPTS * 4))).status == 200
    refused = await router.serve(call(prompt="one"))

    assert refused.status == 429
    assert b"retry-after: 12" in refused.response.lines


@pytest.mark.parametrize("prefill", [pulled_prefill, pushed_prefill], ids=["pull", "push"])
async def test_long_fields_are_shared_by_all_legs(prefill):
    """They are no copies: 64 parts of two legs each would hold them 128 times."""
    long = "u" * 100_000
    seen = []
    engines = Scripted(prefill, decode)
    send = engines.send

    def noting(*args, body, **more):
        seen.extend(piece.obj for piece in body if isinstance(piece, memoryview) and len(piece) > 50_000)
        assert sum(len(piece) for piece in body if not isinstance(piece, memoryview)) < 5_000
        send(*args, body=body, **more)

    engines.send = noting
    router = router_of(engines)
    client = await router.serve(call(prompt=PROMPTS, user=long, metadata={"a": long}))

    assert client.status == 200
    assert len(engines.legs) == 6
    assert len(seen) == 12
    assert len(set(map(id, seen))) == 2
    for leg in engines.legs:
        assert (asked(leg)["user"], asked(leg)["metadata"]) == (long, {"a": long})


async def test_fields_that_are_too_long_for_so_many_prompts_are_refused_at_the_door():
    """Each prompt takes them along; a single one, or shorter fields, are served."""
    engines = Scripted(pulled_prefill, decode)
    router = router_of(engines, limits=Settings(max_inflight_bytes=2_000_000))
    refused = await router.serve(call(prompt=["x"] * 64, user="u" * 100_000))
    alone = await router.serve(call(prompt="x", user="u" * 100_000))
    short = await router.serve(call(prompt=["x"] * 64, user="u" * 1_000))

    assert (refused.status, alone.status, short.status) == (413, 200, 200)
    assert "64 prompts" in refused.error[1]
    assert router.is_idle()


async def test_its_time_is_that_of_all():
    """One limit for the whole request, and those for legs as ever."""
    now = [0.0]

    async def waiting(_):
        await never()

    engines = Scripted(waiting, decode)
    router = router_of(engines, retries=0, clock=lambda: now[0], first_token_timeout_s=30.0, total_timeout_s=100.0)
    client = router.start(call(prompt=PROMPTS))
    await until(lambda: len(engines.open) == 3)
    now[0] = 31.0
    client.request.check_deadlines(now[0])
    await client.end()

    assert client.error[0] == "EngineTimeoutError"
    assert not engines.open
    assert router.is_idle()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"max_tokens": 1}, "max_tokens"), ({"echo": True}, "echo"), ({"prompt": ["a", [1]]}, "several_prompts")],
)
async def test_what_cannot_be_split_stays_whole(fields, reason):
    """One decode engine gets all prompts, as the client wrote them; the reason is that of each prompt."""
    engines = Scripted(pulled_prefill, _whole)
    router = router_of(engines)
    client = await router.serve(call(**({"prompt": PROMPTS} | fields)))

    assert client.record.single_reason == reason
    assert [leg.instance.role for leg in engines.legs] == [Role.DECODE]
    assert asked(engines.legs[0])["prompt"] == fields.get("prompt", PROMPTS)
    assert router.is_idle()


async def _whole(_):
    return EngineResponse(200, JSON, b'{"choices":[]}')


async def test_what_stays_whole_stays_so_when_it_is_sent_again():
    """Though a prefill engine has come meanwhile: two engines cannot share several prompts."""

    async def decode(leg):
        if len(engines.legs) == 1:
            router.registry.add(Role.PREFILL, Address("http", "h", 9))
            raise EngineError("it broke off")
        return await _whole(leg)

    engines = Scripted(pulled_prefill, decode)
    router = router_of(engines, x=0, y=2)
    client = await router.serve(call(prompt=PROMPTS))

    assert client.status == 200
    assert [leg.instance.role for leg in engines.legs] == [Role.DECODE, Role.DECODE]
    assert asked(engines.legs[1])["prompt"] == PROMPTS


async def test_answers_that_are_no_completions():
    """What cannot be put together is an error, never half an answer."""
    engines = Scripted(pulled_prefill, _other)
    router = router_of(engines)
    client = await router.serve(call(prompt=PROMPTS))

    assert client.status == 502
    assert router.is_idle()


async def _other(_):
    return EngineResponse(200, JSON, b'{"object":"list"}')


async def test_the_time_to_the_first_token_is_known_although_a_comment_has_begun_the_stream():
    """Comments come while long prompts are computed: the very streams whose time matters."""
    now = [0.0]
    is_ready = asyncio.Event()

    async def late(leg):
        await is_ready.wait()
        return 200, events(leg)

    router = router_of(Scripted(pulled_prefill, late), clock=lambda: now[0], stream_comment_interval_s=10.0)
    client = router.start(call(prompt=PROMPTS, stream=True, max_tokens=9))
    now[0] = 12.0
    client.request.check_deadlines(now[0])
    now[0] = 15.0
    is_ready.set()
    await client.end()

    assert client.body.startswith(b":")
    assert client.request.record.ttft_s == 15.0


@pytest.mark.parametrize("streams", [False, True])
async def test_before_any_engine_says_what_it_serves_one_engine_gets_all_prompts(streams):
    """Each part would learn its own model, and one answer could be of two."""

    async def answers(leg):
        return await good_decode(leg) if streams else answer(leg)

    engines = Scripted(pulled_prefill, answers)
    router = router_of(engines, 2, 2, asks_for_models=True)
    client = await router.serve(call(prompt=PROMPTS, stream=streams))
    (leg,) = engines.legs

    assert client.status == 200
    assert client.record.single_reason is SingleEngineReason.UNKNOWN_MODEL
    assert asked(leg)["prompt"] == PROMPTS
