"""An engine that hangs keeps its connections open: what waits for it is ended, and what it still serves is not."""

import asyncio
import threading

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance, InstanceId, LegRequest, Role
from pdrelay_proxy.errors import EngineTimeout
from pdrelay_proxy.io.wire import WireEngines
from pdrelay_proxy.settings import Settings
from support.raw_engine import raw_engine, replying
from support.wiring import until

pytestmark = pytest.mark.edges


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
OTHER = Instance(InstanceId("decode-9"), Role.DECODE, Address("http", "127.0.0.1", 9))


def leg_to(engine, path):
    return LegRequest(Instance(InstanceId("decode-0"), Role.DECODE, Address.parse(engine.at)), path, b"{}", ())


async def read(http, leg):
    return (await http.post(leg, timeout_s=5)).body


async def test_what_has_heard_nothing_for_so_long_is_ended():
    """One gets not even a head, one gets a token now and then, one is done and waits for the next request."""
    is_time, is_over = threading.Event(), threading.Event()

    def script(_, talk):
        path = talk.request().lines[0].split()[1]
        if path == b"/talks":
            talk.send(HEAD)
            for goes_on in (is_time, is_over):
                assert goes_on.wait(20)
                talk.send(b"1\r\nx\r\n")
            talk.send(b"0\r\n\r\n")
        elif path == b"/done":
            talk.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        talk.hung_up()

    with raw_engine(script) as engine:
        async with WireEngines(Settings()) as http:
            silent, talks = (asyncio.create_task(read(http, leg_to(engine, f"/{name}"))) for name in ("mute", "talks"))
            await read(http, leg_to(engine, "/done"))
            await until(lambda: sum(not one.idle for one in http.pool._open) == 2)
            long_ago = asyncio.get_running_loop().time() - 31
            for connection in http.pool._open:
                connection.heard_at = long_ago
            is_time.set()
            await until(lambda: any(one.heard_at > long_ago for one in http.pool._open))
            assert http.pool.give_up(OTHER, silent_s=0.0) == 0
            assert http.pool.give_up(leg_to(engine, "/").instance, silent_s=30) == 1
            is_over.set()
            with pytest.raises(EngineTimeout, match=r"^decode-0 hangs: it has answered nothing"):
                await silent
            assert await talks == b"xx"


async def test_there_is_nothing_to_end_at_an_engine_without_requests():
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    with raw_engine(replying(answer, answer)) as engine:
        async with WireEngines(Settings()) as http:
            leg = leg_to(engine, "/")
            assert await read(http, leg) == b"{}"
            assert http.pool.give_up(leg.instance, silent_s=0.0) == 0
            assert await read(http, leg) == b"{}"
            assert engine.connections == 1
