"""What clients are told of caches: the prefill engine's word, as one engine would say it."""

import asyncio
import json

import pytest

from pdrelay_proxy.core.model import Api, EngineResponse, LegOrder, SingleEngineReason
from pdrelay_proxy.errors import EngineError
from support.bodies import BASE
from support.scripted import DONE, JSON, Asked, Scripted, failing, prefilled, request_id, router_of
from support.simulated_loop import settle

DETAILS = {"cached_tokens": 16, "created_cache_tokens": 224}
COUNTS = {"prompt_tokens": 254, "completion_tokens": 1, "total_tokens": 255}
# By API: what the prefill engine says, and what a decode engine says, to which all but one token is cached.
SAID = {
    Api.COMPLETIONS: (
        COUNTS | {"prompt_tokens_details": DETAILS},
        COUNTS | {"prompt_tokens_details": {"cached_tokens": 253}},
    ),
    Api.CHAT: (
        COUNTS | {"prompt_tokens_details": DETAILS},
        COUNTS | {"prompt_tokens_details": {"cached_tokens": 253, "created_cache_tokens": 0}},
    ),
    Api.RESPONSES: (
        {"input_tokens": 254, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 16}},
        {"input_tokens": 254, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 253}},
    ),
    Api.MESSAGES: (
        {"input_tokens": 14, "output_tokens": 1, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 224},
        {"input_tokens": 1, "output_tokens": 1, "cache_read_input_tokens": 253, "cache_creation_input_tokens": 0},
    ),
}
NAMES = {
    Api.COMPLETIONS: "cmpl-{}-0-1",
    Api.CHAT: "chatcmpl-{}-1",
    Api.RESPONSES: "resp_{}_0",
    Api.MESSAGES: "chatcmpl-{}-1",
}


def prefill_of(api, mode, usage):
    async def prefill(leg):
        answer = prefilled(leg, transfer_mode=mode, remote_request_id=NAMES[api].format(request_id(leg)))
        said = json.loads(answer.body) | {"usage": usage}
        return EngineResponse(200, JSON, json.dumps(said, separators=(",", ":")).encode())

    return prefill


def decode_of(api, usage):
    def event(name, fields):
        named = b"event: %b\n" % name.encode() if api in (Api.RESPONSES, Api.MESSAGES) else b""
        return b"%bdata: %b\n\n" % (named, json.dumps({"type": name} | fields, separators=(",", ":")).encode())

    events = {
        Api.RESPONSES: [event("response.completed", {"response": {"usage": usage}})],
        Api.MESSAGES: [
            event("message_start", {"message": {"id": "m", "usage": usage}}),
            event("message_delta", {"usage": usage}),
            event("message_stop", {}),
        ],
    }

    async def decode(leg):
        await settle()  # it has nothing to say before the prefill engine has written
        if json.loads(leg.body).get("stream"):
            plain = [event("x", {"choices": [{"index": 0, "text": "x"}]}), event("x", {"choices": [], "usage": usage})]
            return 200, events.get(api) or [*plain, DONE]
        body = json.dumps({"id": "x", "usage": usage}, separators=(",", ":")).encode()
        return EngineResponse(200, JSON, body)

    return decode


def usages(body, streams):
    """Return all usages that a client was told."""
    datas = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")] if streams else [body]
    found = []
    for data in datas:
        said = json.loads(data)
        inside = said.get("response") or said.get("message") or said
        found += [inside["usage"]] if "usage" in inside else []
    return found


async def serve(router, api, streams, name):
    body = BASE[api] | {"stream": streams} | ({"max_output_tokens": 5} if api is Api.RESPONSES else {"max_tokens": 5})
    client = await router.serve(Asked(api.value, json.dumps(body).encode()), name)
    assert client.status == 200
    return client


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("api", SAID)
async def test_the_prefill_engines_word_of_its_cache_counts(api, mode, streams):
    """Whole and streamed, pulled and pushed, also where both legs go out at once: clients are billed by it."""
    of_prefill, of_decode = SAID[api]
    router = router_of(Scripted(prefill_of(api, mode, of_prefill), decode_of(api, of_decode)))
    for number in range(3):
        client = await serve(router, api, streams, f"r{number}")
        told = usages(client.body, streams)
        assert told
        assert all(usage == of_prefill for usage in told)


@pytest.mark.parametrize("streams", [False, True])
async def test_whether_kv_has_arrived_is_still_told_by_the_decode_engine(streams):
    """Its own number, which the client does not see: 0 would be an alarm."""
    of_prefill = COUNTS | {"prompt_tokens_details": {"cached_tokens": 0}}
    of_decode = COUNTS | {"prompt_tokens_details": {"cached_tokens": 253}}
    router = router_of(Scripted(prefill_of(Api.COMPLETIONS, "push", of_prefill), decode_of(Api.COMPLETIONS, of_decode)))
    for number in range(2):
        client = await serve(router, Api.COMPLETIONS, streams, f"r{number}")

    assert usages(client.body, streams) == [of_prefill]
    # Of the first request, whose legs went out one after the other, nothing can be told.
    assert router.telemetry._counters.transfers == {("decode-0", "unknown"): 1, ("decode-0", "arrived"): 1}


@pytest.mark.parametrize("streams", [False, True])
async def test_an_engine_that_says_nothing_of_its_cache_changes_nothing(streams):
    """vLLM says nothing of it by default: the answer is the decode engine's, byte for byte."""
    decode = decode_of(Api.CHAT, COUNTS)
    router = router_of(Scripted(prefill_of(Api.CHAT, "pull", COUNTS | {"prompt_tokens_details": None}), decode))
    client = await serve(router, Api.CHAT, streams, "r")

    assert usages(client.body, streams) == [COUNTS]


@pytest.mark.parametrize("streams", [False, True])
async def test_the_prefill_engine_of_the_answer_counts(streams):
    """Its decode engine has failed once, and another prefill followed."""
    of_prefill, of_decode = SAID[Api.CHAT]
    others = COUNTS | {"prompt_tokens_details": DETAILS | {"cached_tokens": 32}}
    legs = []

    async def prefill(leg):
        legs.append(leg)
        return await prefill_of(Api.CHAT, "pull", of_prefill if len(legs) == 1 else others)(leg)

    decode = failing((500, [b'{"error":{"message":"x"}}']), then=decode_of(Api.CHAT, of_decode))
    client = await serve(router_of(Scripted(prefill, decode)), Api.CHAT, streams, "r")

    assert len(legs) == 2
    assert usages(client.body, streams) == [others]


@pytest.mark.parametrize("comments", [0.0, 1.0])
@pytest.mark.parametrize("api", SAID)
async def test_of_an_engine_whose_prompt_was_not_used_nothing_counts(api, comments):
    """One engine serves the request alone, as its decode engine has failed: also where a comment began the stream."""
    of_prefill, of_alone = SAID[api]

    async def slow_to_fail(_):
        await asyncio.sleep(5)
        return EngineResponse(500, JSON, b'{"error":{"message":"x"}}')

    legs = []

    async def decode(leg):
        legs.append(leg)
        return await (slow_to_fail if len(legs) == 1 else decode_of(api, of_alone))(leg)

    prefills = iter([prefill_of(api, "pull", of_prefill)])

    async def prefill(leg):
        side = next(prefills, None)
        if side is None:
            raise EngineError("broke off")
        return await side(leg)

    clock = asyncio.get_running_loop().time
    router = router_of(Scripted(prefill, decode), clock=clock, stream_comment_interval_s=comments)
    async with router.requests:
        client = await serve(router, api, streams=True, name="r")

    assert (b": keep-alive" in client.body) is bool(comments)
    assert client.record.single_reason is SingleEngineReason.PREFILL_FAILED
    told = usages(client.body, streams=True)
    assert told
    assert all(usage == of_alone for usage in told)


# A prefill engine without --enable-prompt-tokens-details: one engine would say the same.
SILENT = {
    Api.COMPLETIONS: COUNTS | {"prompt_tokens_details": None},
    Api.CHAT: COUNTS | {"prompt_tokens_details": None},
    Api.MESSAGES: {"input_tokens": 254, "output_tokens": 1},
}


def told_of(usage):
    """Return a usage without what it does not tell."""
    return {name: value for name, value in usage.items() if value is not None}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", SILENT)
async def test_a_prefill_engine_that_is_silent_has_its_number_repeated_by_the_decode_engine(api, streams):
    """Which knows it by the parameters of a pull: all of its usage counts, and adds up to the prompt."""
    _, of_decode = SAID[api]
    router = router_of(Scripted(prefill_of(api, "pull", told_of(SILENT[api])), decode_of(api, of_decode)))
    client = await serve(router, api, streams, "r")

    told = usages(client.body, streams)
    assert told
    assert all(usage == of_decode for usage in told)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", SILENT)
async def test_of_what_was_pushed_a_decode_engine_tells_no_client(api, streams):
    """Nearly all of a prompt is cached there, which no client is to be billed by; its own number is still looked at."""
    _, of_decode = SAID[api]
    router = router_of(Scripted(prefill_of(api, "push", told_of(SILENT[api])), decode_of(api, of_decode)))
    for number in range(2):
        client = await serve(router, api, streams, f"r{number}")

    assert client.record.push is LegOrder.CONCURRENT
    told = usages(client.body, streams)
    assert told
    assert all(told_of(usage) == told_of(SILENT[api]) for usage in told)
    if api is not Api.MESSAGES:
        assert router.telemetry._counters.transfers[("decode-0", "arrived")] == 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", SAID)
async def test_before_the_prefill_engine_has_answered_no_client_is_told_of_a_cache(api, streams):
    """It has pushed, and its answer is late, or lost: all but one token of the prompt are in a decode engine's."""
    of_prefill, of_decode = SAID[api]
    is_first = True

    async def prefill(leg):
        nonlocal is_first
        if is_first:
            is_first = False
            return await prefill_of(api, "push", of_prefill)(leg)
        await asyncio.sleep(5)
        raise EngineError("broke off")

    router = router_of(Scripted(prefill, decode_of(api, of_decode)))
    for number in range(2):
        client = await serve(router, api, streams, f"r{number}")

    told = usages(client.body, streams)
    everything = {"input_tokens": 254} if api is Api.MESSAGES else {}
    names = [name for name in of_decode if "details" in name or name.startswith("cache")]
    assert told
    assert client.record.push is LegOrder.CONCURRENT
    assert all(usage == of_decode | dict.fromkeys(names) | everything for usage in told)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("streams", [False, True])
async def test_where_both_are_silent_the_answer_passes_as_it_is(mode, streams):
    """Byte for byte, the null of a whole answer too."""
    usage = SILENT[Api.CHAT]
    engines = Scripted(prefill_of(Api.CHAT, mode, usage), decode_of(Api.CHAT, usage))
    router = router_of(engines)
    bodies = [(await serve(router, Api.CHAT, streams, f"r{number}")).body for number in range(2)]

    alone = await serve(router_of(Scripted(None, decode_of(Api.CHAT, usage)), 0), Api.CHAT, streams, "r")
    assert bodies == [alone.body] * 2
