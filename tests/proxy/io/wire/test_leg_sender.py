"""Requests whose answers are told."""

import asyncio

import pytest
from msgspec import Raw

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.keys import Outbound
from pdrelay_proxy.core.model import Instance, InstanceId, RequestId, Role
from pdrelay_proxy.core.raw_json import encode_in_pieces
from pdrelay_proxy.errors import ConnectionStale, EngineError
from pdrelay_proxy.io.wire import WireEngines
from pdrelay_proxy.io.wire.leg_sender import LegSender
from pdrelay_proxy.io.wire.pool import Pool
from pdrelay_proxy.io.wire.whole_response import WholeAnswer
from pdrelay_proxy.settings import Settings
from support.raw_engine import raw_engine
from support.wiring import Told, answer, leg_to, run, telling

pytestmark = pytest.mark.processes


@telling
@pytest.mark.parametrize("size", [10, 20_000, 3_000_000])
def test_the_pieces_of_a_body_arrive_as_one(loop, scheme, contexts, size):
    """A long prompt is written from where it was read, however slowly the engine takes it."""
    theirs, ours = contexts
    fields = {"a": Raw(b"1"), "prompt": Raw(b'"' + b"x" * size + b'"')}
    whole = b"".join(encode_in_pieces(fields, "prompt"))

    def script(engine, talk):
        for _ in range(2):
            engine.requests.append(talk.request())
            talk.send(answer(b"hello"))
        talk.hung_up()

    async def main(leg):
        async with WireEngines(Settings(), tls=ours) as engines:
            for _ in range(2):
                call = Told()
                pieces = encode_in_pieces({name: Raw(bytes(raw)) for name, raw in fields.items()}, "prompt")
                engines.leg_sender.send(call, leg.instance, leg.path, headers=(), request=RequestId("r"), body=pieces)
                del pieces
                assert await call.whole() == b"hello"
                assert call.status == 200
                engines.leg_sender.done(call)
            assert engines.pool.idle == 1

    with raw_engine(script, tls=theirs) as engine:
        run(loop, main(leg_to(engine, scheme=scheme)))

    assert [request.body for request in engine.requests] == [whole] * 2
    assert {request.value(b"content-length") for request in engine.requests} == {b"%d" % len(whole)}


def test_a_connection_is_used_again_for_its_own_address_alone(loop):
    """Engines that join at the same time have one id, as candidates: what went to one came to another."""

    def script(engine, talk):
        while True:
            engine.requests.append(talk.request())
            talk.send(answer())

    async def main(legs):
        async with WireEngines(Settings()) as engines:
            await asyncio.gather(*[engines.post(leg, timeout_s=5) for leg in legs])
            for leg in (*legs, *legs):
                await engines.post(leg, timeout_s=5)

    with raw_engine(script) as one, raw_engine(script) as other:
        run(loop, main([leg_to(engine, engine.at.encode()) for engine in (one, other)]))

    for engine in (one, other):
        assert [request.body for request in engine.requests] == [engine.at.encode()] * 3


async def test_a_connection_that_cannot_be_opened_for_another_reason_is_told_too():
    """A leg without a time limit would wait for ever."""

    async def dial(*_):
        raise RuntimeError("a fault of our own")

    pool = Pool(keepalive_s=5, connect_timeout_s=5, dial=dial)
    whole = WholeAnswer("decode-0")
    instance = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "h", 1))
    LegSender(pool, Outbound()).send(
        whole, instance, "/v1/completions", headers=(), request=RequestId("r"), body=[b"{}"]
    )

    with pytest.raises(RuntimeError, match="a fault of our own"):
        await asyncio.wait_for(whole.answer, 30)
    await pool.close()


@pytest.mark.parametrize(
    ("served", "waits_s", "begins", "kind"),
    [
        (1, 0.0, b"", ConnectionStale),
        (0, 0.0, b"", EngineError),  # a connection of its own: the engine fails the request
        (1, 2.0, b"", EngineError),  # it has had the time to read it
        (1, 0.0, b"HTTP/1.1 200 OK\r\n", EngineError),
    ],
)
@pytest.mark.parametrize("is_reset", [True, False])
def test_an_idle_connection_that_is_closed_under_a_request_is_told_from_an_engine_that_breaks_off(
    loop, served, waits_s, begins, kind, is_reset
):
    """Engines close connections after some idle seconds, and nothing is wrong then."""

    def script(engine, talk):
        for _ in range(served):
            talk.request()
            talk.send(answer())
        talk.request()
        talk.send(begins)
        if is_reset:
            talk.reset()

    async def main(leg):
        async with WireEngines(Settings()) as engines:
            for _ in range(served):
                await engines.post(leg, timeout_s=5)
            call = WholeAnswer("decode-0")
            engines.leg_sender.post(call, leg)
            if call.source is not None:
                call.source.heard_at -= waits_s
            await call.answer

    with raw_engine(script) as engine, pytest.raises(EngineError) as caught:
        run(loop, main(leg_to(engine)))

    assert type(caught.value) is kind


def test_a_closed_idle_connection_ends_those_that_were_idle_for_longer(loop):
    """An engine that closes each of them upon a request costs one retry, and not one for each."""

    def script(engine, talk):
        talk.request()
        talk.send(answer())
        talk.request()

    async def main(leg):
        async with WireEngines(Settings()) as engines:
            await asyncio.gather(*(engines.post(leg, timeout_s=5) for _ in range(3)))
            assert engines.pool.idle == 3
            with pytest.raises(ConnectionStale):
                await engines.post(leg, timeout_s=5)
            assert engines.pool.idle == 0

    with raw_engine(script) as engine:
        run(loop, main(leg_to(engine)))
