"""Connections of the router's own client: when they are opened, closed, used again, and never left behind."""

import asyncio
import gc
import socket
import threading
from dataclasses import replace

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.errors import EngineError, EngineTimeout
from pdrelay_proxy.io.wire import WireEngines
from pdrelay_proxy.io.wire.connect_limiter import OPENING_MOST
from pdrelay_proxy.io.wire.connection import Connection
from pdrelay_proxy.io.wire.whole_response import WholeAnswer
from pdrelay_proxy.settings import Settings
from support.raw_engine import RawEngine, closing, listening_in_vain, raw_engine
from support.wiring import CHUNKED, Told, answer, leg_to, run, telling, told, until

pytestmark = pytest.mark.processes


ROUNDS = 8  # of the event loop: a connection to this machine is open after fewer


def test_a_connect_that_is_cancelled_leaves_no_connection(loop, scheme, contexts):
    """In whatever round of the event loop its client leaves, the socket is closed, and the pool knows of none."""
    theirs, ours = contexts

    def script(engine, talk):
        engine.hung.append(talk.hung_up())

    async def main(leg):
        async with WireEngines(Settings(), tls=ours) as engines:
            for rounds in range(ROUNDS):
                tasks = [asyncio.create_task(engines.post(leg, timeout_s=5)) for _ in range(4)]
                for _ in range(rounds):
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            await until(lambda: not engines.pool._open)
            await until(lambda: len(engine.hung) == len(engine.sockets))

    with raw_engine(script, tls=theirs) as engine:
        run(loop, main(leg_to(engine, scheme=scheme)))

    assert all(engine.hung)


def test_what_connects_while_all_is_closed_is_closed_too(loop, scheme, contexts):
    """Its request fails, and the engine is not asked."""
    theirs, ours = contexts

    def script(engine, talk):
        engine.requests.append(talk.request())
        talk.send(answer())

    async def main(leg):
        engines = WireEngines(Settings(), tls=ours)
        task = asyncio.create_task(engines.post(leg, timeout_s=5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engines.pool.close()
        with pytest.raises(EngineError):
            await task
        await until(lambda: not engines.pool._open)

    with raw_engine(script, tls=theirs) as engine:
        run(loop, main(leg_to(engine, scheme=scheme)))

    assert engine.requests == []


def test_of_many_connections_the_first_is_ready_before_the_last_is_begun(loop):
    """Requests of one instant that find none: opened side by side, all were ready at the end, and nobody served."""
    many = 100
    open_then, order = [], []

    async def main(leg):
        async with WireEngines(Settings()) as engines:

            async def one(number):
                await engines.pool.open(leg.instance)
                order.append(number)
                open_then.append(len(engines.pool._open))

            await asyncio.gather(*map(one, range(many)))

    with raw_engine(lambda _, talk: talk.hung_up()) as engine:
        run(loop, main(leg_to(engine)))

    assert open_then[0] <= OPENING_MOST
    assert max(abs(place - number) for place, number in enumerate(order)) < OPENING_MOST


def test_connections_that_do_not_come_about_hold_up_no_other(loop):
    """An engine whose host drops what is sent to it: requests to another one need not wait until they are given up."""

    async def main(leg, deaf):
        dead = replace(leg.instance, address=Address.parse(deaf))
        async with WireEngines(Settings(connect_timeout_s=60)) as engines:
            in_vain = [asyncio.create_task(engines.pool.open(dead)) for _ in range(10 * OPENING_MOST)]
            await asyncio.sleep(0)
            async with asyncio.timeout(20):
                await engines.pool.open(leg.instance)
            assert not any(task.done() for task in in_vain)
            for task in in_vain:
                task.cancel()
            await asyncio.wait(in_vain)

    with listening_in_vain() as deaf, raw_engine(lambda _, talk: talk.hung_up()) as engine:
        run(loop, main(leg_to(engine), deaf))


@pytest.mark.parametrize("rounds", range(12))
def test_whoever_leaves_while_connections_are_opened_leaves_the_turn_to_others(loop, rounds):
    """Those that have it, those that wait for it, and those who have just got it: none is lost, and none is doubled."""

    async def main(leg):
        async with WireEngines(Settings()) as engines:
            tasks = [asyncio.create_task(engines.pool.open(leg.instance)) for _ in range(5 * OPENING_MOST)]
            for _ in range(rounds):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.gather(*(engines.pool.open(leg.instance) for _ in range(5 * OPENING_MOST)))
            assert engines.pool._connect_limiter._free._value == OPENING_MOST

    with raw_engine(lambda _, talk: talk.hung_up()) as engine:
        run(loop, main(leg_to(engine)))


def test_a_request_that_could_not_be_written_was_not_sent():
    """The engine resets the connection between the look at it and the writing: nobody may take it for asked.

    uvloop writes after the call has returned, and finds out later.
    """
    begun, reset = threading.Event(), threading.Event()

    def script(_, talk):
        begun.wait(30)
        talk.reset()
        reset.set()

    async def main(leg):
        async with WireEngines(Settings()) as engines:
            connection = await engines.pool.open(leg.instance)
            call = WholeAnswer(leg.instance.id)
            begun.set()
            assert reset.wait(30)  # and the event loop sees nothing of it
            connection.start(call, b"POST / HTTP/1.1\r\n\r\n", [b"{}"])
            assert not call.is_sent
            with pytest.raises(EngineError, match="broke off"):
                await call.answer
            assert not call.is_sent

    with raw_engine(script) as engine:
        run("asyncio", main(leg_to(engine)))


async def ask(engines, leg):
    with pytest.raises(EngineError):
        await engines.post(leg, timeout_s=5)


async def listen(engines, leg):
    async with told(engines, leg) as call:
        await until(lambda: call.is_over)
        assert isinstance(call.error, EngineError)


FAILING = {
    "no head": b"",
    "cut": CHUNKED + b"5\r\nhel",
    "not HTTP": b"HTTP/9.9 200 OK\r\n\r\n",
    "not HTTP later": CHUNKED + b"5\r\nhelloXX",
    "unclear": b"HTTP/1.1 101 Switching\r\n\r\n",
}


@pytest.mark.parametrize("way", [ask, pytest.param(listen, marks=telling)])
@pytest.mark.parametrize("said", FAILING.values(), ids=FAILING)
def test_a_failed_request_is_freed_at_once(loop, way, said):
    """An engine that fails everything must not fill the memory until the garbage collector comes round."""

    async def main(leg):
        async with WireEngines(Settings()) as engines:
            for _ in range(3):
                await way(engines, leg)
            await until(lambda: not engines.pool._open)
            await asyncio.sleep(0)
            assert [one for one in gc.get_objects(generation=0) if isinstance(one, PARTS)] == []

    with raw_engine(closing(said)) as engine:
        gc.collect(0)  # what lives now is older, and what is made from now on is young
        gc.disable()
        try:
            run(loop, main(leg_to(engine)))
        finally:
            gc.enable()


PARTS = (Connection, Told, WholeAnswer, EngineError)


def test_a_connection_that_nobody_took_is_freed_at_once(loop):
    """An engine that is away is asked again and again."""

    async def main(leg):
        async with WireEngines(Settings()) as engines:
            for _ in range(3):
                with pytest.raises(EngineError, match="cannot be reached"):
                    await engines.post(leg, timeout_s=5)
            await asyncio.sleep(0)
            assert [one for one in gc.get_objects(generation=0) if isinstance(one, PARTS)] == []

    with socket.socket() as silent:  # bound and not listening: refuses, and nobody else can get its port
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        gc.collect(0)
        gc.disable()
        try:
            run(loop, main(leg_to(RawEngine(f"127.0.0.1:{port}", port))))
        finally:
            gc.enable()


def grow_older(call, seconds):
    """Make it so much longer ago that something was heard: waiting for it would take as long."""
    call.source.heard_at -= seconds


@telling
def test_a_stream_that_its_own_client_holds_up_is_not_given_up(loop):
    """Nothing is heard because nothing is read; the engine's silence is counted from when reading goes on."""

    def script(_, talk):
        talk.request()
        talk.send(CHUNKED + b"1\r\nx\r\n")
        talk.hung_up()

    async def main(leg):
        async with WireEngines(Settings()) as engines, told(engines, leg) as call:
            await call.some()
            call.hold()
            grow_older(call, 31)
            assert engines.pool.give_up(leg.instance, silent_s=30) == 0
            call.resume()
            assert engines.pool.give_up(leg.instance, silent_s=30) == 0
            grow_older(call, 31)
            assert engines.pool.give_up(leg.instance, silent_s=30) == 1
            with pytest.raises(EngineTimeout, match="hangs"):
                await call.whole()

    with raw_engine(script) as engine:
        run(loop, main(leg_to(engine)))


@telling
def test_a_resume_without_a_pause_is_no_sign_of_life(loop):
    """Whoever pours a stream may say so at any time."""

    def script(_, talk):
        talk.request()
        talk.send(CHUNKED)
        talk.hung_up()

    async def main(leg):
        async with WireEngines(Settings()) as engines, told(engines, leg) as call:
            await call.begun()
            grow_older(call, 31)
            call.resume()
            assert engines.pool.give_up(leg.instance, silent_s=30) == 1

    with raw_engine(script) as engine:
        run(loop, main(leg_to(engine)))
