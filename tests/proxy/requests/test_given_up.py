"""An engine that shuts down, or is paused, ends its answers with status 200: no client takes them for whole ones."""

import json

import pytest

from pdrelay_proxy.core.model import Api, EngineResponse
from support.scripted import JSON, Asked, Scripted, pulled_prefill, request_id, router_of
from support.story_engines import Saying

BODIES = {
    Api.COMPLETIONS: {"prompt": "hi", "max_tokens": 5, "temperature": 0},
    Api.CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0},
    Api.RESPONSES: {"input": "hi", "max_output_tokens": 5},
    Api.MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}
RESUMED = (Api.COMPLETIONS, Api.CHAT)


def fleet(api, *, after, y=2, **options):
    """A router whose first decode legs are given up behind so many tokens, but for that of the last engine."""
    left = list(range(max(1, y - 1)))

    async def decode(leg):
        body = json.loads(leg.body)
        said = Saying(api, body, f"x-{request_id(leg)}")
        if left:
            left.pop()
            said.abort(after)
        if body.get("stream"):
            return 200, list(said.events())
        return EngineResponse(200, JSON, json.dumps(said.whole(), separators=(",", ":")).encode())

    return router_of(Scripted(pulled_prefill, decode), 1, y, **options)


async def served(router, api, **more):
    client = await router.serve(Asked(api.value, json.dumps(BODIES[api] | more).encode()))
    assert router.is_idle()
    return client


def text_of(api, raw):
    """The text of an answer, or of a stream."""
    if raw[:1] != b"{":
        parts = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
        choices = [choice for part in parts for choice in part.get("choices", ())]
        deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
        deltas += [part["delta"] for part in parts if isinstance(part.get("delta"), dict)]
        plain = [part["delta"] for part in parts if isinstance(part.get("delta"), str)]
        return "".join([*plain, *(delta.get("content") or delta.get("text") or "" for delta in deltas)])
    said = json.loads(raw)
    if "choices" in said:
        return said["choices"][0].get("text") or said["choices"][0]["message"]["content"]
    return (said.get("output") or [said])[0]["content"][0]["text"]


def wanted(api):
    return "".join(step.text for step in Saying(api, BODIES[api], "x").choices[0])


SHOWS_NOTHING = [
    *((api, False, after) for api in BODIES for after in (0, 2) if not after or api is not Api.RESPONSES),
    *((api, True, 0) for api in BODIES if api is not Api.MESSAGES),
]


@pytest.mark.parametrize(("api", "stream", "after"), SHOWS_NOTHING)
async def test_another_engine_answers_while_the_client_has_no_token(api, stream, after):
    """A whole answer of /v1/responses that has one is called completed; a chat's stream has begun with its role."""
    client = await served(fleet(api, after=after, resume_streams=api is Api.CHAT), api, stream=stream)

    assert client.error is None
    assert text_of(api, client.body) == wanted(api)
    assert b'"abort"' not in client.body


@pytest.mark.parametrize("api", RESUMED)
@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
async def test_another_engine_goes_on_with_the_stream(api, usage):
    """The client sees nothing of it: one finish reason, one end."""
    client = await served(fleet(api, after=2, y=3, resume_streams=True), api, stream=True, stream_options=usage)

    assert client.error is None
    assert text_of(api, client.body) == wanted(api)
    assert client.body.count(b'"finish_reason":"') == client.body.count(b"[DONE]") == 1


@pytest.mark.parametrize(
    ("api", "after"), [(Api.COMPLETIONS, 2), (Api.CHAT, 2), (Api.CHAT, 0), (Api.MESSAGES, 2), (Api.MESSAGES, 0)]
)
async def test_a_stream_that_no_engine_continues_ends_with_an_error(api, after):
    """And without what tells a client's library that it is whole."""
    client = await served(fleet(api, after=after), api, stream=True)

    assert b"gave up its answer" in client.body
    assert b"[DONE]" not in client.body
    assert b"message_stop" not in client.body
    assert client.request.failure is not None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", BODIES)
async def test_without_another_engine_it_is_an_error(api, stream):
    """No answer without a token is one."""
    client = await served(fleet(api, after=0, y=1, retries=0), api, stream=stream)

    assert client.status == 502 or b"gave up its answer" in client.body


OTHERS = {
    # some models score all options in one forward pass, and make no token (structured_decisions/strategies.py)
    "/v1/systemone": {"answers": {"q": "a"}, "usage": {"input_tokens": 30, "output_tokens": 0}},
    # it repeats the reason that its client has sent
    "/v1/chat/completions/derender": {"choices": [{"index": 0, "message": {}, "finish_reason": "abort"}]},
}


@pytest.mark.parametrize("path", OTHERS)
async def test_what_makes_no_token_gives_none_up(path):
    """Neither the engine nor the client loses by it."""
    said = json.dumps(OTHERS[path], separators=(",", ":")).encode()

    async def decode(_):
        return EngineResponse(200, JSON, said)

    client = await router_of(Scripted(pulled_prefill, decode), 1, 2).serve(Asked(path, b"{}"))

    assert (client.error, client.body) == (None, said)
