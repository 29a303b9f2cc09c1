"""Sessions of ``/v1/realtime``: a router process between a client's WebSocket and a pretended engine's, over TCP."""

import asyncio
import json
import re
import socket
import ssl
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime

import httpx
import psutil
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from pdrelay_proxy.app import build
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.settings import Settings
from support.certificates import Authority
from support.raw_http import Over, RawClient
from support.realtime_engine import HELLO, RealtimeEngine, echo
from support.router_process import KEY, RouterProcess
from support.sim import until_async

UPDATE = json.dumps({"type": "session.update", "model": "m"})
OFFER = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
GET = "GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\n"


class Stage:
    """A router process and its engines."""

    def __init__(self, process, engines):
        self.process, self.engines, self.engine = process, engines, engines[0]
        self.port = int(process.url.rpartition(":")[2])

    def connect(self, query="", scheme="ws", **options):
        options = {"proxy": None, "ping_interval": None, "compression": None, "max_size": None, **options}
        return connect(f"{scheme}://127.0.0.1:{self.port}/v1/realtime{query}", **options)

    async def refusal(self, query="", **options):
        """Return the answer to an offer that is refused."""
        with pytest.raises(InvalidStatus) as caught:
            async with self.connect(query, **options):
                pass
        return caught.value.response

    async def metric(self, name):
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.process.url}/metrics")).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def ended(self, outcome):
        return await self.metric(f'pdrelay_realtime_sessions_total{{outcome="{outcome}"}}')

    async def until_over(self):
        await self.until_open(0)

    async def until_open(self, count):
        deadline = time.monotonic() + 20
        while (found := await self.metric("pdrelay_realtime_sessions_open")) != count:
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)

    @property
    def lines(self):
        return [line for line in self.process.said.splitlines() if "path=/v1/realtime" in line]


@asynccontextmanager
async def staged(folder, *flags, engines=1, realtime="true", tail=(), status=None, scheme="", **options):
    made = [RealtimeEngine(status=status) for _ in range(engines)]
    async with made[0].running(**options), made[-1].running(**options) if engines > 1 else asynccontextmanager(_none)():
        addresses = [scheme + one.address for one in made] + list(tail)
        decode = [word for one in addresses for word in ("--decode", one)]
        router = RouterProcess(
            folder / "router.log", *decode, "--realtime", realtime, "--health-check-interval", "0", *flags
        )
        try:
            await asyncio.to_thread(router.started)
            yield Stage(router, made)
            assert "Traceback" not in router.said, router.said
        finally:
            router.kill()


def opened(client):
    """Open a session byte by byte; the greeting of the engine is read."""
    client.send((GET + OFFER + "\r\n").encode())
    assert client.incoming.until(b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")
    client.incoming.exactly(2 + len(json.dumps(HELLO)))
    return client


async def talk(session):
    """Say something every fifth of a second, to the end; raises ConnectionClosed."""
    while True:
        await session.send("x")
        await session.recv()
        await asyncio.sleep(0.2)


async def ping(session):
    """Show life without a message, to the end; raises ConnectionClosed."""
    while True:
        await session.ping()
        await asyncio.sleep(0.1)


async def _none():
    yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory):
    async with staged(tmp_path_factory.mktemp("realtime")) as made:
        yield made


pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def fresh(request):
    """The engine that tests share begins each of them as a new one, without a session of the one before."""
    if "stage" not in request.fixturenames:
        yield
        return
    made = request.getfixturevalue("stage")
    made.engine.behave = echo
    for kept in (made.engine.heads, made.engine.paths, made.engine.closed):
        kept.clear()
    yield
    made.engine.drop()
    await made.until_over()
    await until_async(lambda: not made.engine.open)


# What goes through


async def test_messages_go_both_ways_as_they_came(stage):
    """Text as text, bytes as bytes, empty ones, and in order; the engine's greeting comes first."""
    said = [UPDATE, b"\x00\xff" * 10, "", b"", "\u00e9\U0001f600", "x" * 300_000]
    async with stage.connect("?model=m") as session:
        assert json.loads(await session.recv()) == HELLO
        for message in said:
            await session.send(message)
        assert [await session.recv() for _ in said] == said
        await session.send(["a", "b", "c"])  # fragments of one message
        assert await session.recv() == "abc"

    assert stage.engine.paths == ["/v1/realtime"]


async def test_operators_see_when_a_session_began_and_what_it_waited_for(stage):
    """As of any other request; the time until the engine agreed is its leg's."""
    before = datetime.now(UTC).timestamp()
    async with stage.connect() as session:
        name = session.response.headers["x-request-id"]
    await stage.until_over()
    after = datetime.now(UTC).timestamp()
    async with httpx.AsyncClient() as client:
        found = (await client.get(f"{stage.process.url}/requests/{name}", headers=KEY)).json()

    (told,) = found["requests"]
    assert before - 0.01 <= told["began_at"] <= after + 0.01  # the machine's clock is corrected at times
    whole_ms, rows = (after - before) * 1000 + 10, told["rows"]
    assert rows
    assert all(0 <= row["begin_ms"] <= row["begin_ms"] + row["duration_ms"] <= whole_ms for row in rows), rows


async def test_the_engine_sees_our_id_and_no_key(stage):
    """And nothing of a browser."""
    headers = {
        "Authorization": "Bearer secret", "X-Api-Key": "secret", "Cookie": "a=secret", "X-Request-Id": "mine",
        "traceparent": "00-1-2-00",
    }  # fmt: skip
    async with stage.connect(additional_headers=headers) as session:
        await session.recv()
        answered = session.response.headers

    (head,) = stage.engine.heads
    assert "secret" not in json.dumps(head)
    assert head["x-request-id"] == answered["x-pdrelay-request-id"] != "mine"
    assert answered["x-request-id"] == "mine"
    assert head["traceparent"] == "00-1-2-00"
    assert "sec-websocket-extensions" not in head


async def test_the_codes_of_both_ends_reach_the_other_end(stage):
    """As far as a close frame may have them."""
    async with stage.connect() as session:
        await session.close(4001, "enough")
    await until_async(lambda: stage.engine.closed)

    assert stage.engine.closed == [(4001, "enough")]

    async def hangs_up(session):
        await session.close(1000, "all said")

    stage.engine.behave = hangs_up
    async with stage.connect() as session:
        await session.recv()
        with pytest.raises(ConnectionClosed) as caught:
            await session.recv()
    assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1000, "all said")


async def test_an_engine_that_fails_is_named_as_such(stage):
    """1011, with a reason, whether it broke off or said so."""

    async def breaks_off(session):
        await session.recv()
        session.transport.abort()

    async def says_so(session):
        await session.recv()
        await session.close(1011, "out of memory at 10.0.0.7")

    before = await stage.ended("engine_failed")
    for behave in (breaks_off, says_so):
        stage.engine.behave = behave
        async with stage.connect() as session:
            await session.recv()
            await session.send("go")
            with pytest.raises(ConnectionClosed) as caught:
                await session.recv()
        assert caught.value.rcvd.code == 1011
        assert "the engine has" in caught.value.rcvd.reason
        assert "10.0.0.7" not in caught.value.rcvd.reason
    await stage.until_over()

    assert await stage.ended("engine_failed") == before + 2


async def test_a_client_that_is_gone_ends_the_session_at_the_engine(stage):
    """Without a close frame, as when its machine dies."""
    before = await stage.ended("client_disconnected")
    session = await stage.connect()
    await session.recv()
    session.transport.abort()
    await until_async(lambda: stage.engine.closed)
    await stage.until_over()

    assert stage.engine.closed == [(1001, "")]
    assert await stage.ended("client_disconnected") == before + 1
    assert " status=499 " in stage.lines[-1]


async def test_a_session_is_counted_while_it_is_open_and_has_one_line(stage):
    """As load at its engine, too."""
    before = len(stage.lines)
    async with stage.connect("?model=m") as session:
        await session.recv()
        assert await stage.metric("pdrelay_realtime_sessions_open") == 1
        assert await stage.metric('pdrelay_legs_in_flight{instance="decode-0",role="decode"}') == 1
    await stage.until_over()

    assert await stage.metric('pdrelay_legs_in_flight{instance="decode-0",role="decode"}') == 0
    (line,) = stage.lines[before:]
    assert "decode=decode-0 status=101" in line
    assert "model=m" not in stage.process.said


# Slow sides


async def at_rest(count, *, most):
    """Return a count once it has not changed for a second, or when it has reached ``most``."""
    seen = -1
    while seen != count() < most:
        seen = count()
        await asyncio.sleep(1)
    return count()


async def test_a_client_that_does_not_read_holds_up_the_engine(stage):
    """Or the router would keep what the engine says."""
    sent = 0

    async def floods(session):
        nonlocal sent
        while True:
            await session.send(b"x" * 100_000)
            sent += 1

    stage.engine.behave = floods
    session = await stage.connect(max_queue=1)

    assert await at_rest(lambda: sent, most=200) < 200  # 20 MB: what four kernels' buffers may take
    session.transport.abort()


async def test_an_engine_that_does_not_read_holds_up_the_client(stage):
    """Or the router would keep what the client says."""

    async def reads_nothing(session):
        session.transport.pause_reading()
        await session.wait_closed()

    stage.engine.behave = reads_nothing
    session = await stage.connect(write_limit=1)
    sent = 0

    async def flood():
        nonlocal sent
        while True:
            await session.send(b"x" * 100_000)
            sent += 1

    task = asyncio.ensure_future(flood())

    assert await at_rest(lambda: sent, most=200) < 200
    task.cancel()
    session.transport.abort()


async def test_pings_without_an_end_are_not_answered_without_one(stage):
    """Each would wait in memory for a client that does not read."""
    with RawClient(stage.port) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(opened, client)
        client.sock.setblocking(False)
        pings, sent = (b"\x89\xfd" + b"\0" * 129) * 500, 0
        began = moved = time.monotonic()
        while time.monotonic() - moved < 1:  # until nothing is taken any more
            try:
                sent += client.sock.send(pings[sent % len(pings) :])
                moved = time.monotonic()
            except ConnectionError:  # there were too many of them
                break
            except BlockingIOError:
                await asyncio.sleep(0.01)
            assert time.monotonic() - began < 60, sent


# Limits


async def test_a_large_message_ends_the_session(stage):
    """1009, and the engine does not hear of it."""
    before = await stage.ended("too_large")
    async with stage.connect() as session:
        await session.recv()
        await session.send(b"x" * (1 << 20))
        assert len(await session.recv()) == 1 << 20
        await session.send(b"x" * ((1 << 20) + 1))
        with pytest.raises(ConnectionClosed) as caught:
            await session.recv()
    await stage.until_over()

    assert caught.value.rcvd.code == 1009
    assert await stage.ended("too_large") == before + 1
    assert stage.engine.closed == [(1001, "")]


async def test_an_engines_large_message_is_its_failure(stage):
    """The client gets none of it."""

    async def floods(session):
        await session.send(b"x" * ((1 << 20) + 1))
        await session.wait_closed()

    stage.engine.behave = floods
    async with stage.connect() as session:
        await session.recv()
        with pytest.raises(ConnectionClosed) as caught:
            await session.recv()

    assert caught.value.rcvd.code == 1011


async def test_a_message_of_too_many_fragments_ends_the_session(stage):
    """Of which any number of small ones is within the size."""
    with RawClient(stage.port) as client:
        await asyncio.to_thread(opened, client)
        client.send(b"\x02\x80" + b"\0" * 4, (b"\x00\x81" + b"\0" * 5) * 5000)
        found = await asyncio.to_thread(client.incoming.exactly, 4)

    assert found[:1] + found[2:] == b"\x88" + (1009).to_bytes(2, "big")


async def test_too_many_messages_at_once_end_the_session(stage):
    """A small one costs a client seven bytes, and the router hundreds until the engine has it."""

    async def reads_nothing(session):
        session.transport.pause_reading()
        await session.wait_closed()

    stage.engine.behave = reads_nothing
    with RawClient(stage.port) as client:
        await asyncio.to_thread(opened, client)
        client.send((b"\x82\x81" + b"\0" * 5) * 200_000)
        found = await asyncio.to_thread(client.incoming.exactly, 4)

    assert found[:1] + found[2:] == b"\x88" + (1009).to_bytes(2, "big")


EMPTY = {"pings": b"\x89", "pongs": b"\x8a", "texts": b"\x81", "messages": b"\x82"}


@pytest.mark.parametrize("kind", EMPTY)
async def test_frames_that_carry_nothing_end_the_session(stage, kind):
    """Six bytes each: 3.7 MB of them took seconds, in which the router did nothing else."""
    with RawClient(stage.port) as client:
        await asyncio.to_thread(opened, client)
        with suppress(ConnectionError):
            client.send((EMPTY[kind] + b"\x80" + b"\0" * 4) * 600_000)
        received = await asyncio.to_thread(client.rest)

    assert b"\x88" in received
    assert (1008).to_bytes(2, "big") + b"too many frames carry nothing" in received


async def test_an_engine_that_sends_frames_that_carry_nothing_is_hung_up_on(stage):
    """It is told so with 1008, and the client that the engine has failed."""

    async def pings(session):
        session.transport.write(b"\x89\x00" * 600_000)
        await session.wait_closed()

    stage.engine.behave = pings
    async with stage.connect() as session:
        while not session.close_code:
            with suppress(ConnectionClosed):
                await session.recv()

    assert session.close_code == 1011


async def test_times_of_a_session(tmp_path):
    """Idle ones, and all of them in the end; what is said counts, pings do not."""
    flags = ("--realtime-timeout", "4", "--realtime-max-sessions", "1")
    async with staged(tmp_path, *flags) as stage:
        async with stage.connect() as session:
            await session.recv()
            refused = await stage.refusal()
            with pytest.raises(ConnectionClosed) as overdue:
                await talk(session)
        await stage.until_over()  # the client sees the end a moment before its place is free
        assert await stage.ended("timeout") == await stage.ended("refused") == 1
    async with staged(tmp_path, "--realtime-idle-timeout", "1", "--realtime-timeout", "30") as stage:
        async with stage.connect() as session:
            with pytest.raises(ConnectionClosed) as idle:
                await ping(session)
        await stage.until_over()
        assert await stage.ended("idle") == 1

    assert (idle.value.rcvd.code, overdue.value.rcvd.code) == (1008, 1008)
    assert "no message came through for 1 s" in idle.value.rcvd.reason
    assert "4 s" in overdue.value.rcvd.reason
    assert refused.status_code == 503
    assert b"realtime_max_sessions" in refused.body


@pytest.mark.slow  # the grace lasts seconds
async def test_a_client_that_ignores_the_end_is_cut_off(tmp_path):
    """It reads nothing, so no close frame arrives: the connection must not stay."""
    # Within this time the engine has to greet, and a busy machine may keep it from that.
    async with staged(tmp_path, "--realtime-idle-timeout", "4", "--max-connections", "2") as stage:

        async def floods(session):
            while True:
                await session.send(b"x" * 100_000)

        stage.engine.behave = floods
        with RawClient(stage.port, timeout=60) as client:
            await asyncio.to_thread(opened, client)
            await stage.until_over()
            ours = client.sock.getsockname()[1]

            def is_there():
                found = psutil.Process(stage.process.child.pid).net_connections()
                return any(one.raddr and one.raddr.port == ours for one in found)

            assert is_there()
            await until_async(lambda: not is_there())


# The end of the router


async def test_a_router_that_ends_says_so(tmp_path):
    """1012 when its time is over; new sessions are refused from the beginning."""
    # Within this time the new session is refused, and the old one goes on: also where the machine is busy.
    async with staged(tmp_path, "--shutdown-timeout", "6") as stage, stage.connect() as session:
        await session.recv()
        stage.process.terminate()
        await until_async(lambda: "refusing new requests" in stage.process.said)
        refused = await stage.refusal()
        await session.send("still there")
        assert await session.recv() == "still there"
        with pytest.raises(ConnectionClosed) as caught:
            await session.recv()
        await asyncio.to_thread(stage.process.child.wait, 20)
        await until_async(lambda: stage.engine.closed)

        assert refused.status_code == 503
        assert caught.value.rcvd.code == 1012
        assert stage.process.child.returncode == 0


# Who may come


async def test_keys_are_wanted_before_the_upgrade(tmp_path):
    """401; the pool's key is shown to the engine, not the client's."""
    (tmp_path / "keys").write_text("ann:open-sesame-0001\n")
    (tmp_path / "pool").write_text("of-the-pool\n")
    flags = ("--api-keys-file", str(tmp_path / "keys"), "--decode-api-key-file", str(tmp_path / "pool"))
    async with staged(tmp_path, *flags, "--public-metrics", "true", "--max-key-concurrency", "1") as stage:
        none = await stage.refusal()
        wrong = await stage.refusal(additional_headers={"Authorization": "Bearer no"})
        async with stage.connect(additional_headers={"Authorization": "Bearer open-sesame-0001"}) as session:
            await session.recv()
            another = await stage.refusal(additional_headers={"X-Api-Key": "open-sesame-0001"})

        assert (none.status_code, wrong.status_code, another.status_code) == (401, 401, 429)
        assert none.headers["www-authenticate"] == "Bearer"
        assert json.loads(none.body)["error"]["type"] == "AuthenticationError"
        (head,) = stage.engine.heads
        assert head["authorization"] == "Bearer of-the-pool"


async def test_a_clients_key_is_forwarded_where_the_setting_says_so(tmp_path):
    """To engines whose pool has none."""
    async with staged(tmp_path, "--forward-client-key", "true") as stage:
        async with stage.connect(additional_headers={"Authorization": "Bearer mine"}) as session:
            await session.recv()

        assert stage.engine.heads[0]["authorization"] == "Bearer mine"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "evil.example"}, 421),
    ],
)
async def test_a_page_of_another_site_opens_no_session(stage, headers, status):
    """A browser lets any page open a WebSocket to any address, and names the page in Origin."""
    given = dict(headers)
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    get = GET if "Host" not in given else "GET /v1/realtime HTTP/1.1\r\n"
    with RawClient(stage.port) as client:
        answer = await asyncio.to_thread(lambda: client.send((get + lines + OFFER + "\r\n").encode()).answer())

    assert answer.status == status
    assert not stage.engine.heads


async def test_an_engine_without_sessions_is_not_blamed(tmp_path):
    """Or anybody could have all decode engines ejected."""
    async with staged(tmp_path, status=403) as stage:
        for _ in range(12):
            refused = await stage.refusal()

        assert refused.status_code == 501
        assert b"does not serve /v1/realtime" in refused.body
        assert await stage.metric('pdrelay_instance_state{instance="decode-0",role="decode",state="ejected"}') == 0


async def test_an_engine_that_cannot_be_reached_is_passed_over(tmp_path):
    """Sessions go to the others, and it is counted."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with staged(tmp_path, tail=(f"127.0.0.1:{nobody.getsockname()[1]}",)) as stage:
            for _ in range(4):
                async with stage.connect() as session:
                    await session.recv()
            await stage.until_over()

            assert await stage.metric('pdrelay_retries_total{reason="unreachable",role="decode"}') >= 1


async def test_sessions_go_over_tls_on_both_sides(tmp_path):
    """The connection keeps its encryption when it leaves HTTP; an engine's certificate is checked."""
    authority = Authority(tmp_path, "ca")
    ours, theirs = authority.sign("router"), authority.sign("engine")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(theirs.cert, theirs.key)
    trusting = ssl.create_default_context(cafile=authority.own.cert)
    flags = ("--tls-cert", ours.cert, "--tls-key", ours.key)
    async with (
        staged(tmp_path, *flags, "--engine-ca", authority.own.cert, scheme="https://", ssl=serving) as stage,
        stage.connect(scheme="wss", ssl=trusting) as session,
    ):
        assert json.loads(await session.recv()) == HELLO
        await session.send("x" * 200_000)
        assert len(await session.recv()) == 200_000
    async with staged(tmp_path, *flags, scheme="https://", ssl=serving) as stage:
        assert (await stage.refusal(scheme="wss", ssl=trusting)).status_code == 502


async def test_sessions_go_to_engines_by_the_name_of_all(tmp_path):
    """Pods have addresses that no certificate names; one without the name gets no session, and it is counted."""
    authority = Authority(tmp_path, "ca")
    for shown, wanted in (("DNS:engines.llm.svc", True), ("DNS:stranger.llm.svc", False)):
        theirs = authority.sign("engine", shown)
        serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        serving.load_cert_chain(theirs.cert, theirs.key)
        flags = ("--engine-ca", authority.own.cert, "--engine-server-name", "engines.llm.svc")
        async with staged(tmp_path, *flags, scheme="https://", ssl=serving) as stage:
            if wanted:
                async with stage.connect() as session:
                    assert json.loads(await session.recv()) == HELLO
                continue
            refused = await stage.refusal()
            assert refused.status_code == 502
            assert b"decode-0 shows a certificate that is not for engines.llm.svc" in refused.body
            assert await stage.metric('pdrelay_engine_tls_failures_total{instance="decode-0",reason="wrong_name"}') >= 1


async def test_workers_share_the_sessions(tmp_path):
    """Each counts its own, and any of them shows all."""
    async with staged(tmp_path, "--workers", "2") as stage, AsyncExitStack() as opened:
        sessions = [await opened.enter_async_context(stage.connect()) for _ in range(8)]
        for session in sessions:
            await session.recv()
        await stage.until_open(8)  # without those of a worker that does not tell them within half a second


# Smuggling


@pytest.mark.parametrize(
    "head",
    [
        GET.replace("realtime", "realtime/"),
        GET.replace("/v1/realtime", "/v1/%72ealtime"),
        GET.replace("/v1/realtime", "http://localhost/v1/realtime"),
        GET.replace("/v1/realtime", "//v1/realtime"),
        GET.replace("/v1/realtime", "/health"),
        GET.replace("/v1/realtime", "/sleep"),
        GET.replace("/v1/realtime", "/instances"),
        GET.replace("GET", "POST"),
        GET.replace("GET", "HEAD"),
        GET.replace("1.1", "1.0"),
        GET + "Content-Length: 5\r\n",
        GET + "Transfer-Encoding: chunked\r\n",
    ],
)
async def test_only_a_plain_offer_leaves_http(stage, head):
    """Everything else is served as HTTP, and the connection goes on with it."""
    body = {"Content": b"01234", "Transfer": b"0\r\n\r\n"}
    sent = (head + OFFER + "\r\n").encode()
    for word, piece in body.items():
        if word in head:
            sent += piece
    with RawClient(stage.port) as client:
        answer = await asyncio.to_thread(lambda: client.send(sent + b"\r\n"[:0]).incoming.until(b"\r\n"))

    assert b" 101 " not in answer
    assert not stage.engine.heads


@pytest.mark.parametrize(
    "lines",
    [
        OFFER.replace("Connection: Upgrade\r\n", ""),
        OFFER.replace("Upgrade: websocket", "Upgrade: h2c"),
        OFFER.replace("Upgrade: websocket", "Upgrade: websocket, h2c"),
        OFFER.replace("Key: AAAAAAAAAAAAAAAAAAAAAA==", "Key: x"),
        OFFER.replace("Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n", ""),
        OFFER.replace("Version: 13", "Version: 8"),
        OFFER + "X: " + "y" * 9000 + "\r\n",
        OFFER + "X: y\r\n" * 200,
    ],
    ids=["no connection", "h2c", "two", "key", "no key", "version", "long", "many"],
)
async def test_an_offer_that_is_not_quite_one_is_refused(stage, lines):
    """With an answer, and at once."""
    with RawClient(stage.port, timeout=5) as client:
        answer = await asyncio.to_thread(lambda: client.send((GET + lines + "\r\n").encode()).incoming.until(b"\r\n"))

    assert re.match(rb"HTTP/1.1 4\d\d ", answer)
    assert not stage.engine.heads


async def test_bytes_behind_an_offer_are_refused(stage):
    """A proxy in front could take them for a request, and its answer for another one's."""
    hidden = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with RawClient(stage.port) as client:
        (answer,) = await asyncio.to_thread(lambda: client.send((GET + OFFER + "\r\n").encode() + hidden).answers())

    assert answer.status == 400
    assert not stage.engine.heads


async def test_http_behind_an_upgrade_is_no_request(stage):
    """The connection is a WebSocket then: what is no frame ends it, with 1002."""
    with RawClient(stage.port) as client:
        await asyncio.to_thread(opened, client)
        client.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = await asyncio.to_thread(client.incoming.exactly, 4)

    assert found[:1] + found[2:] == b"\x88" + (1002).to_bytes(2, "big")


async def test_an_upgrade_after_requests_on_the_same_connection(stage):
    """And its timers of idle connections are gone with it."""
    with RawClient(stage.port) as client:
        client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.answer().status in (200, 503)
        await asyncio.to_thread(opened, client)


async def test_an_offer_that_comes_in_two_pieces_becomes_a_session_that_lasts(tmp_path):
    """The time for the head of a request ends with the head."""

    async def in_two_pieces(client):
        client.send(GET.encode())
        await stage.metric("pdrelay_realtime_sessions_open")  # the router has read the first piece meanwhile
        client.send((OFFER + "\r\n").encode())
        return await asyncio.to_thread(client.incoming.until, b"\r\n\r\n")

    async with staged(tmp_path, "--head-timeout", "2") as stage:
        for _ in range(20):
            with RawClient(stage.port) as client:
                try:
                    answer = await in_two_pieces(client)
                except (Over, httpx.TransportError):  # this machine is busy, and the head took longer than two seconds
                    continue
                assert answer.startswith(b"HTTP/1.1 101 ")
                await asyncio.to_thread(client.incoming.exactly, 2 + len(json.dumps(HELLO)))

                client.sock.settimeout(4)
                with pytest.raises(TimeoutError):  # neither a frame nor an end
                    await asyncio.to_thread(client.incoming.exactly, 1)
                return
    raise AssertionError("this machine is too busy to send anything in time")


async def test_connections_are_counted_across_the_upgrade(tmp_path):
    """Each holds its place for as long as it is open, and gives it back once."""
    async with staged(tmp_path, "--max-connections", "2") as stage:
        for _ in range(5):
            async with stage.connect() as session:
                await session.recv()
                assert await stage.metric("pdrelay_realtime_sessions_open") == 1
        await stage.until_over()

        assert await stage.metric("pdrelay_realtime_sessions_open") == 0


async def test_without_the_setting_there_is_no_such_path(tmp_path):
    """As before: the offer is ignored, and the path is a 404."""
    async with staged(tmp_path, realtime="false") as stage:
        refused = await stage.refusal()

        assert refused.status_code == 404
        assert not stage.engine.heads


async def test_a_missing_library_is_named(monkeypatch):
    """It is an extra, and only who wants sessions needs it."""
    for name in ("websockets.asyncio.client", "pdrelay_proxy.io.websocket"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "websockets.asyncio.client", None)

    with pytest.raises(ConfigError, match=r"websockets is not installed: pip install 'pdrelay\[realtime\]'"):
        build(Settings(realtime=True))
    build(Settings())


async def test_the_query_may_name_one_model(stage):
    """More would leave it open which engine is meant."""
    for query in ("?model=a&model=b", "?model=%ff", "?" + "a=b&" * 20, "?model=" + "x" * 5000):
        assert (await stage.refusal(query)).status_code == 400
