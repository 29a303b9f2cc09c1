"""The life of one request, against engines that only exist in memory."""

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.dialect import parse
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.learned import Learned
from xpyd_proxy.core.model import Answer, Api, Call, RequestId, Role
from xpyd_proxy.core.policies.round_robin import RoundRobin
from xpyd_proxy.core.push import MANNERS
from xpyd_proxy.core.registry import Registry
from xpyd_proxy.core.rules import Patience, Rules
from xpyd_proxy.errors import EngineError, EngineTimeout, NoInstance, Refused
from xpyd_proxy.relay import Legs, Relay, Releaser
from xpyd_proxy.settings import Mode

PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
}
PREFILLED = Answer(200, "application/json", json.dumps({"kv_transfer_params": PARAMS}).encode())
EVENT, DONE = b'data: {"id":"x"}\n\n', b"data: [DONE]\n\n"


@dataclass
class FakeStream:
    """An answer that is arriving."""

    status: int
    content_type: str
    chunks: object


@dataclass
class FakeEngines:
    """Remembers what it was asked, and what is open; an exception among the parts is raised in its place."""

    clock: list
    prefill: object = field(default_factory=lambda: PREFILLED)
    parts: list = field(default_factory=lambda: [EVENT, EVENT, DONE])
    status: int = 200
    content_type: str = "text/event-stream; charset=utf-8"
    legs: list = field(default_factory=list)
    timeouts: list = field(default_factory=list)
    open: int = 0
    read: int = 0

    async def ask(self, leg, *, timeout_s):
        self.legs.append(leg)
        self.timeouts.append(timeout_s)
        self.clock[0] += 0.25
        if isinstance(self.prefill, Exception):
            raise self.prefill
        return self.prefill

    @asynccontextmanager
    async def stream(self, leg, *, sent):
        self.legs.append(leg)
        self.open += 1
        sent()
        self.clock[0] += 0.5
        try:
            yield FakeStream(self.status, self.content_type, self._chunks())
        finally:
            self.open -= 1

    async def models(self, instance, headers, *, bare=False):
        raise NotImplementedError

    async def _chunks(self):
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            self.read += 1
            yield part


def relay_with(engines, x=1, y=1, *, retries=0, mode=Mode.AUTO):
    registry = Registry()
    for role, count in ((Role.PREFILL, x), (Role.DECODE, y)):
        for port in range(1, count + 1):
            registry.add(role, Address("http", "h", port))
    manner = MANNERS[mode]
    learned = Learned(at_once=manner.at_once)
    legs = Legs(engines, lambda: engines.clock[0])
    rules = Rules(retries, Patience(prefill_s=30.0), alone_without_prefill=False)
    return Relay(registry, legs, RoundRobin(), learned, manner, Releaser(engines), rules)


def call(**fields):
    raw = json.dumps({"prompt": "hi"} | fields).encode()
    return Call(Api.COMPLETIONS, parse(raw, strip_private=False), ((b"authorization", b"k"),))


async def served(engines, request=None, **relay):
    """Serve a request to its end; return the journey and the bytes."""
    journey = Journey(RequestId("xpyd-1"))
    async with relay_with(engines, **relay).serve(request or call(), journey) as reply:
        chunks = [reply.body]
        if reply.rest is not None:
            chunks += [chunk async for chunk in reply.rest]
    return journey, b"".join(chunks)


async def test_the_bytes_of_the_decode_engine_are_the_answer():
    """Unchanged, after one prefill that had its time limit."""
    engines = FakeEngines([0.0])
    _, body = await served(engines)

    assert body == EVENT + EVENT + DONE
    assert [(leg.instance.id, leg.path) for leg in engines.legs] == [
        ("prefill-0", "/v1/completions"),
        ("decode-0", "/v1/completions"),
    ]
    assert engines.timeouts == [30.0]
    assert json.loads(engines.legs[1].body)["kv_transfer_params"] == PARAMS


async def test_both_legs_carry_the_clients_headers_and_our_id():
    """Once each: two ids in one request would be a riddle for the engine."""
    engines = FakeEngines([0.0])
    await served(engines)

    assert [leg.headers for leg in engines.legs] == [((b"authorization", b"k"), (b"x-request-id", b"xpyd-1"))] * 2


async def test_each_leg_is_timed():
    """Until its answer begins."""
    journey, _ = await served(FakeEngines([0.0]))

    assert journey.server_timing() == 'prefill;desc="prefill-0";dur=250.0, decode;desc="decode-0";dur=500.0'


async def test_a_failed_leg_is_timed_too():
    """How long a failure took is what one wants to know of it."""
    journey = Journey(RequestId("r"))
    with pytest.raises(EngineTimeout):
        async with relay_with(FakeEngines([0.0], prefill=EngineTimeout("slow"))).serve(call(), journey):
            pass

    assert journey.server_timing() == 'prefill;desc="prefill-0";dur=250.0'


async def test_nothing_more_is_read_than_is_asked_for():
    """A stream is not collected behind the client's back."""
    engines = FakeEngines([0.0])
    async with relay_with(engines).serve(call(), Journey(RequestId("r"))) as reply:
        assert engines.read == 1
        assert await anext(reply.rest) == EVENT
        assert engines.read == 2


async def test_leaving_early_closes_the_engine_request():
    """The client has hung up: every further token would be made for nobody."""
    engines = FakeEngines([0.0])

    async def hang_up():
        async with relay_with(engines).serve(call(), Journey(RequestId("r"))) as reply:
            assert engines.open == 1
            assert await anext(reply.rest) == EVENT
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await hang_up()

    assert engines.open == 0


async def test_a_whole_answer_is_collected_before_it_is_trusted():
    """If it breaks off, the status can still say so."""
    engines = FakeEngines([0.0], parts=[b'{"id"', b":1}"], content_type="application/json")
    assert (await served(engines))[1] == b'{"id":1}'

    engines = FakeEngines([0.0], parts=[b'{"id"', EngineError("broke off")], content_type="application/json")
    with pytest.raises(EngineError, match="broke off"):
        await served(engines)
    assert engines.open == 0


async def test_the_first_event_decides_whether_there_is_a_reply():
    """However it arrives; comments before it belong to the stream."""
    parts = [b": keep", b"-alive\n\nda", b'ta: {"id":', b'"x"}\n', b"\n", DONE]
    engines = FakeEngines([0.0], parts=parts)
    assert (await served(engines))[1] == b"".join(parts)

    error = b'{"error":{"message":"no room","type":"x","param":null,"code":503}}'
    with pytest.raises(Refused) as caught:
        await served(FakeEngines([0.0], parts=[b": keep-alive\n\n", b"data: " + error + b"\n\n", DONE]))
    assert (caught.value.status, caught.value.body) == (503, error)


@pytest.mark.parametrize("parts", [[], [b": keep-alive\n\n"], [EngineError("decode-0 broke off")]])
async def test_a_stream_without_any_event_is_no_reply(parts):
    """200 and nothing else would be an empty answer."""
    with pytest.raises(EngineError, match="decode-0"):
        await served(FakeEngines([0.0], parts=parts))


@pytest.mark.parametrize("end", [[], [EngineError("decode-0 broke off")], [b'data: {"half'], [b"data: [DO"]])
async def test_a_stream_that_ends_early_raises_after_its_whole_lines(end):
    """What is sent on is good; half a line is not sent."""
    got = []

    async def read():
        engines = FakeEngines([0.0], parts=[EVENT, EVENT, *end])
        async with relay_with(engines).serve(call(), Journey(RequestId("r"))) as reply:
            got.append(reply.body)
            async for chunk in reply.rest:
                got.append(chunk)

    with pytest.raises(EngineError, match="decode-0"):
        await read()

    assert b"".join(got) == EVENT + EVENT


async def test_an_end_without_a_line_break_is_an_end():
    """Servers differ in how they finish."""
    assert (await served(FakeEngines([0.0], parts=[EVENT, b"data: [DONE]"])))[1] == EVENT + b"data: [DONE]"


@pytest.mark.parametrize(
    ("prefill", "kind"),
    [
        (Answer(400, "application/json", b"{}"), Refused),
        (Answer(500, "application/json", b"{}"), EngineError),
        (Answer(200, "application/json", b"{}"), EngineError),
        (EngineTimeout("slow"), EngineTimeout),
    ],
)
async def test_without_a_prefill_nothing_is_decoded(prefill, kind):
    """The decode engine would do the work of both, or die."""
    engines = FakeEngines([0.0], prefill=prefill)
    with pytest.raises(kind):
        await served(engines)

    assert len(engines.legs) == 1


async def test_a_refused_decode_is_told_in_the_engines_words():
    """Its body is read, then its request is closed."""
    body = b'{"error":{"message":"too long"}}'
    engines = FakeEngines([0.0], parts=[body], status=400, content_type="application/json")
    with pytest.raises(Refused) as caught:
        await served(engines)

    assert (caught.value.status, caught.value.body, engines.open) == (400, body, 0)


async def test_a_request_that_cannot_be_split_needs_one_engine():
    """And none of the other kind."""
    engines = FakeEngines([0.0])
    journey, _ = await served(engines, call(n=2), x=0)

    assert [leg.instance.id for leg in engines.legs] == ["decode-0"]
    assert "kv_transfer_params" not in json.loads(engines.legs[0].body)
    assert journey.server_timing() == 'route;desc="solo: n>1", decode;desc="decode-0";dur=500.0'


@pytest.mark.parametrize(("x", "y", "missing"), [(0, 1, "prefill"), (1, 0, "decode"), (0, 0, "decode")])
async def test_missing_engines_are_noticed_before_any_work(x, y, missing):
    """A prefill without a decode engine would pin blocks for nothing."""
    engines = FakeEngines([0.0])
    with pytest.raises(NoInstance, match=missing):
        await served(engines, x=x, y=y)

    assert not engines.legs
