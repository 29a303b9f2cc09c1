"""The OpenAI routes, message by message."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from starlette.requests import ClientDisconnect

from xpyd_proxy.api.openai import Generation
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import Api, RequestId
from xpyd_proxy.errors import EngineError
from xpyd_proxy.relay import Reply
from xpyd_proxy.settings import Settings

EVENT = b'data: {"id":"x"}\n\n'


class FakeRelay:
    """Replies with what it was given, and knows whether its caller is still there."""

    def __init__(self, reply):
        self.reply = reply
        self.call = None
        self.is_open = False

    @asynccontextmanager
    async def serve(self, call, journey):
        self.call = call
        self.is_open = True
        try:
            yield self.reply
        finally:
            self.is_open = False


class Client:
    """Sends one body; hangs up when told to."""

    def __init__(self, body=b'{"prompt":"hi"}'):
        self.body = body
        self.sent = []
        self.gone = asyncio.Event()
        self.journey = Journey(RequestId("xpyd-1"))

    async def receive(self):
        if self.body is None:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message):
        self.sent.append(message)

    async def ask(self, relay):
        scope = {"type": "http", "path": "/v1/completions", "headers": [(b"authorization", b"k"), (b"cookie", b"c")]}
        scope["xpyd.journey"] = self.journey
        await Generation(relay, Settings())(scope, self.receive, self.send)

    @property
    def received(self):
        return b"".join(message["body"] for message in self.sent[1:])


async def test_a_whole_answer_says_how_long_it_is():
    """And keeps the engine's content type."""
    relay, client = FakeRelay(Reply("application/json", b'{"id":1}')), Client()
    await client.ask(relay)

    start = client.sent[0]
    assert start["status"] == 200
    assert start["headers"] == [(b"content-type", b"application/json"), (b"content-length", b"8")]
    assert client.received == b'{"id":1}'
    assert [message["more_body"] for message in client.sent[1:]] == [True, False]


async def test_the_relay_gets_what_the_client_asked_for():
    """The path, the fields and those headers that engines may see."""
    relay, client = FakeRelay(Reply("application/json", b"{}")), Client()
    await client.ask(relay)

    assert relay.call.api is Api.COMPLETIONS
    assert bytes(relay.call.fields["prompt"]) == b'"hi"'
    assert relay.call.headers == ((b"authorization", b"k"),)
    assert not relay.is_open


async def test_each_part_of_a_stream_is_sent_when_it_comes():
    """One message for one part, and the relay is left at the end."""

    async def rest():
        assert client.received == EVENT
        yield b"data: [DONE]\n\n"

    client = Client()
    await client.ask(FakeRelay(Reply("text/event-stream", EVENT, rest())))

    assert client.sent[0]["headers"] == [(b"content-type", b"text/event-stream")]
    assert client.received == EVENT + b"data: [DONE]\n\n"


async def test_a_stream_that_breaks_off_says_so_in_the_stream():
    """As an event of its own even after a line without its blank line, and without the [DONE] of a good end."""

    async def rest():
        yield b'data: {"id":"y"}\n'
        raise EngineError("decode-0 broke off")

    client = Client()
    await client.ask(FakeRelay(Reply("text/event-stream", EVENT, rest())))

    *events, error, end = client.received.split(b"\n\n")
    assert [json.loads(event.removeprefix(b"data: "))["id"] for event in events] == ["x", "y"]
    assert json.loads(error.removeprefix(b"data: "))["error"] == {
        "message": "decode-0 broke off",
        "type": "EngineError",
        "param": None,
        "code": 502,
    }
    assert end == b""
    assert client.sent[-1]["more_body"] is False
    assert client.journey.fault == "decode-0 broke off"


async def test_a_client_that_hangs_up_closes_what_is_open():
    """Before its request is over in the log."""

    async def rest():
        client.gone.set()
        await asyncio.Event().wait()
        yield b""

    client, relay = Client(), None
    relay = FakeRelay(Reply("text/event-stream", EVENT, rest()))
    with pytest.raises(ClientDisconnect):
        await client.ask(relay)

    assert not relay.is_open
