"""vLLM over HTTP: what httpx raises, sends and keeps."""

import asyncio
import re
import socket

import httpx
import pytest

from support.sim import serving
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Instance, InstanceId, Leg, Role
from xpyd_proxy.errors import EngineError, EngineTimeout
from xpyd_proxy.io.engines import HttpEngines
from xpyd_proxy.settings import Settings

ENGINE = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "secret.example", 80))
LEG = Leg(ENGINE, "/v1/completions", b"{}", ((b"x-request-id", b"xpyd-1"),))


def engines(handler, **settings):
    return HttpEngines(Settings(**settings), transport=httpx.MockTransport(handler))


def raising(kind):
    async def handler(request):
        raise kind("secret.example:80 says no", request=request)

    return handler


async def test_a_leg_is_posted_as_it_is():
    """JSON, with our headers, and no compression: a stream must not wait for a compressor."""
    seen = []

    async def handler(request):
        seen.append(request)
        return httpx.Response(200, json={"a": 1})

    async with engines(handler) as http:
        answer = await http.ask(LEG, timeout_s=5)

    assert (answer.status, answer.content_type, answer.body) == (200, "application/json", b'{"a":1}')
    (request,) = seen
    assert (request.method, str(request.url), request.content) == (
        "POST",
        "http://secret.example/v1/completions",
        b"{}",
    )
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-request-id"] == "xpyd-1"
    assert request.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("kind", "expected", "says"),
    [
        (httpx.ConnectTimeout, EngineTimeout, "prefill-0 did not accept a connection in time"),
        (httpx.ConnectError, EngineError, "prefill-0 cannot be reached"),
        (httpx.ReadError, EngineError, "prefill-0 broke off before its answer was complete"),
        (httpx.RemoteProtocolError, EngineError, "prefill-0 broke off before its answer was complete"),
    ],
)
async def test_errors_of_the_library_stop_here(kind, expected, says):
    """In words that name the instance; an address is nothing a client should learn."""
    async with engines(raising(kind)) as http:
        with pytest.raises(expected, match=f"^{re.escape(says)}$"):
            await http.ask(LEG, timeout_s=5)
        with pytest.raises(expected, match=f"^{re.escape(says)}$"):
            async with http.stream(LEG):
                pass
        with pytest.raises(expected, match=f"^{re.escape(says)}$"):
            await http.models(ENGINE, ())


@pytest.mark.parametrize(
    ("kind", "reached"),
    [(httpx.ConnectError, False), (httpx.ConnectTimeout, False), (httpx.ReadError, True), (httpx.WriteError, True)],
)
async def test_an_error_tells_whether_the_engine_may_have_got_something(kind, reached):
    """Only what has reached nobody may be sent elsewhere as it is."""
    async with engines(raising(kind)) as http:
        with pytest.raises(EngineError) as caught:
            await http.ask(LEG, timeout_s=5)

    assert caught.value.reached is reached


@pytest.mark.parametrize("kind", [AttributeError, ConnectionResetError])
async def test_a_connection_that_is_reset_as_it_opens_is_an_engine_that_broke_off(kind):
    """httpx asks such a connection for its TLS, and what its backend raises then is nobody's: clients got a 500."""

    async def handler(request):
        raise kind("'NoneType' object has no attribute 'getpeername'")

    async with engines(handler) as http:
        with pytest.raises(EngineError, match=r"^prefill-0 broke off before its answer was complete$"):
            await http.ask(LEG, timeout_s=5)
        with pytest.raises(EngineError, match=r"^prefill-0 broke off before its answer was complete$"):
            async with http.stream(LEG):
                pass


async def test_a_slow_answer_is_given_up():
    """The time limit is for the whole answer, and closes the connection so that the engine stops."""
    stopped = []

    async def handler(_):
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.append(True)

    async with engines(handler, probe_timeout_s=0.01) as http:
        with pytest.raises(EngineTimeout, match=r"prefill-0 did not answer within 0\.01 s"):
            await http.ask(LEG, timeout_s=0.01)
        with pytest.raises(EngineTimeout):
            await http.models(ENGINE, ())

    assert stopped == [True, True]


class Breaking(httpx.AsyncByteStream):
    """A body that ends in an error."""

    def __init__(self):
        self.closed = False

    async def __aiter__(self):
        yield b"one"
        raise httpx.ReadError("secret.example")

    async def aclose(self):
        self.closed = True


async def test_a_body_that_breaks_off_raises_where_it_is_read():
    """After what came before it, and the request is closed."""
    body = Breaking()

    async def handler(_):
        return httpx.Response(200, stream=body)

    async with engines(handler) as http, http.stream(LEG) as stream:
        assert (stream.status, stream.content_type) == (200, "")
        assert await anext(stream.chunks) == b"one"
        with pytest.raises(EngineError, match="prefill-0 broke off"):
            await anext(stream.chunks)

    assert body.closed


async def test_leaving_a_stream_unread_closes_it():
    """Whether the block ends well or not."""
    body = Breaking()

    async def handler(_):
        return httpx.Response(200, stream=body)

    async with engines(handler) as http:
        with pytest.raises(RuntimeError, match="ours"):
            async with http.stream(LEG):
                raise RuntimeError("ours")

    assert body.closed


async def test_cookies_of_one_answer_do_not_travel_with_the_next_request():
    """They belong to one client, and the pool serves all."""
    seen = []

    async def handler(request):
        seen.append(request.headers.get("cookie"))
        return httpx.Response(200, headers={"set-cookie": "a=b; Path=/"})

    async with engines(handler) as http:
        for _ in range(2):
            await http.ask(LEG, timeout_s=5)

    assert seen == [None, None]


async def test_the_environments_proxy_is_not_for_engines(monkeypatch):
    """Engines are inside; requests to them must not leave by the way out."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"here"})

    with serving(app) as at:
        engine = Instance(InstanceId("decode-0"), Role.DECODE, Address.parse(at))
        async with HttpEngines(Settings()) as http:
            answer = await http.models(engine, ())

    assert answer.body == b"here"


async def test_an_idle_connection_is_dropped_before_vllm_drops_it():
    """vLLM closes idle connections after 5 s; a request sent into that moment would be lost."""
    assert Settings().engine_keepalive_s < 5


async def test_a_request_is_sent_when_its_last_byte_is_on_its_way():
    """Up to then the engine cannot have it, and what it was to fetch is still there for another."""
    told = []

    async def app(scope, receive, send):
        if scope["type"] == "http":
            while (await receive()).get("more_body"):  # an answer before the body's end may stop the rest of it
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    def leg(at):
        return Leg(Instance(InstanceId("decode-0"), Role.DECODE, Address.parse(at)), "/a", b"12345", ())

    with serving(app) as at:
        async with HttpEngines(Settings()) as http, http.stream(leg(at), sent=lambda: told.append("sent")):
            assert told == ["sent"]

    told.clear()
    with socket.socket() as taken:  # bound, so that nobody else on this machine listens there meanwhile
        taken.bind(("127.0.0.1", 0))
        async with HttpEngines(Settings()) as http:
            with pytest.raises(EngineError, match="cannot be reached"):
                async with http.stream(leg(f"127.0.0.1:{taken.getsockname()[1]}"), sent=lambda: told.append("sent")):
                    pass
    assert not told


async def test_a_body_says_how_long_it_is_and_what_it_is():
    """No chunked encoding: engines behind simple servers do not understand it."""
    seen = []

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        seen.append((headers.get(b"content-length"), headers.get(b"transfer-encoding"), headers[b"content-type"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    with serving(app) as at:
        instance = Instance(InstanceId("decode-0"), Role.DECODE, Address.parse(at))
        async with HttpEngines(Settings()) as http:
            await http.ask(Leg(instance, "/a", b"12345", ()), timeout_s=5)
            await http.ask(Leg(instance, "/a", b"", (), b"multipart/form-data; boundary=x"), timeout_s=5)

    assert seen == [(b"5", None, b"application/json"), (b"0", None, b"multipart/form-data; boundary=x")]
