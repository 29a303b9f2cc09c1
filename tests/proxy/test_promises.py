"""What a router owes its clients, its engines and its own memory.

tests/proxy/test_scenes.py plays random scenes; here are the cases in which a request easily goes wrong: when something
ends, hangs, is raised or is cut off in between.
"""

import asyncio
import gc
import json
import logging
import re
import socket
import ssl
import time
import tracemalloc
from contextlib import asynccontextmanager, contextmanager

import pytest

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.model import GenerationRequest, Role
from pdrelay_proxy.io.log_formats import FACTS
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.requests.response import HttpResponse
from support.certificates import Authority
from support.reciting import Act, End, good, reciting, whole
from support.router_process import router_processes
from support.scenes import answer, post, routing, run, text
from support.sim import until_async as until

pytestmark = pytest.mark.processes


RESUMING = pytest.mark.parametrize("options", [{}, {"resume_streams": True}], ids=["as it is", "resuming"])
ONE_EACH = {"prefill": (True,), "decode": (True,)}
JSON = b"Content-Type: application/json"
EVENT = b'data: {"choices":[{"text":"one"}]}\n\n'
BEGUN = b"HTTP/1.1 200 Said\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SILENT = Act(((30.0, b""),))
PATIENCE_S = 10.0


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def asks(**fields):
    """Return a request as most clients send it."""
    return post(text(**fields), JSON)


class Stage:
    """A router, its engines, and clients."""

    def __init__(self, cast, served):
        self.cast = cast
        self.port = served.port
        self.settled = served.settled
        self.held = served.held
        self.router, self.state = served.router, served.state
        self._writers = []

    async def client(self, limit=2**24, sock=None):
        where = {"sock": sock} if sock else {"host": "127.0.0.1", "port": self.port}
        reader, writer = await asyncio.open_connection(limit=limit, **where)
        self._writers.append(writer)
        return reader, writer

    async def ask(self, request):
        """Send one request, over a connection of its own, and return what comes."""
        reader, writer = await self.client()
        writer.write(request)
        try:
            return await asyncio.wait_for(answer(reader), PATIENCE_S)
        finally:
            writer.transport.abort()

    async def metric(self, name):
        """Return the sum of a metric's samples."""
        got = await self.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", got.body.decode(), re.M))

    def served(self, role):
        """How many requests engines of a role have got."""
        return sum(heard.engine.startswith(role) for heard in self.cast.heard)

    def connections(self, role):
        """How many connections engines of a role have."""
        return self.cast.connections(role)

    def members(self):
        return [self.router.live.registry.get(one.id) for role in Role for one in self.router.live.registry.known(role)]

    async def ready(self):
        """Have each engine serve a request: only then is one that fails broken, and does not just join later."""
        assert (await self.ask(asks())).status == 200
        await until(lambda: {member.life.state for member in self.members()} == {HealthState.HEALTHY})

    def close(self):
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def staged(acts=None, up=ONE_EACH, *, patience=None, **settings):
    """A router in front of engines that recite."""
    acts = {"prefill": (), "decode": ()} | (acts or {})
    async with reciting(acts, up) as cast, routing(cast, settings, time.monotonic, **(patience or {})) as served:
        stage = Stage(cast, served)
        try:
            yield stage
        finally:
            stage.close()


def play(scene):
    """Run a scene in a loop like that of the process."""
    return run(scene, seconds=4 * PATIENCE_S)


@pytest.fixture
def log(caplog):
    """What the router says."""
    caplog.set_level(logging.INFO, "pdrelay_proxy")
    caplog.set_level(logging.INFO, "pdrelay.access")
    return caplog


def lines(log):
    """Return what its lines about requests say."""
    return [getattr(record, FACTS) for record in log.records if hasattr(record, FACTS)]


def errors(log):
    return [record for record in log.records if record.levelno >= logging.ERROR]


@contextmanager
def no_collector():
    """What is let go of must go without the garbage collector: it comes late where there is little to collect."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


PARTS = (
    "GuardedProtocol",
    "AsgiExchange",
    "Request",
    "HttpResponse",
    "RequestRecord",
    "RequestPlan",
    "GenerationRequest",
)  # of a request
PARTS += ("PrefillLeg", "DecodeLeg")


def alive(*kinds):
    return sum(type(one) in kinds for one in gc.get_objects())


# The client's side


@pytest.mark.parametrize("rest_comes_late", [False, True], ids=["pipelined", "half received"])
def test_an_answer_under_way_is_not_cut_by_the_keep_alive_timer(rest_comes_late):
    """The timer began with an answer before; the request behind another one is no idle connection."""
    after_a_while = Act(((0.05, good("decode", b"")),))
    stream = Act(((0.0, BEGUN), *[(0.05, chunk(EVENT))] * 12, (0.0, DONE)))

    async def scene():
        acts = {"decode": (Act(((0.0, good("decode", b"")),)), after_a_while, stream)}
        async with staged(acts, patience={"keepalive_s": 0.5}) as stage:
            reader, writer = await stage.client()
            writer.write(asks())
            await answer(reader)
            second = asks(stream=True)
            kept_back = len(second) - 20 if rest_comes_late else 0
            writer.write(asks() + second[: len(second) - kept_back])
            assert (await answer(reader)).status == 200
            writer.write(second[len(second) - kept_back :])
            return await answer(reader)

    got = play(scene())

    assert (got.status, got.end, got.body.count(EVENT)) == (200, "kept", 12)
    assert b"[DONE]" in got.body


@RESUMING
def test_a_client_that_reads_nothing_does_not_make_the_router_grow(options):
    """No more than an answer waits for it, whatever it asks for; when it reads at last it gets all of them."""
    size = 1_000_000
    big = Act(((0.0, whole(b'{"choices":[],"text":"' + b"y" * size + b'"}')),))

    async def scene():
        async with staged({"decode": (big,) * 40}, **options) as stage:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", stage.port))
            reader, writer = await stage.client(limit=4096, sock=sock)
            (connection,) = stage.state.connections
            sent, more = 0, 6
            while sent < 40 and not connection.flow.write_paused:
                writer.write(asks())
                sent += 1
                await until(lambda count=sent: stage.served("decode") == count)
                await until(lambda: connection.exchange.response_complete or connection.flow.write_paused)
            for _ in range(more):
                writer.write(asks())
                await stage.ask(asks())  # by the time that another client has its answer
                await stage.ask(asks())
            unread = connection.transport.get_write_buffer_size()
            whole_ones = [(await answer(reader)).status for _ in range(sent + more)]
            return sent, unread, whole_ones

    sent, unread, whole_ones = play(scene())

    assert sent < 40
    assert unread < 3 * size
    assert set(whole_ones) == {200}


def test_a_connection_over_tls_says_at_any_time_whether_its_answer_is_read(tmp_path):
    """A router that ends asks each; uvloop takes its socket away before it says that the connection is lost."""
    authority = Authority(tmp_path, "ca")
    pair = authority.sign("router")
    trust = ssl.create_default_context(cafile=authority.own.cert)

    async def scene():
        loop = asyncio.get_running_loop()
        seen = set()

        def ask_all(state):
            seen.update(connection.is_unread() for connection in tuple(state.connections))
            asking[0] = loop.call_soon(ask_all, state)

        async with staged(tls_cert=pair.cert, tls_key=pair.key) as stage:
            asking = [loop.call_soon(ask_all, stage.state)]
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", stage.port, ssl=trust)
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await answer(reader)).status == 200
                writer.close()
                await until(lambda: not stage.state.connections)
            asking[0].cancel()
        return seen

    errors = []

    async def watched():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        return await scene()

    assert False in play(watched())
    assert errors == []


def test_a_client_without_a_key_learns_so_before_its_long_body_is_read(tmp_path):
    """Nobody who may not come in makes the router hold 16 MiB."""
    keys = tmp_path / "some.keys"
    keys.write_text("alice:secret-key-0123456789abcdef\n")
    keys.chmod(0o600)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%b\r\nContent-Length: 10000000\r\n\r\n" % JSON

    async def scene():
        async with staged(api_keys_file=str(keys)) as stage:
            reader, writer = await stage.client()
            writer.write(head + b"x" * 100_000)  # and no more
            return await asyncio.wait_for(reader.readuntil(b"\r\n"), PATIENCE_S)

    assert play(scene()).startswith(b"HTTP/1.1 401 ")


# Our own faults


class Boom(Exception):
    """Something that never should be raised."""


REQUEST, RESPONSE = "pdrelay_proxy.requests.request", "pdrelay_proxy.requests.response.HttpResponse"
BREAKABLE = ["pdrelay_proxy.requests.dispatch.decode_body"]
BREAKABLE += [f"pdrelay_proxy.requests.{name}" for name in ("leg_sending.prefill_body", "attempt_legs.prompt_tokens")]
BREAKABLE += ["pdrelay_proxy.requests.legs.prompt_tokens_in"]
BREAKABLE += ["pdrelay_proxy.requests.leg_bodies.LegBodies.read_handover", f"{RESPONSE}.begin", f"{RESPONSE}.write"]


def boom(*_args, **_options):
    raise Boom("a fault of our own")


def boom_once(patch, broken):
    """Break something for one call: the error is told by the same."""
    good = getattr(HttpResponse, broken.rpartition(".")[2])

    def first(*args, **options):
        patch.setattr(broken, good)
        boom()

    patch.setattr(broken, first)


@pytest.mark.parametrize("broken", BREAKABLE, ids=lambda name: name.rpartition(".")[2])
def test_a_fault_of_our_own_is_told_logged_and_costs_nothing_but_the_request(log, broken):
    """No ticket, slot or ride stays behind, and no engine is blamed: the next request is served by the same ones."""
    streams = broken.endswith((".write", "_in"))
    stream = Act(((0.0, BEGUN + chunk(EVENT)), (0.05, chunk(EVENT)), (0.0, DONE)))

    async def scene():
        async with staged(circuit_breaker_failures=1, retries=0) as stage:
            await stage.ready()
            stage.cast.acts["decode"] += [stream] if streams else []
            with pytest.MonkeyPatch.context() as patch:
                if broken.endswith(".begin"):
                    boom_once(patch, broken)
                else:
                    patch.setattr(broken, boom)
                got = await stage.ask(asks(stream=streams))
                await stage.settled()
            await until(lambda: not stage.state.connections)
            assert set(stage.held().values()) == {0}
            stage.cast.acts["decode"].clear()
            states = [member.life.state for member in stage.members()]
            return got, states, (await stage.ask(asks())).status

    got, states, after = play(scene())

    if broken.endswith(".write"):
        assert got.status == 200
        assert b'data: {"error"' in got.body
        assert b"[DONE]" not in got.body
    else:
        assert (got.status, json.loads(got.body)["error"]["code"]) == (500, 500)
    assert b"Boom" not in got.body
    assert b"our own" not in got.body
    assert "Boom: a fault of our own" in log.text
    assert len(errors(log)) == 1
    assert states == [HealthState.HEALTHY] * 2
    assert after == 200


@pytest.mark.parametrize("good", [True, False], ids=["an answer", "a refusal"])
def test_a_client_that_cannot_be_told_anything_is_hung_up_on(log, good):
    """The request is over all the same: nothing of it is held, and the log says why it has no answer."""

    async def scene():
        async with staged() as stage:
            reader, writer = await stage.client()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(f"{RESPONSE}.begin", boom)
                writer.write(asks() if good else post(text(), b"Content-Type: text/plain"))
                patch.setattr("pdrelay_proxy.api.guarded._LINGER_S", 0.2)  # it is told nothing, and could read why
                received = await asyncio.wait_for(reader.read(), PATIENCE_S)
            await until(lambda: not stage.state.connections)
            held = stage.held()
            return received, held, (await stage.ask(asks())).status

    received, held, after = play(scene())

    assert received == b""
    assert set(held.values()) == {0}
    assert after == 200
    assert "Boom: a fault of our own" in log.text
    assert [line["status"] for line in lines(log)] == [500, 200]


# What stays behind


SIZE = 3_000_000
BIG = Act(((0.0, whole(b'{"choices":[],"text":"' + b"y" * SIZE + b'"}')),))
REFUSED = Act(((0.0, whole(b'{"error":{"message":"no","code":400}}', status=400)),))


@pytest.mark.parametrize("status", [200, 400])
def test_an_idle_connection_keeps_neither_its_last_request_nor_the_answer(log, status):
    """A thousand idle clients would hold gigabytes."""

    async def scene():
        async with staged() as stage:
            reader, writer = await stage.client(limit=2**16)
            writer.write(asks())
            await answer(reader)
            await until(lambda: len(lines(log)) == 1)
            stage.cast.acts["decode"].append(BIG if status == 200 else REFUSED)
            request = asks(prompt="z" * SIZE)
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                writer.write(request)
                assert (await answer(reader)).status == status
                await until(lambda: len(lines(log)) == 2)
                stage.cast.heard.clear()
                return tracemalloc.get_traced_memory()[0] - before, alive(GenerationRequest)
            finally:
                tracemalloc.stop()

    with no_collector():
        before = alive(GenerationRequest)
        grown, after = play(scene())

    assert grown < SIZE // 3
    assert after == before


def token(text, number):
    """Return an event from which another engine can go on."""
    choice = {"index": 0, "text": text, "token_ids": [number], "prompt_token_ids": [1, 2]}
    return chunk(b"data: " + json.dumps({"id": "cmpl-2", "choices": [choice]}).encode() + b"\n\n")


@pytest.mark.parametrize("kind", [Request, GenerationRequest])
@pytest.mark.parametrize("again", [True, False], ids=["goes on", "breaks off again"])
def test_a_stream_that_was_resumed_leaves_no_circle(log, kind, again):
    """Its first failure leads to it, and it must not keep that."""
    broken = Act(((0.0, BEGUN + token("one", 5)), (0.003, b"")), End.RESET)
    rest = Act(((0.0, BEGUN + token("two", 6) + DONE),)) if again else broken

    async def scene():
        acts = {"decode": (broken, rest)}
        async with staged(acts, {"prefill": (True,), "decode": (True, True)}, resume_streams=True, retries=1) as stage:
            got = await stage.ask(asks(stream=True, temperature=0))
            await stage.settled()
            await until(lambda: not stage.state.connections and len(lines(log)) == 1)
            return got, alive(kind)

    with no_collector():
        before = alive(kind)
        got, after = play(scene())

    assert got.status == 200
    assert b'"one"' in got.body
    assert (b'"two"' in got.body, b'"error"' in got.body) == (again, not again)
    assert after == before


# What is counted, and written


def test_each_handoff_counts_however_the_decode_engine_answers():
    """The gap is over when the decode leg is sent."""

    async def scene():
        async with staged({"decode": (REFUSED, REFUSED)}) as stage:
            statuses = [(await stage.ask(asks())).status for _ in range(3)]
            await stage.settled()
            return statuses, await stage.metric("pdrelay_handoff_gap_seconds_count")

    assert play(scene()) == ([400, 400, 200], 3)


@pytest.mark.parametrize(("act", "stream", "counted"), [(None, True, 1), (None, False, 0), (REFUSED, True, 0)])
def test_only_a_good_stream_has_a_first_token(act, stream, counted):
    """A whole answer and an error come when they come."""

    async def scene():
        async with staged({"decode": () if act is None else (act,)}) as stage:
            status = (await stage.ask(asks(stream=stream))).status
            await stage.settled()
            return status, await stage.metric("pdrelay_time_to_first_token_seconds_count")

    assert play(scene()) == (200 if act is None else 400, counted)


def test_an_unknown_model_is_not_found_even_at_the_last_place_of_a_second():
    """It is looked at twice, and counts once."""

    async def scene():
        async with staged(max_rate=1.0) as stage:
            for member in stage.members():
                stage.router.live.registry.learn(member.instance.id, EngineCapabilities(models=frozenset({"known"})))
            statuses = [(await stage.ask(asks(model="unheard-of"))).status]
            await stage.settled()
            return [*statuses, (await stage.ask(asks(model="known"))).status]

    assert play(scene()) == [404, 503]


def test_a_router_that_ends_writes_a_line_for_each_request(tmp_path):
    """For those it cuts off, and for those of its last 20 ms, whose lines were kept for a moment."""
    stream = Act(((0.0, BEGUN + chunk(EVENT)), *SILENT.packets))

    async def scene():
        async with reciting({"prefill": (), "decode": (stream,)}, ONE_EACH) as cast:
            at = [f"--{role}={cast.at[role][0]}" for role in ("prefill", "decode")]
            with router_processes(tmp_path, 1, *at, "--health-check-interval", "0") as (process,):
                port = int(process.url.rpartition(":")[2])
                clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
                (streaming, first), (waiting, second), (done, third) = clients
                first.write(asks(stream=True))
                await streaming.readuntil(b"one")
                cast.acts["prefill"].append(SILENT)
                second.write(asks())
                await until(lambda: len(cast.heard) == 3)
                third.write(asks())
                assert (await answer(done)).status == 200
                process.terminate()
                await until(lambda: "refusing new requests; 2 in flight" in process.said)
                process.terminate()  # once more: now
                ends = (await streaming.read(), (await answer(waiting)).status)
                await until(lambda: process.child.poll() is not None)
                for _, writer in clients:
                    writer.transport.abort()
                return *ends, process.child.returncode, process.said

    rest, status, code, said = play(scene())

    assert b'data: {"error"' in rest
    assert (status, code) == (503, 0)
    assert sorted(re.findall(r"path=/v1/completions .* status=(\d+) ", said)) == ["200", "200", "503"]


def broken_off(after):
    """A decode engine that breaks off before its first event."""
    return Act(((after, b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"),), End.RESET)


@RESUMING
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_drain_that_looks_while_a_request_changes_hands_sees_it(options, role):
    """A leg has failed, and the request goes on another way: a router that is to end must not take it for done."""
    seen = []

    async def scene():
        async with staged(
            {role: (broken_off(0.0),)}, {"prefill": (True, True), "decode": (True, True)}, **options
        ) as stage:
            loop = asyncio.get_running_loop()
            lifetime = stage.router.lifetime
            over = []

            def look():
                seen.append(lifetime.in_flight)
                if not over:
                    loop.call_soon(look)

            look()
            got = await stage.ask(asks(stream=True))
            over.append(True)
        return got

    assert play(scene()).status == 200
    begun = seen[seen.index(1) :]
    assert 0 not in begun[: len(begun) - 1 - begun[::-1].index(1)], "for a moment nothing seemed to be in flight"
