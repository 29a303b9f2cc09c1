"""What the router's HTTP client makes of what an engine does, over real sockets, byte by byte, on both event loops."""

import asyncio
import contextlib
import gc
import gzip
import re
import socket
import ssl
import threading
import time
import tracemalloc
import weakref
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.keys import Outbound
from pdrelay_proxy.core.model import Instance, InstanceId, LegRequest, Role
from pdrelay_proxy.errors import EngineError, EngineTimeout
from pdrelay_proxy.io.wire import WireEngines
from pdrelay_proxy.io.wire.engine_tls import EngineTls
from pdrelay_proxy.io.wire.engines import KEEPALIVE_S
from pdrelay_proxy.settings import Settings
from support.raw_engine import closing, listening_in_vain, raw_engine, replying
from support.searching import examples
from support.wiring import CHUNKED, IS_COMPILED, LOOPS, Told, run, telling, told, until

pytestmark = pytest.mark.processes


AUTHORITIES = EngineTls(ssl.create_default_context())  # it takes longer to read them than to ask an engine


@dataclass(frozen=True)
class Client:
    """The client, on an event loop."""

    loop: str

    def make(self, settings, *, tls=AUTHORITIES, outbound=None, keepalive_s=KEEPALIVE_S):
        return WireEngines(settings, tls=tls, outbound=outbound, keepalive_s=keepalive_s)

    def run(self, main):
        """Run the coroutine to its end, and nothing may be left over."""
        return run(self.loop, main)

    def asked(self, way, script, *, times=1, host="127.0.0.1", outbound=None, **leg):
        """Ask an engine with a script so many times; return the engine, and what came of each."""

        async def main(engine):
            async with self.make(Settings(), outbound=outbound) as engines:
                return [await way(engines, replace(leg_to(engine), **leg)) for _ in range(times)]

        with raw_engine(script, host=host) as engine:
            got = self.run(main(engine))
        return engine, got


@pytest.fixture
def client(loop):
    return Client(loop)


def instance_at(at):
    return Instance(InstanceId("decode-0"), Role.DECODE, Address.parse(at))


def leg_to(engine, body=b"{}", headers=(), scheme="http"):
    return LegRequest(instance_at(f"{scheme}://{engine.at}"), "/v1/completions", body, headers)


@dataclass(frozen=True)
class Got:
    """What came of a leg."""

    status: int = 0
    content_type: str = ""
    body: bytes = b""
    error: str = ""
    reached: bool = True


BROKEN = Got(error="EngineError")


async def ask(engines, leg, timeout_s=10):
    try:
        answer = await engines.post(leg, timeout_s=timeout_s)
    except EngineError as error:
        return Got(error=type(error).__name__, reached=error.reached)
    return Got(answer.status, answer.content_type, answer.body)


async def listen(engines, leg):
    try:
        async with told(engines, leg) as call:
            body = await call.whole()
            return Got(call.status, call.content_type.decode("latin-1"), body)
    except EngineError as error:
        return Got(error=type(error).__name__, reached=error.reached)


WAYS = {"ask": ask, "told": listen}


@pytest.fixture(params=["ask", pytest.param("told", marks=telling)])
def way(request):
    return WAYS[request.param]


def reply(body=b"hello", *headers, status=200):
    lines = b"".join(b"%b\r\n" % header for header in headers)
    return b"HTTP/1.1 %d OK\r\ncontent-type: text/plain\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status,
        lines,
        len(body),
        body,
    )


def chunked(*chunks, head=b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n", end=b"0\r\n\r\n"):
    parts = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + b"transfer-encoding: chunked\r\n\r\n" + parts + end


HELLO = Got(200, "text/plain", b"hello")


# What is sent


def test_a_leg_on_the_wire(client, way):
    """One host, one length, no compression, our name, and the key for the engine in place of the client's."""
    outbound = Outbound({Role.DECODE: "ours"})
    headers = ((b"authorization", b"Bearer theirs"), (b"a", b"b"))
    engine, got = client.asked(way, replying(reply()), outbound=outbound, body=b"12345", headers=headers)

    assert got == [HELLO]
    (request,) = engine.requests
    assert request.lines[0] == b"post /v1/completions http/1.1"
    assert request.value(b"host") == engine.at.encode()
    assert request.value(b"content-length") == b"5"
    assert request.value(b"content-type") == b"application/json"
    assert request.value(b"accept-encoding") == b"identity"
    assert request.value(b"user-agent") == b"pdrelay"
    assert request.value(b"authorization") == b"Bearer ours"
    assert request.value(b"a") == b"b"
    assert request.value(b"transfer-encoding") is None
    assert request.body == b"12345"


def test_a_leg_says_how_long_its_body_is_and_what_it_is(client, way):
    """No chunked encoding: engines behind simple servers do not understand it."""
    form = b"multipart/form-data; boundary=x"
    engine, got = client.asked(way, replying(reply()), body=b"", content_type=form)

    assert got == [HELLO]
    (request,) = engine.requests
    assert request.value(b"content-length") == b"0"
    assert request.value(b"transfer-encoding") is None
    assert request.value(b"content-type") == form


def test_the_environments_proxy_is_not_for_engines(client, way, monkeypatch):
    """Engines are inside; requests to them must not leave by the way out."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")

    assert client.asked(way, replying(reply()))[1] == [HELLO]


def test_the_list_of_models(client):
    """A GET without a body, within the time for probes."""

    async def main(at):
        async with client.make(Settings()) as engines:
            answer = await engines.models(instance_at(at), ((b"a", b"b"),))
            assert (answer.status, answer.body) == (200, b"hello")
        async with client.make(Settings(health_check_timeout_s=0.2)) as engines:
            with pytest.raises(EngineTimeout, match=r"decode-0 did not answer within 0\.2 s"):
                await engines.models(instance_at(at), ())

    def script(engine, talk):
        engine.requests.append(talk.request())
        if len(engine.requests) == 1:
            talk.send(reply())
        else:
            engine.hung.append(talk.hung_up())

    with raw_engine(script) as engine:
        client.run(main(engine.at))

    request = engine.requests[0]
    assert request.lines[0] == b"get /v1/models http/1.1"
    assert request.value(b"a") == b"b"
    assert request.value(b"content-length") is None
    assert engine.hung == [True]


def test_a_big_body_arrives_whole(client, way):
    """Through an engine that is slow to read: what is written waits, and ``sent`` comes after the last byte of it."""
    body = bytes(range(256)) * 40_000  # 10 MB: more than the kernel's buffers

    def script(engine, talk):
        time.sleep(0.1)
        engine.requests.append(talk.request())
        talk.send(reply())

    engine, got = client.asked(way, script, body=body)

    assert got == [HELLO]
    assert engine.requests[0].body == body


@telling
def test_a_request_is_sent_once_its_last_byte_is_written(client):
    """Not before a slow engine has taken nearly all of it."""
    seen, started = [], []

    async def main(at, body):
        async with (
            client.make(Settings()) as engines,
            told(engines, LegRequest(instance_at(at), "/a", body, ())) as call,
        ):
            assert not call.is_sent
            await until(lambda: call.is_sent)
            seen.append(time.monotonic())
            assert await call.whole() == b"hello"
            assert call.is_sent

    def script(engine, talk):
        started.append(time.monotonic())
        time.sleep(0.2)
        talk.request()
        talk.send(reply())

    for body in (b"", b"{}", b"x" * 10_000_000):
        seen.clear()
        started.clear()
        with raw_engine(script) as engine:
            client.run(main(engine.at, body))
    assert seen[0] - started[0] > 0.19


@telling
def test_an_answer_before_the_end_of_the_body_ends_the_sending(client):
    """An engine that refuses a big body need not read it; the connection is of no use after that."""
    sent = []

    def script(engine, talk):
        engine.requests.append(talk.request(with_body=False))
        talk.send(reply(status=413))
        go_on.wait(10)
        engine.hung.append(talk.hung_up())

    go_on = threading.Event()

    async def main(at):
        leg = LegRequest(instance_at(at), "/a", b"x" * 20_000_000, ())
        async with client.make(Settings()) as engines:
            async with told(engines, leg, lambda _: sent.append(call.is_sent)) as call:
                assert await call.whole() == b"hello"
                assert call.status == 413
            assert engines.pool.idle == 0
            go_on.set()

    with raw_engine(script) as engine:
        client.run(main(engine.at))

    assert engine.hung == [True]
    assert sent == [False]


@pytest.mark.parametrize(
    "header",
    [
        (b"x-a", b"b\r\nevil: 1"),
        (b"x-a", b"b\nevil: 1"),
        (b"x-a", b"b\rc"),
        (b"x-a", b"b\0c"),
        (b"x a", b"b"),
        (b"", b"b"),
        (b"x-a\r\nevil", b"b"),
        (b"x-a: b\r\nevil", b"b"),
    ],
)
def test_no_header_can_bring_another(client, way, header):
    """Whatever a value is made of, the engine sees one request or none."""
    engine, got = client.asked(way, replying(reply()), headers=(header,))

    assert got == [Got(error="EngineError", reached=False)]
    assert not engine.requests


@pytest.mark.parametrize("name", [b"Host", b"content-length", b"Transfer-Encoding", b"connection", b"te", b"upgrade"])
def test_what_frames_a_request_is_the_clients_own(client, name):
    """A header that says where the body ends, or whose it is, would let one request become two."""

    async def main(at):
        async with client.make(Settings()) as engines:
            with pytest.raises(
                EngineError, match=f"decode-0 was not asked: the header '{name.decode()}' cannot be sent"
            ):
                await engines.post(LegRequest(instance_at(at), "/a", b"{}", ((name, b"7"),)), timeout_s=5)
            with pytest.raises(EngineError, match="printable ASCII"):
                await engines.post(LegRequest(instance_at(at), "/a b", b"{}", ()), timeout_s=5)

    with raw_engine(replying(reply())) as engine:
        client.run(main(engine.at))

    assert engine.connections == 0


def test_cookies_are_not_kept_and_redirects_not_followed(client, way):
    """They belong to one client, and the pool serves all."""
    answer = reply(b"hello", b"set-cookie: a=b; Path=/", b"location: /elsewhere", status=302)
    engine, got = client.asked(way, replying(answer, answer), times=2, path="/a")

    assert [one.status for one in got] == [302, 302]
    assert [request.lines[0] for request in engine.requests] == [b"post /a http/1.1"] * 2
    assert all(request.value(b"cookie") is None for request in engine.requests)


# Connections


def test_a_connection_is_used_again(client, way):
    """As long as its answers are complete."""
    engine, got = client.asked(way, replying(*[reply(), chunked(b"he", b"llo")] * 3), times=5)

    assert got == [HELLO] * 5
    assert engine.connections == 1


@telling
def test_the_connection_used_last_is_used_first(client):
    """So that the others get old and go."""

    async def main(leg):
        async with client.make(Settings()) as engines:
            async with told(engines, leg) as one, told(engines, leg) as two:
                for call in (one, two):
                    assert await call.whole() == b"hello"
            assert engines.pool.idle == 2
            for _ in range(3):
                await engines.post(leg, timeout_s=5)

    used = []

    def script(_, talk):
        while True:
            talk.request()
            used.append(talk.number)
            talk.send(reply())

    with raw_engine(script) as engine:
        client.run(main(leg_to(engine)))

    assert sorted(used[:2]) == [0, 1]
    assert len(set(used[2:])) == 1


def test_an_idle_connection_is_dropped_before_vllm_drops_it():
    """vLLM closes idle connections after 5 s; a request sent into that moment would be lost."""
    assert KEEPALIVE_S < 5


@pytest.mark.parametrize("thinks_s", [0.0, 0.1])  # longer than its address is remembered while nothing waits there
def test_idle_connections_and_what_belongs_to_them_go_in_time(client, thinks_s):
    """Before the engine closes them; and of an engine that is gone nothing stays."""

    async def main(leg):
        async with client.make(Settings(), keepalive_s=0.2) as engines:
            for _ in range(3):  # the machine may be busy with something else
                await engines.post(leg, timeout_s=20)
                await until(lambda: not engines.pool._peers)
                assert engines.pool.idle == 0

    ended = []

    def script(engine, talk):
        talk.request()
        time.sleep(thinks_s)
        start = time.monotonic()  # before the client can know
        talk.send(reply())
        engine.hung.append(talk.hung_up())
        ended.append(time.monotonic() - start)

    with raw_engine(script) as engine:
        client.run(main(leg_to(engine)))

    assert engine.hung == [True] * 3
    assert 0.1 < min(ended) < 1


@pytest.mark.parametrize(
    "last_words", [b"", b"x", b"\r\n", b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\r\n"]
)
def test_an_idle_connection_that_ends_or_speaks_is_dropped(client, way, last_words):
    """A request must not go into it, and what came unasked is nobody's answer."""

    async def main(leg, go_on):
        async with client.make(Settings()) as engines:
            assert await way(engines, leg) == HELLO
            go_on()
            await asyncio.sleep(0.05)  # the bytes are on their way: nothing here can be waited for
            assert await way(engines, leg) == HELLO

    talks = []

    def script(_, talk):
        talks.append(talk)
        talk.request()
        talk.send(reply())
        talk.request()

    def speak():
        if last_words:
            talks[0].send(last_words)
        else:
            talks[0].sock.shutdown(socket.SHUT_WR)

    with raw_engine(script) as engine:
        client.run(main(leg_to(engine), speak))

    assert engine.connections == 2


def test_idle_connections_are_bounded(client, monkeypatch):
    """A burst leaves no more of them than that."""
    monkeypatch.setattr("pdrelay_proxy.io.wire.pool.IDLE_MOST", 3)

    async def main(leg):
        async with client.make(Settings()) as engines:
            assert await asyncio.gather(*(ask(engines, leg) for _ in range(10))) == [HELLO] * 10
            assert engines.pool.idle == 3

    with raw_engine(replying(*[reply()] * 10)) as engine:
        client.run(main(leg_to(engine)))


@telling
def test_a_closed_connection_is_freed_at_once(client):
    """Without the garbage collector, which has better things to do under load."""

    async def main(leg):
        async with client.make(Settings()) as engines:
            async with told(engines, leg) as call:
                await call.begun()
                seen = [weakref.ref(call.source)]
            async with told(engines, leg) as call:
                await call.some()
                assert call.pieces == [b"he"]
                seen.append(weakref.ref(call.source))
        del call
        await asyncio.sleep(0)
        return seen

    gc.disable()
    try:
        with raw_engine(replying(chunked(b"he")[:-5])) as engine:
            assert [one() for one in client.run(main(leg_to(engine)))] == [None, None]
    finally:
        gc.enable()


def test_a_connection_that_ends_before_it_is_used(client):
    """An engine that closes what it has just accepted has got nothing of a request."""

    async def dial(protocol, host, port):
        transport, _ = await asyncio.get_running_loop().create_connection(protocol, host, port)
        transport.abort()

    async def main(leg):
        async with WireEngines(Settings(), dial=dial) as engines:
            says = "^decode-0 closed the connection before the request was sent$"
            with pytest.raises(EngineError, match=says) as caught:
                await engines.post(leg, timeout_s=5)
            assert not caught.value.reached
            assert engines.pool.idle == 0

    with raw_engine(replying(reply())) as engine:
        client.run(main(leg_to(engine)))

    assert not engine.requests


def test_an_end_that_the_event_loop_has_not_seen_yet_is_seen(client):
    """A loop that was busy while an engine closed its connections must not send a request into one."""

    async def main(leg):
        async with client.make(Settings()) as engines:
            assert await ask(engines, leg) == HELLO
            ended.wait(5)  # blocks the loop on purpose
            time.sleep(0.02)
            assert await ask(engines, leg) == HELLO

    ended = threading.Event()

    def script(_, talk):
        talk.request()
        talk.send(reply())
        time.sleep(0.05)
        talk.sock.shutdown(socket.SHUT_RDWR)
        ended.set()

    with raw_engine(script) as engine:
        client.run(main(leg_to(engine)))

    assert engine.connections == 2


@pytest.mark.parametrize("reset", [False, True])
def test_a_request_that_was_taken_is_not_sent_again(client, way, reset, monkeypatch):
    """The engine may have it: whether it is sent again is for others to decide."""
    monkeypatch.setattr("pdrelay_proxy.io.wire.connection.STALE_S", 30.0)  # its end may be seen late

    def script(engine, talk):
        engine.requests.append(talk.request())
        talk.send(reply())
        engine.requests.append(talk.request())
        if reset:
            talk.reset()

    engine, got = client.asked(way, script, times=2)

    assert got == [HELLO, replace(BROKEN, error="ConnectionStale")]
    assert (len(engine.requests), engine.connections) == (2, 1)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("answer", [reply(), chunked(b"he", b"llo")], ids=["length", "chunks"])
def test_an_answer_cut_at_any_byte_is_broken(client, way, answer, reset):
    """Never a clean end, and never silence."""

    def script(engine, talk):
        talk.request()
        talk.send(answer[: talk.number])
        if reset:
            talk.reset()

    assert client.asked(way, script, times=len(answer))[1] == [BROKEN] * len(answer)


@telling
def test_a_cut_stream_shows_what_came_before(client):
    """The client may have use for it."""

    async def main(leg):
        async with client.make(Settings()) as engines, told(engines, leg) as call:
            with pytest.raises(EngineError, match=r"^decode-0 broke off before its answer was complete$"):
                await call.whole()
            assert call.body == b"hell"

    with raw_engine(closing(chunked(b"he", end=b"3\r\nll"))) as engine:
        client.run(main(leg_to(engine)))


def test_nobody_there(client, way):
    """Not a byte has reached anybody."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))

        async def main():
            async with client.make(Settings()) as engines:
                leg = LegRequest(instance_at(f"127.0.0.1:{taken.getsockname()[1]}"), "/a", b"{}", ())
                with pytest.raises(EngineError, match=r"^decode-0 cannot be reached$"):
                    await engines.post(leg, timeout_s=5)
                return await way(engines, leg)

        assert client.run(main()) == Got(error="EngineError", reached=False)


def test_nobody_takes_the_connection(client, way):
    """The time to connect is bounded by itself."""

    async def main(at):
        async with client.make(Settings(connect_timeout_s=0.2)) as engines:
            leg = LegRequest(instance_at(at), "/a", b"{}", ())
            with pytest.raises(EngineTimeout, match=r"^decode-0 did not accept a connection in time$"):
                await engines.post(leg, timeout_s=5)
            return await way(engines, leg)

    with listening_in_vain() as at:
        assert client.run(main(at)) == Got(error="EngineTimeout", reached=False)


def test_the_time_for_an_answer_is_also_for_the_connection(client):
    """Whichever ends first."""

    async def main(at):
        async with client.make(Settings(connect_timeout_s=30)) as engines:
            return await ask(engines, LegRequest(instance_at(at), "/a", b"{}", ()), timeout_s=0.2)

    with listening_in_vain() as at:
        assert client.run(main(at)) == Got(error="EngineTimeout", reached=False)


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ends_as_it_opens(client, way, reset):
    """At whatever moment of its opening it happens: it is the engine's fault, in our words."""

    def script(_, talk):
        if reset:
            talk.reset()

    assert {one.error for one in client.asked(way, script, times=200)[1]} == {"EngineError"}


def test_ipv6(client, way):
    """With brackets in the Host header."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        engine, got = client.asked(way, replying(reply()), host="::1")
    except OSError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    assert got == [HELLO]
    assert engine.requests[0].value(b"host") == engine.at.encode()


def test_small_packets_do_not_wait(client):
    """TCP_NODELAY, on both event loops."""

    async def main(leg):
        async with client.make(Settings()) as engines:
            connection = await engines.pool.open(leg.instance)
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            engines.pool.put_back(connection)

    with raw_engine(replying()) as engine:
        client.run(main(leg_to(engine)))


def test_tls(client, way, serving_tls):
    """A certificate of ours is good, and connections are used again; one of nobody's cannot be reached."""
    serving, trusting = serving_tls
    big = bytes(range(256)) * 4000

    async def main(leg):
        async with client.make(Settings(), tls=trusting) as engines:
            assert await way(engines, leg) == HELLO
            assert await way(engines, replace(leg, body=big)) == replace(HELLO, body=big)
            assert await way(engines, leg) == BROKEN
        async with client.make(Settings(), tls=AUTHORITIES) as engines:
            assert await way(engines, leg) == Got(error="EngineError", reached=False)

    def script(engine, talk):
        for answer in (reply(), chunked(big), chunked(b"he")[:-5]):
            engine.requests.append(talk.request())
            talk.send(answer)

    with raw_engine(script, tls=serving) as engine:
        client.run(main(leg_to(engine, scheme="https")))

    assert engine.requests[1].body == big
    assert engine.connections == 2


# Answers

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
GOOD = {
    "interim": b"HTTP/1.1 100 Continue\r\n\r\n" + reply(),
    "interims": b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\ncontent-type: a/b\r\n\r\n" * 3 + chunked(b"hello"),
    "extensions": OK + b'transfer-encoding: chunked\r\n\r\n5;a=b;c="d;e"\r\nhello\r\n0;f\r\n\r\n',
    "trailers": chunked(b"hello", end=b"0\r\nx-a: b\r\ncontent-type: a/b\r\n\r\n"),
    "leading zeros": OK + b"transfer-encoding: CHUNKED\r\n\r\n0005\r\nhello\r\n000\r\n\r\n",
    "upper case": b"HTTP/1.1 200 OK\r\nContent-Type:   text/plain\t \r\nCONTENT-LENGTH:5\r\n\r\nhello",
    "no reason": b"HTTP/1.1 200 \r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello",
    "identity": OK + b"content-encoding: identity\r\ncontent-length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("piece", [0, 1, 7])
@pytest.mark.parametrize("name", GOOD)
def test_answers_that_are_allowed(client, way, name, piece):
    """In one packet, or in many; and the connection is good for another."""
    engine, got = client.asked(way, replying(GOOD[name], GOOD[name], piece=piece), times=2)

    assert got == [HELLO, HELLO]
    assert engine.connections == 1


@pytest.mark.parametrize(
    "head",
    [OK + b"connection: close\r\n\r\n", OK + b"\r\n", OK.replace(b"1.1", b"1.0") + b"\r\n"],
    ids=["close", "no length", "HTTP/1.0"],
)
def test_an_answer_without_a_length_ends_with_the_connection(client, way, head):
    """If that ends well; an RST is no end."""
    engine, got = client.asked(way, closing(head + b"hello"), times=2)
    assert (got, engine.connections) == ([HELLO, HELLO], 2)

    assert client.asked(way, closing(head + b"hello", reset=True), times=2)[1] == [BROKEN, BROKEN]


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nconnection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
def test_a_connection_that_the_engine_means_to_close_is_not_used_again(client, way, head):
    """Even when it stays open."""
    answer = head + b"content-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
    engine, got = client.asked(way, replying(answer), times=2)

    assert (got, engine.connections) == ([HELLO, HELLO], 2)


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("line", [b"", b"etag: x\r\n"])
def test_answers_that_have_no_body(client, way, status, line):
    """By their status; the connection is good for another."""
    answer = b"HTTP/1.1 %d X\r\n%b\r\n" % (status, line)
    engine, got = client.asked(way, replying(answer, reply()), times=2)

    assert (got, engine.connections) == ([Got(status, "", b""), HELLO], 1)


@pytest.mark.parametrize("status", [201, 206, 301, 400, 404, 429, 500, 503, 599])
def test_other_statuses_are_answers(client, way, status):
    """What they mean is for others to decide."""
    assert client.asked(way, replying(reply(status=status)))[1] == [Got(status, "text/plain", b"hello")]


SMALL = gzip.compress(b"hello")
BAD = {
    "nothing HTTP has": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\ncontent-length: 5\r\n\r\nhello",
    "status 000": b"HTTP/1.1 000 OK\r\ncontent-length: 5\r\n\r\nhello",
    "version 2.0": b"HTTP/2.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    "two lengths": OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "two equal lengths": OK + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "negative length": OK + b"content-length: -5\r\n\r\nhello",
    "signed length": OK + b"content-length: +5\r\n\r\nhello",
    "huge length": OK + b"content-length: 99999999999999999999999\r\n\r\nhello",
    "empty length": OK + b"content-length: \r\n\r\nhello",
    "length and chunks": OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "length after chunks": OK + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "other coding": OK + b"transfer-encoding: gzip\r\n\r\nhello",
    "coding and chunks": OK + b"transfer-encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks and coding": OK + b"transfer-encoding: chunked, gzip\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks twice": OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "not quite chunks": OK + b"transfer-encoding: xchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "folded line": OK + b"x-a: b\r\n c\r\ncontent-length: 5\r\n\r\nhello",
    "space before the colon": OK + b"content-length : 5\r\n\r\nhello",
    "no colon": OK + b"content-length\r\n\r\nhello",
    "bare line feeds": b"HTTP/1.1 200 OK\ncontent-length: 5\n\nhello",
    "NUL": OK + b"x-a: b\0c\r\ncontent-length: 5\r\n\r\nhello",
    "interim with a body": b"HTTP/1.1 199 X\r\ncontent-length: 5\r\n\r\nhello",
    "protocol change": b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nhello",
    "compressed": OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b" % (len(SMALL), SMALL),
    "big head": OK + b"x-a: " + b"b" * 70_000 + b"\r\ncontent-length: 5\r\n\r\nhello",
    "huge head": OK + (b"x-a: " + b"b" * 1000 + b"\r\n") * 300 + b"content-length: 5\r\n\r\nhello",
    "endless line": OK + b"x-a: " + b"b" * 300_000,
    "chunk's size is no number": OK + b"transfer-encoding: chunked\r\n\r\nz\r\nhello\r\n0\r\n\r\n",
    "chunk's size is negative": OK + b"transfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    "chunk's size is hexadecimal twice": OK + b"transfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "chunk is longer than it says": OK + b"transfer-encoding: chunked\r\n\r\n4\r\nhello\r\n0\r\n\r\n",
    "endless extension": OK + b"transfer-encoding: chunked\r\n\r\n5;a=" + b"b" * 300_000,
    "endless trailer": chunked(b"hello", end=b"0\r\nx-a: " + b"b" * 300_000),
}


@pytest.mark.parametrize("piece", [0, 1000])
@pytest.mark.parametrize("name", BAD)
def test_answers_that_are_not_clear(client, way, name, piece):
    """Are no answers: two parsers could make different things of them. The connection ends."""

    def script(engine, talk):
        talk.request()
        talk.send(BAD[name], piece=piece)
        engine.hung.append(talk.hung_up())  # the client does not need the end of the connection to see that

    engine, got = client.asked(way, script)

    assert (got, engine.hung) == ([BROKEN], [True])


def test_what_is_not_clear_is_named(client):
    """The engine by its id, and what is wrong with its answer."""

    async def main(leg):
        async with client.make(Settings()) as engines:
            says = "decode-0 answered with something that is not HTTP/1.1: a head of more than 65536 bytes"
            with pytest.raises(EngineError, match=f"^{re.escape(says)}$"):
                await engines.post(leg, timeout_s=5)

    with raw_engine(replying(BAD["huge head"])) as engine:
        client.run(main(leg_to(engine)))


@pytest.mark.parametrize("stray", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"])
@pytest.mark.parametrize("answer", [reply(), chunked(b"hello"), b"HTTP/1.1 204 X\r\n\r\n"])
def test_what_follows_an_answer_is_not_the_next_one(client, way, answer, stray):
    """One client's answer must not be another's."""
    engine, got = client.asked(way, replying(answer + stray), times=2)

    assert got == [HELLO if b"200" in answer else Got(204)] * 2
    assert engine.connections == 2


@pytest.mark.parametrize("asks", ["ask", "models"])
def test_an_answer_that_the_router_itself_reads_is_bounded(client, asks):
    """It is charged to no request: sixteen lists of models of 64 MiB were a gigabyte that no limit counted."""
    most = 4 * 1024 * 1024

    async def main(leg):
        async with client.make(Settings()) as engines:
            post = partial(engines.post, leg, timeout_s=5)
            ask = post if asks == "ask" else partial(engines.models, leg.instance, ())
            assert (await ask()).status == 200
            with pytest.raises(EngineError, match=rf"^decode-0 answered with more than {most} bytes$"):
                await ask()

    with raw_engine(replying(reply(b"x" * most), reply(b"x" * (most + 1)))) as engine:
        client.run(main(leg_to(engine)))


def test_what_an_engine_says_of_its_load(client):
    """The header goes into the answer."""

    async def main(leg):
        async with client.make(Settings()) as engines:
            return [(await engines.post(leg, timeout_s=5)).load for _ in range(2)]

    with raw_engine(replying(reply(b"", b"endpoint-load-metrics: {a}"), reply())) as engine:
        assert client.run(main(leg_to(engine))) == [b"{a}", b""]


# Time, patience and memory


def test_an_answer_that_takes_too_long(client):
    """Also one that drips; and the engine learns of it."""

    def script(engine, talk):
        talk.request()
        talk.send(CHUNKED)
        with contextlib.suppress(OSError):
            for _ in range(1000):  # 20 seconds of it
                talk.sock.sendall(b"1\r\nx\r\n")
                time.sleep(0.02)
            return
        engine.hung.append(True)

    async def main(leg):
        async with client.make(Settings()) as engines:
            start = time.monotonic()
            with pytest.raises(EngineTimeout, match=r"^decode-0 did not answer within 0\.2 s$") as caught:
                await engines.post(leg, timeout_s=0.2)
            assert caught.value.reached
            assert 0.15 < time.monotonic() - start < 15

    with raw_engine(script) as engine:
        client.run(main(leg_to(engine)))

    assert engine.hung == [True]


@pytest.mark.parametrize("begun", [b"", chunked(b"he")[:-5]], ids=["silent", "begun"])
def test_a_request_that_nobody_wants_any_more_ends_at_once(client, way, begun):
    """Cancelled at any point, its connection is closed within 0.1 s, so that the engine stops."""
    ended, delays = [], []

    def script(engine, talk):
        talk.request()
        talk.send(begun)
        taken.set()
        engine.hung.append(talk.hung_up())
        ended.append(time.monotonic())

    taken = threading.Event()

    async def main(leg):
        async with client.make(Settings()) as engines:
            while not delays or (min(delays) >= 0.1 and len(delays) < 20):  # the machine may be busy
                taken.clear()
                task = asyncio.create_task(way(engines, leg))
                while not taken.is_set():
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.01)
                cancelled = time.monotonic()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until(lambda: len(ended) > len(delays))
                delays.append(ended[-1] - cancelled)

    with raw_engine(script) as engine:
        client.run(main(leg_to(engine)))

    assert engine.hung == [True] * len(delays)
    assert min(delays) < 0.1


@telling
def test_a_call_that_is_dropped_before_its_connection_is_open_sends_nothing(client):
    """The connection is kept if it comes about, and closed if it does not."""

    async def main(leg):
        async with client.make(Settings()) as engines:
            for rounds in range(8):
                async with told(engines, leg) as call:
                    for _ in range(rounds):
                        await asyncio.sleep(0)
                    was_sent = call.source is not None
                assert was_sent or not call.is_over
            assert await ask(engines, leg) == HELLO

    def script(engine, talk):
        while True:
            engine.requests.append(talk.request())
            talk.send(reply())

    with raw_engine(script) as engine:
        client.run(main(leg_to(engine)))


@telling
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_slow_reader_holds_the_engine_up(client, scheme, serving_tls):
    """Whoever is told of more than it can use has the engine wait: the memory stays free, and nothing is lost."""
    body = bytes(range(256)) * 40_000
    theirs, ours = serving_tls if scheme == "https" else (None, None)

    async def main(leg):
        def took(_):
            if sum(map(len, call.pieces)) < len(body):
                call.hold()

        async with client.make(Settings(), tls=ours) as engines:
            tracemalloc.start()
            try:
                async with told(engines, leg, took) as call:
                    await asyncio.sleep(0.3)  # time enough to fill it, if nothing held it up
                    held, _ = tracemalloc.get_traced_memory()
                    while not call.complete:
                        call.resume()
                        await asyncio.sleep(0)
                    received = call.pieces
            finally:
                tracemalloc.stop()
            assert b"".join(received) == body
            assert max(map(len, received)) < 2_000_000
            assert held < 2_000_000
            assert await ask(engines, leg) == Got(200, "text/plain", b"next")

    with raw_engine(replying(reply(body), reply(b"next")), tls=theirs) as engine:
        client.run(main(leg_to(engine, scheme=scheme)))

    assert engine.connections == 1


@telling
def test_a_stream_that_was_held_up_and_left_does_not_block_the_next_one(client):
    """Reading goes on when the connection does."""
    size = 256 * 1024 + 1

    async def main(leg):
        async with client.make(Settings()) as engines:
            for _ in range(3):
                async with told(engines, leg) as call:
                    await call.whole()
                    call.hold()
            assert (await ask(engines, leg)).status == 200

    with raw_engine(replying(*[reply(b"x" * size)] * 4)) as engine:
        client.run(main(leg_to(engine)))

    assert engine.connections == 1


@telling
def test_what_comes_in_one_read_is_told_at_once(client):
    """Not chunk by chunk."""

    async def main(leg):
        async with client.make(Settings()) as engines, told(engines, leg) as call:
            await call.whole()
            return call.pieces

    with raw_engine(replying(chunked(*[b"x"] * 1000))) as engine:
        assert client.run(main(leg_to(engine))) == [b"x" * 1000]


@telling
def test_closing_ends_every_connection(client):
    """Those that wait, and those in use: their requests fail."""

    def script(engine, talk):
        talk.request()
        talk.send(reply() if talk.number == 0 else chunked(b"he")[:-5])
        engine.hung.append(talk.hung_up())

    async def main(leg):
        async with client.make(Settings()) as engines:
            one, two = Told(), Told()
            engines.leg_sender.post(one, leg)
            assert await one.whole() == b"hello"
            engines.leg_sender.post(two, leg)
            await two.some()
            assert two.body == b"he"
        with pytest.raises(EngineError, match="broke off"):
            await two.whole()
        with pytest.raises(EngineError, match="the connections to engines are closed"):
            await engines.post(leg, timeout_s=5)

    with raw_engine(script) as engine:
        client.run(main(leg_to(engine)))

    assert engine.hung == [True, True]


@telling
@pytest.mark.parametrize("piece", [0, 20])
def test_a_call_that_raises_ends_its_answer(client, piece):
    """It is its own fault, and not the engine's."""

    def bug(_):
        raise RuntimeError("ours")

    async def main(leg):
        async with client.make(Settings()) as engines:
            with pytest.raises(RuntimeError, match="ours"):
                async with told(engines, leg, bug) as call:
                    await call.whole()
            assert engines.pool.idle == 0

    def script(engine, talk):
        talk.request()
        talk.send(chunked(b"hello" * 20)[:-5], piece=piece)
        engine.hung.append(talk.hung_up())

    with raw_engine(script) as engine:
        client.run(main(leg_to(engine)))

    assert engine.hung == [True]


# Anything at all

TOKEN = st.text("abcdefgh-XYZ0189", min_size=1, max_size=12).map(lambda text: b"x-" + text.encode())
VALUE = st.text([chr(code) for code in range(33, 127)], max_size=20).map(str.encode)
BODY = st.lists(st.binary(min_size=1, max_size=40), max_size=5)


@dataclass(frozen=True)
class Said:
    """An answer, in packets; cut short or not."""

    packets: tuple[bytes, ...]
    reset: bool

    @property
    def whole(self) -> bytes:
        return b"".join(self.packets)


@st.composite
def answers(draw):
    """Answers that are allowed, split anywhere, and cut anywhere or not at all."""
    status = draw(st.sampled_from([200, 200, 201, 204, 304, 400, 404, 429, 500, 503]))
    chunks = draw(BODY) if status not in (204, 304) else []
    headers = draw(st.lists(st.tuples(TOKEN, VALUE), max_size=4))
    kind = draw(st.sampled_from(["text/event-stream", "application/json; charset=utf-8", ""]))
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    lines += b"content-type: %b\r\n" % kind.encode() if kind else b""
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 X\r\na: b\r\n\r\n"]))
    head = interim + b"HTTP/1.1 %d Some Reason\r\n%b" % (status, lines)
    framing = draw(st.sampled_from(["length", "chunks", "end"])) if status not in (204, 304) else "none"
    if framing == "chunks":
        whole = chunked(*chunks, head=head, end=draw(st.sampled_from([b"0\r\n\r\n", b"0\r\na: b\r\n\r\n"])))
    else:
        length = b"content-length: %d\r\n" % len(b"".join(chunks)) if framing == "length" else b""
        close = b"connection: close\r\n" if framing == "end" else b""
        whole = head + length + close + b"\r\n" + b"".join(chunks)
    cut = draw(st.one_of(st.none(), st.integers(0, len(whole))))
    sent = whole[:cut]
    at = sorted(draw(st.sets(st.integers(0, len(sent)), max_size=6)) | {0, len(sent)})
    packets = tuple(sent[a:b] for a, b in pairwise(at))
    return Said(packets, reset=draw(st.booleans()))


class _Current:
    """What the server says now; set between two examples."""

    said = Said((), reset=False)


@pytest.fixture(scope="module")
def talking():
    def script(_, talk):
        talk.request()
        said = _Current.said
        for packet in said.packets:
            talk.send(packet)
        if said.reset:
            time.sleep(0.002)  # an RST may overtake what was sent before it
            talk.reset()

    with raw_engine(script) as engine:
        yield engine


@given(said=answers())
@example(said=Said((), reset=True))
@example(said=Said((b"HTTP/1.1 200 OK\r\n\r\n",), reset=False))
@hypothesis_settings(max_examples=examples(120))
def test_all_ways_make_the_same_of_any_answer(talking, said):
    """Status, content type and bytes, or the same kind of error: on both event loops, waited for or told."""
    _Current.said = said
    leg = leg_to(talking)

    async def main(client, way):
        async with client.make(Settings()) as engines:
            return await way(engines, leg)

    got = {
        (loop, name): Client(loop).run(main(Client(loop), way))
        for loop in LOOPS
        for name, way in WAYS.items()
        if name == "ask" or not IS_COMPILED
    }

    assert len(set(got.values())) == 1, got
