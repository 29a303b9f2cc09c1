"""Looking at one engine."""

import asyncio
import contextlib
import gzip
import socket

import httpx
import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.engine_metrics import Numbers
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.io.probes.checks import HttpChecks, ProbeFailed
from pdrelay_tools.simulated.engine import Sim
from support.wiring import run, until

pytestmark = pytest.mark.edges


D = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "secret.example", 80))
GOOD = {
    "/health": (200, ""),
    "/v1/models": (200, '{"data": [{"id": "lora", "parent": "m", "root": "/lora"}, {"id": "m", "root": "/m"}]}'),
    "/version": (200, '{"version": "0.32.0"}'),
}


def checks(answers, **options):
    """An engine that answers like this: a status and a body, an exception, or silence."""

    async def handle(request):
        answer = answers.get(request.url.path, (404, ""))
        if isinstance(answer, Exception):
            raise answer
        if answer == "silence":
            await asyncio.sleep(30)
        return httpx.Response(answer[0], text=answer[1])

    return HttpChecks(timeout_s=20, transport=httpx.MockTransport(handle), **options)


async def test_an_engine_that_lives_says_what_it_is():
    """Its models with their adapters, where its base model lies, and its version."""
    look = checks(GOOD)
    assert await look.probe(D) == EngineCapabilities(
        frozenset({"m", "lora"}), "0.32.0", adapters=frozenset({"lora"}), root="/m", files={"": "/m", "lora": "/lora"}
    )


async def test_a_look_that_is_not_whole_asks_one_question():
    """What the engine is stays what it was."""
    look = checks({"/health": (200, ""), "/v1/models": (500, "")})
    assert await look.probe(D, is_whole=False) == EngineCapabilities()


async def test_a_simulated_engine_lives():
    """The shapes are vLLM's."""
    look = HttpChecks(timeout_s=20, transport=httpx.ASGITransport(Sim("decode", model="m")))
    assert await look.probe(D) == EngineCapabilities(frozenset({"m"}), "0.32.0", adapters=frozenset())
    assert await look.numbers(D) == Numbers(EngineCapabilities(), kv_usage=0)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (
            {"/version": (404, "")},
            EngineCapabilities(
                frozenset({"m", "lora"}),
                adapters=frozenset({"lora"}),
                root="/m",
                files={"": "/m", "lora": "/lora"},
            ),
        ),
    ],
)
async def test_what_it_does_not_tell_is_unknown_and_no_illness(changes, facts):
    """An engine may lack a path."""
    look = checks(GOOD | changes)
    assert await look.probe(D) == facts


UNAUTHORIZED = {"/v1/models": (401, '{"error": "Unauthorized"}')}


@pytest.mark.parametrize("role", list(Role))
async def test_an_engine_that_wants_another_key_says_so_to_the_operator(role):
    """It would answer each client with 401, and clients would take their own keys for wrong."""
    engine = Instance(InstanceId(f"{role}-0"), role, D.address)
    shown = {"headers": lambda _: ((b"authorization", b"Bearer k"),)}
    for options in ({}, shown):
        with pytest.raises(
            ProbeFailed, match=rf"^wants another API key \(PDRELAY_{role.upper()}_API_KEY or "
        ) as caught:
            await checks(GOOD | UNAUTHORIZED, **options).probe(engine)
        assert not caught.value.silent


def caused_by(error):
    found = httpx.ConnectError("secret.example")
    found.__cause__ = ConnectionError("secret.example")
    found.__cause__.__context__ = error
    return found


@pytest.mark.parametrize(
    ("changes", "said", "silent"),
    [
        ({"/health": (401, "")}, "answers /health with status 401", False),
        ({"/health": (503, "")}, "answers /health with status 503", False),
        ({"/health": "silence"}, "does not answer /health within 20 s", True),
        ({"/health": httpx.ConnectError("secret.example")}, "cannot be reached: no connection was made", True),
        ({"/health": caused_by(socket.gaierror(-2, "secret"))}, "cannot be reached: its name does not resolve", True),
        (
            {"/health": caused_by(ConnectionRefusedError(111, "secret"))},
            "the connection is refused: nothing list",
            True,
        ),
        ({"/health": caused_by(OSError("Multiple exceptions: [Errno 111] a, [Errno 111] b"))}, "is refused", True),
        ({"/health": caused_by(OSError(113, "secret"))}, "cannot be reached: its network or host is unreach", True),
        ({"/health": caused_by(TimeoutError(110, "secret"))}, "cannot be reached: the connection timed out", True),
        ({"/health": httpx.ReadError("secret.example")}, "breaks off when asked for /health", True),
        ({"/v1/models": "silence"}, "does not answer /v1/models within 20 s", True),
        ({"/v1/models": (500, "")}, "answers /v1/models with status 500", False),
        ({"/v1/models": (200, "nonsense")}, "answers something else than vLLM does", False),
        ({"/version": (200, "[]")}, "answers something else than vLLM does", False),
        # what is kept of it would fill the log, and each list of engines
        ({"/version": (200, f'{{"version": "{"1" * 4097}"}}')}, "answers something else than vLLM does", False),
        ({"/v1/models": (200, f'{{"data": [{{"id": "{"m" * 4097}"}}]}}')}, "of length <= 4096 - at `$.data", False),
        ({"/v1/models": (200, '{"data": [' + '{"id": "m"},' * 65_536 + '{"id": "m"}]}')}, "of length <= 65536", False),
        ({"/v1/models": (200, "x" * (8 * 1024 * 1024 + 1))}, "answers /v1/models without end", False),
    ],
)
async def test_an_engine_that_does_not_live_is_sick_of_something(changes, said, silent):
    """In words without its address, for clients read them; and to answer badly is not to be silent."""
    look = checks(GOOD | changes)
    with pytest.raises(ProbeFailed) as caught:
        await look.probe(D)

    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.silent is silent


@pytest.mark.parametrize("status", [200, 503])
async def test_a_router_is_no_engine(status):
    """This very router or another: it would refuse each leg as if its client were to blame."""

    async def handle(request):
        return httpx.Response(status, headers={"x-pdrelay-version": "0.1.0"}, json={"status": "ok"})

    look = HttpChecks(timeout_s=20, transport=httpx.MockTransport(handle))
    with pytest.raises(ProbeFailed, match=r"^is a router, not an engine: ") as caught:
        await look.probe(D, is_whole=False)

    assert not caught.value.silent


async def test_an_engine_without_metrics_shows_nothing():
    """Then the drain goes by time."""
    look = checks(GOOD)
    assert await look.numbers(D) == Numbers(EngineCapabilities())


class Counted:
    """An engine over TCP that counts its connections."""

    def __init__(self):
        self.opened = self.asked = 0
        self.open = set()

    async def serve(self, reader, writer):
        self.opened += 1
        self.open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.asked += 1
                path = head.split()[1].decode()
                status, body = GOOD[path]
                writer.write(f"HTTP/1.1 {status} OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        self.open.discard(writer)
        writer.close()


def test_a_look_is_one_connection_that_ends_with_it():
    """Those of thousands of engines in one pool cost each look a search through all of them."""
    engine = Counted()

    async def scene():
        async with await asyncio.start_server(engine.serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            instance = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "127.0.0.1", port))
            look = HttpChecks(timeout_s=20)
            for _ in range(3):
                assert (await look.probe(instance)).version == "0.32.0"
                await until(lambda: not engine.open)

    run("asyncio", scene())  # over TCP, for which simulated time does not wait

    assert (engine.opened, engine.asked) == (3, 9)


async def test_probes_show_the_key_of_their_pool():
    """/v1/models is guarded like the rest."""
    seen = []

    async def handle(request):
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"data": [], "version": "1"})

    headers = {Role.DECODE: ((b"authorization", b"Bearer k"),)}
    look = HttpChecks(timeout_s=20, headers=headers.__getitem__, transport=httpx.MockTransport(handle))
    await look.probe(D)

    assert set(seen) == {"Bearer k"}


async def test_a_packed_answer_is_refused_before_it_is_unpacked():
    """Nobody asked for it, and what comes out of a few kilobytes may be gigabytes."""
    packed = gzip.compress(b"0" * 4_000_000)
    asked = []

    async def handle(request):
        asked.append(request.headers["accept-encoding"])
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(packed))

    look = HttpChecks(timeout_s=20, transport=httpx.MockTransport(handle))
    with pytest.raises(ProbeFailed, match="answers /metrics with a content coding, and none was asked for"):
        await look.metrics(D)
    with pytest.raises(ProbeFailed, match="answers /health with a content coding"):
        await look.probe(D)

    assert asked == ["identity"] * 2
