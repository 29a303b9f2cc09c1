"""The connection of a look: over real sockets, with engines that close, reset, and show certificates."""

import asyncio
import contextlib
import socket
import struct
from contextlib import asynccontextmanager

import httpx
import pytest

from pdrelay_proxy.io.probes.one_connection import OneConnection
from pdrelay_proxy.io.wire.engine_tls import EngineTls
from support.certificates import Authority
from support.wiring import LOOPS, run

pytestmark = pytest.mark.processes


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STAYS = "stays"
CLOSES = "closes"
RESETS = "resets"
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: what is not sent is dropped, and the peer gets a reset


@pytest.fixture(params=LOOPS)
def loop(request):
    """The router's is uvloop's where there is one."""
    return request.param


class Engine:
    """Answers each request with the next bytes, and then does with its connection what is behind them."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.opened = 0
        self.serving = set()

    async def serve(self, reader, writer):
        self.opened += 1
        self.serving.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                answer, then = self.answers.pop(0)
                writer.write(answer)
                if then == RESETS:
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                    writer.transport.abort()
                if then != STAYS:
                    break
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def asking(engine, *, tls=None, serves_tls=None, name=None):
    """Yield what asks the engine, over one transport."""
    async with await asyncio.start_server(engine.serve, "127.0.0.1", 0, ssl=serves_tls) as server:
        port = server.sockets[0].getsockname()[1]
        scheme = "http" if serves_tls is None else "https"
        async with OneConnection(EngineTls(tls or httpx.create_ssl_context(), name)) as transport:

            async def ask():
                request = httpx.Request("GET", f"{scheme}://127.0.0.1:{port}/health")
                async with (
                    asyncio.timeout(5),
                    contextlib.aclosing(await transport.handle_async_request(request)) as got,
                ):
                    return got.status_code, await got.aread()

            yield ask
        await asyncio.gather(*engine.serving)


def test_requests_of_a_look_share_a_connection(loop):
    """One after the other."""

    async def scene():
        engine = Engine(*[(ANSWER, STAYS)] * 3)
        async with asking(engine) as ask:
            assert [await ask() for _ in range(3)] == [(200, b"ok")] * 3

        assert engine.opened == 1

    run(loop, scene())


@pytest.mark.parametrize(
    "ending",
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok", CLOSES),
        (b"HTTP/1.0 200 OK\r\n\r\nok", CLOSES),
        (ANSWER, CLOSES),
    ],
    ids=["said so", "the body ends so", "without a word"],
)
def test_an_engine_that_closed_is_connected_to_again(loop, ending):
    """As the next request would fail on the old connection."""

    async def scene():
        engine = Engine(ending, (ANSWER, STAYS))
        async with asking(engine) as ask:
            assert await ask() == (200, b"ok")
            await asyncio.sleep(0.05)  # for its end to be here
            assert await ask() == (200, b"ok")

        assert engine.opened == 2

    run(loop, scene())


@pytest.mark.parametrize(
    "ending",
    [(b"", CLOSES), (b"", RESETS), (ANSWER[:-1], CLOSES), (ANSWER[:20], CLOSES), (b"nonsense\r\n\r\n", STAYS)],
    ids=["nothing", "reset", "less than it said", "half a head", "nonsense"],
)
def test_an_engine_that_breaks_off_is_an_error_of_httpx(loop, ending):
    """Whatever the library below says."""

    async def scene():
        async with asking(Engine(ending)) as ask:
            with pytest.raises(httpx.ReadError):
                await ask()

    run(loop, scene())


def test_an_address_without_a_server_refuses(loop):
    """At once."""

    async def scene():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            async with OneConnection(EngineTls.from_system()) as transport:
                with pytest.raises(httpx.ConnectError):
                    await transport.handle_async_request(httpx.Request("GET", f"http://127.0.0.1:{port}/"))

    run(loop, scene())


def test_a_certificate_must_have_the_name_of_its_engine(loop, tmp_path):
    """Or the one that is asked for in its place; and one of another authority is refused."""

    async def scene():
        authority = Authority(tmp_path, "ours")
        serving, trusting = authority.contexts()
        engine = Engine(*[(ANSWER, STAYS)] * 2)
        async with asking(engine, tls=trusting, serves_tls=serving) as ask:
            assert [await ask(), await ask()] == [(200, b"ok")] * 2
        assert engine.opened == 1
        async with asking(Engine(), tls=trusting, serves_tls=serving, name="other.example") as ask:
            with pytest.raises(httpx.ConnectError, match="not valid for"):
                await ask()
        async with asking(Engine(), serves_tls=serving) as ask:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await ask()

    run(loop, scene())
