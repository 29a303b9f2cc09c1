"""Clients that do not read: the router waits for them, but not for ever."""

import asyncio
import logging
import socket
import time
from contextlib import asynccontextmanager
from functools import partial

import pytest
import uvicorn
from uvicorn.server import ServerState

from pdrelay_proxy.api.clients import Clients
from pdrelay_proxy.api.guarded import connection_class
from pdrelay_proxy.api.unread_answers import UnreadAnswers
from pdrelay_proxy.app import build
from pdrelay_proxy.settings import Settings
from support.certificates import Authority
from support.reciting import Act, reciting, whole
from support.scenes import answer, metrics_of, post, routing, run, text
from support.sim import until_async as until

pytestmark = pytest.mark.processes


RESUMING = pytest.mark.parametrize("options", [{}, {"resume_streams": True}], ids=["as it is", "resuming"])
ONE_EACH = {"prefill": (True,), "decode": (True,)}
JSON = b"Content-Type: application/json"
EVENT = b'data: {"choices":[{"text":"%b"}]}\n\n' % (b"x" * 250_000)
BEGUN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
EVENTS = 40
FLOOD = Act(((0.0, BEGUN), *[(0.0, b"%x\r\n%b\r\n" % (len(EVENT), EVENT))] * EVENTS, (0.0, DONE)))
LONG = Act(((0.0, whole(b'{"choices":[{"text":"%b"}]}' % (b"x" * 8_000_000))),))
PATIENCE_S = 0.6


@asynccontextmanager
async def small(port, request=b""):
    """Connect with little room for what is not read, and ask."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(sock, request)
        yield sock


@asynccontextmanager
async def asked(options, act, *, stream, before=b"", **patience):
    """A router, a decode engine that answers so, and a client that has asked and not read.

    ``before``: what it has asked first.
    """
    async with (
        reciting({"prefill": (), "decode": (act,)}, ONE_EACH) as cast,
        routing(cast, options, **({"write_timeout_s": PATIENCE_S} | patience)) as served,
        small(served.port, before + post(text(stream=stream), JSON)) as sock,
    ):
        yield cast, served.port, served.settled, sock


async def read_on(sock):
    """Read until nothing comes any more; return how much came, and whether it was all of an answer."""
    received, piece = 0, b"begun"
    while piece and not piece.endswith(b"0\r\n\r\n"):
        piece = await asyncio.get_running_loop().sock_recv(sock, 300_000)
        received += len(piece)
    return received, bool(piece)


@RESUMING
@pytest.mark.parametrize(("act", "stream"), [(FLOOD, True), (LONG, False)], ids=["stream", "whole"])
def test_a_client_that_reads_nothing_is_hung_up_on(options, act, stream, caplog):
    """Its engine, its place and its bytes are free again, and the log says why; nobody else is touched."""
    caplog.set_level(logging.INFO, "pdrelay_proxy")
    caplog.set_level(logging.INFO, "pdrelay.access")

    async def scene():
        start = time.monotonic()  # the kernel's time begins with the first byte that is not read
        async with asked(options, act, stream=stream) as (cast, port, settled, sock):
            counted = (await metrics_of(port))["pdrelay_client_write_timeouts_total"]
            assert counted == "0.0" or time.monotonic() - start >= PATIENCE_S
            await until(lambda: "has read nothing" in caplog.text)
            waited = time.monotonic() - start
            await settled()
            if stream:
                await until(lambda: not cast.connections("decode"))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(text(), JSON))
            other = await answer(reader)
            writer.transport.abort()
            with pytest.raises(ConnectionResetError):  # and no end that could be taken for that of the answer
                await read_on(sock)
            return waited, other, await metrics_of(port)

    waited, other, metrics = run(scene(), seconds=30)

    assert f"a client (127.0.0.1) has read nothing of its answer for {PATIENCE_S:g} s" in caplog.text
    assert waited >= PATIENCE_S
    assert other.status == 200
    assert metrics["pdrelay_client_write_timeouts_total"] == "1.0"
    if stream:
        assert "status=499" in caplog.text


@RESUMING
def test_a_client_that_reads_slowly_gets_everything(options):
    """As long as it reads something now and then; a busy machine may keep it from that, and then it tries again.

    Its window stays smaller than the kernel's segments, which TCP_USER_TIMEOUT takes for reading nothing.
    """
    patience = 1.5

    async def scene():
        async with asked(options, FLOOD, stream=True, write_timeout_s=patience) as (_, _, _, sock):
            received = 0
            reads = 0
            longest = 0.0
            piece = b"begun"
            read_at = time.monotonic()
            try:
                while piece and not piece.endswith(b"0\r\n\r\n"):
                    await asyncio.sleep(patience / 3 if reads < 6 else 0)
                    piece = await asyncio.get_running_loop().sock_recv(sock, 300_000)
                    longest = max(longest, time.monotonic() - read_at)
                    read_at = time.monotonic()
                    received, reads = received + len(piece), reads + 1
            except ConnectionResetError:
                longest = max(longest, time.monotonic() - read_at)
                return None if longest >= patience else f"reset, and it never read nothing for {longest:.3f} s"
            return received > EVENTS * len(EVENT) and bool(piece)

    found = next((seen for _ in range(5) if (seen := run(scene(), seconds=30)) is not None), None)

    assert found is True


def test_a_connection_whose_answer_is_being_read_is_not_idle():
    """It has rested before; a long answer takes a slow client more time than a connection may be idle."""
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def scene():
        patience = {"write_timeout_s": 20, "keepalive_s": PATIENCE_S}
        async with asked({}, LONG, stream=False, before=health, **patience) as (*_, sock):
            await asyncio.sleep(2 * PATIENCE_S)
            received = b""
            while piece := await asyncio.get_running_loop().sock_recv(sock, 300_000):
                received += piece
            return received

    assert run(scene(), seconds=30).endswith(b'xxx"}]}')


def test_a_client_that_sends_no_more_gets_the_rest_of_a_long_answer():
    """It has closed its half of the connection, which is how a client leaves that waits for an answer."""

    async def scene():
        async with asked({}, LONG, stream=False, write_timeout_s=20) as (_, _, settled, sock):
            received = await asyncio.get_running_loop().sock_recv(sock, 1000)
            sock.shutdown(socket.SHUT_WR)
            while piece := await asyncio.get_running_loop().sock_recv(sock, 300_000):
                received += piece
            await settled()
            return received

    assert run(scene(), seconds=30).endswith(b'xxx"}]}')


async def flood(scope, receive, send):
    """Answer with more than anybody reads."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(EVENTS):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})


def test_over_tls_too(tmp_path, caplog):
    """Where the bytes wait in another place."""
    theirs, ours = Authority(tmp_path, "ca").contexts()

    async def scene():
        requests = build(Settings(prefill=("127.0.0.1:1",), decode=("127.0.0.1:2",))).requests
        protocol = connection_class(Clients(), UnreadAnswers(PATIENCE_S, lambda: None), requests)
        config = uvicorn.Config(flood, http=protocol, lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        make = partial(config.http_protocol_class, config=config, server_state=state, app_state={})
        listener = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, ssl=theirs)
        async with small(listener.sockets[0].getsockname()[1]) as sock:
            _, writer = await asyncio.open_connection(sock=sock.dup(), ssl=ours, server_hostname="127.0.0.1")
            writer.transport.pause_reading()
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: "has read nothing" in caplog.text)
            await until(lambda: not state.connections)
            writer.transport.abort()
        listener.close()

    run(scene(), seconds=30)
