"""Answers as the router's own client reads them: held up and over TLS, whose layer reads ahead of us."""

import asyncio
import threading

import pytest

from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.wire import WireEngines
from pdrelay_proxy.settings import Settings
from support.raw_engine import closing, raw_engine, replying
from support.wiring import answer, leg_to, run, telling, told, until

pytestmark = pytest.mark.processes


@telling
@pytest.mark.parametrize("at", ["the last piece", "the end"])
def test_a_second_answer_read_by_tls_while_paused_answers_nobody(loop, at, serving_tls):
    """The TLS layer reads on, and keeps what it decrypts until reading resumes: by then it is another's turn."""
    theirs, ours = serving_tls
    delivering = threading.Event()
    paused = threading.Event()
    strayed = threading.Event()

    def script(_, talk):
        talk.request()
        if talk.number > 0:
            talk.send(answer(b"right"))
        else:
            head, body = answer()[:-5], answer()[-5:]
            talk.send(head)
            delivering.wait(30)
            talk.send(body)
            paused.wait(30)
            talk.send(answer(b"wrong"))
            strayed.set()
        talk.hung_up()

    async def main(leg):
        async with WireEngines(Settings(), tls=ours) as engines:

            def took(_):
                if at == "the last piece":
                    call.hold()

            async with told(engines, leg, took) as call:
                await call.begun()
                delivering.set()
                assert await call.whole() == b"hello"
                if at == "the end":
                    call.hold()
                paused.set()
                await until(strayed.is_set)
                await asyncio.sleep(0.05)  # for the TLS layer to read it
            assert (await engines.post(leg, timeout_s=5)).body == b"right"

    with raw_engine(script, tls=theirs) as engine:
        run(loop, main(leg_to(engine, scheme="https")))

    assert engine.connections == 2


async def ask(engines, leg):
    await engines.post(leg, timeout_s=5)


async def listen(engines, leg):
    async with told(engines, leg) as call:
        await call.whole()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
@pytest.mark.parametrize("way", [ask, pytest.param(listen, marks=telling)])
def test_over_tls_an_answer_without_a_length_is_refused(loop, way, head, serving_tls):
    """Anybody on the way can end the connection, and half an answer would pass for a whole one."""
    theirs, ours = serving_tls

    async def main(leg):
        async with WireEngines(Settings(), tls=ours) as engines:
            with pytest.raises(EngineError, match="without a length over TLS"):
                await way(engines, leg)

    with raw_engine(closing(head + b'{"half":'), tls=theirs) as engine:
        run(loop, main(leg_to(engine, scheme="https")))


@pytest.mark.parametrize("head", [b"HTTP/1.1 204 X\r\n\r\n", b"HTTP/1.1 304 X\r\n\r\n"])
def test_over_tls_an_answer_that_has_no_body_needs_no_length(loop, head, serving_tls):
    theirs, ours = serving_tls

    async def main(leg):
        async with WireEngines(Settings(), tls=ours) as engines:
            return (await engines.post(leg, timeout_s=5)).body

    with raw_engine(replying(head), tls=theirs) as engine:
        assert run(loop, main(leg_to(engine, scheme="https"))) == b""
