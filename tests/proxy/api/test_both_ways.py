"""The endpoints over real sockets: by our own protocol, and byte for byte the same by another server's."""

import asyncio
import gzip
import json
import re
import socket
import ssl
import threading
import time
import zlib
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
import uvicorn

from pdrelay_proxy import listeners
from pdrelay_proxy.app import build
from pdrelay_proxy.core.admission.lifetime import Step
from pdrelay_proxy.settings import OverloadStatus, Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from pdrelay_tools.simulated.rules import abandoned
from support.certificates import Authority
from support.raw_http import Answer, Over, RawClient
from support.sim import serving, sims, until

pytestmark = pytest.mark.processes


PATH = "/v1/completions"
WAYS = ["protocol", "asgi"]
QUIET = Settings(health_check_interval_s=0.0, max_body_bytes=300_000)


class Served:
    """One router, which counts what reaches its ASGI application."""

    def __init__(self, router):
        self.router = router
        self.port = 0
        self.asgi = 0
        self.tls = None

    async def __call__(self, scope, receive, send):
        self.asgi += scope["type"] == "http"
        await self.router.app(scope, receive, send)

    def ask(self, request):
        with self.open() as client:
            return client.send(request).answer()

    def open(self):
        return Client(self.port, tls=self.tls)


class Client(RawClient):
    """A connection to a router, whose answers lack what differs from one request to the next."""

    def answer(self, *, to_head=False):
        found = super().answer(to_head=to_head)
        headers = {name: _same(value) for name, value in found.headers.items() if name != "date"}
        return Answer(found.status, headers, _same(found.body.decode()))

    def is_over(self):
        """Wait for the end of the connection; tell whether nothing came before it."""
        return self.rest() == b""


def _same(text):
    text = re.sub(r"pdrelay-[0-9a-z-]+?(?=[^0-9a-z-]|$)", "ID", text)
    return re.sub(r'dur=[0-9.]+|"created(?:_at)?": ?[0-9]+', "", text)


@contextmanager
def listening(settings, way):
    """Serve a router as its process does, or behind a server that knows nothing of it."""
    served = Served(build(settings))
    http = listeners.main_protocol(served.router, settings) if way == "protocol" else "httptools"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            served, http=http, log_config=None, ws="none", loop="uvloop", access_log=False, server_header=False
        )
        tls = served.router.tls
        config.ssl_context_factory = None if tls is None else lambda _config, _default: tls
        config.timeout_graceful_shutdown = 1
        uvicorns = uvicorn.Server(config)
        thread = threading.Thread(target=uvicorns.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: uvicorns.started)
            served.port = listener.getsockname()[1]
            yield served
        finally:
            uvicorns.should_exit = True
            thread.join()


@contextmanager
def routers(engines, settings=QUIET, ways=WAYS):
    """Serve the same engines through a router for each way."""
    with ExitStack() as stack:
        at = {name: stack.enter_context(serving(engine)) for name, engine in engines.items()}
        prefill, decode = ([at[name] for name in at if name.startswith(role)] for role in "pd")
        settings = replace(settings, prefill=tuple(prefill), decode=tuple(decode))
        yield [stack.enter_context(listening(settings, way)) for way in ways]


@pytest.fixture(scope="module")
def both():
    with routers(sims()) as found:
        yield found


def post(body=None, *, path=PATH, version="1.1", method="POST", **headers):
    """Return the bytes of a request; a header that is None is left out."""
    raw = body if isinstance(body, bytes) else json.dumps(body or {"prompt": "once upon", "max_tokens": 4}).encode()
    fields = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "X-Request-Id": "mine",
        "Content-Length": str(len(raw)),
    }
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/{version}", *lines, "", ""]).encode() + raw


STREAM = {"prompt": "once upon a time", "max_tokens": 6, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
LONG = b'{"prompt": "' + b"x" * 400_000 + b'"}'
MESSAGES = {
    "messages: not JSON": ("/v1/messages", b"{", {}, 400),
    "messages: a query": ("/v1/messages?beta=true", b"{", {}, 400),
    "messages: background": ("/v1/messages", CHAT | {"kv_transfer_params": {}}, {}, 400),
    "messages: a rank": ("/v1/messages", CHAT, {"X_Data_Parallel_Rank": "one"}, 400),
    "messages: another model": ("/v1/messages", CHAT | {"model": "gpt"}, {}, 404),
    "messages: longer": ("/v1/messages", LONG, {}, 413),
    "messages: another type": ("/v1/messages", CHAT, {"Content_Type": "text/plain"}, 415),
    "count_tokens: not JSON": ("/v1/messages/count_tokens", b"{", {}, 400),
}
RAW = json.dumps({"prompt": "once upon", "max_tokens": 4}).encode()
CODED = {
    "gzip": post(gzip.compress(RAW), Content_Encoding="gzip"),
    "deflate": post(zlib.compress(RAW), Content_Encoding="deflate"),
    "identity": post(RAW, Content_Encoding="identity"),
    "gzip, 256 KiB": post(gzip.compress(RAW[:-1] + b', "user": "' + b"x" * 280_000 + b'"}'), Content_Encoding="gzip"),
    "gzip, a stream": post(gzip.compress(json.dumps(STREAM).encode()), Content_Encoding="gzip"),
    "gzip, one leg": post(gzip.compress(b'{"prompt": "x"}'), path="/tokenize", Content_Encoding="gzip"),
    "gzip, in chunks": post(
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(gzip.compress(RAW)), gzip.compress(RAW)),
        Content_Encoding="gzip",
        Content_Length=None,
        Transfer_Encoding="chunked",
    ),
}
UNDECODED = {
    "a bomb": (post(gzip.compress(bytes(400_000)), Content_Encoding="gzip"), 413),
    "no gzip": (post(RAW, Content_Encoding="gzip"), 400),
    "half": (post(gzip.compress(RAW)[:-4], Content_Encoding="gzip"), 400),
    "no JSON in it": (post(gzip.compress(b"{"), Content_Encoding="gzip"), 400),
    "zstd": (post(b"\x28\xb5\x2f\xfd", Content_Encoding="zstd"), 415),
    "br": (post(b"\x8b", Content_Encoding="br", path="/v1/messages"), 415),
    "twice": (post(gzip.compress(gzip.compress(RAW)), Content_Encoding="gzip, gzip"), 415),
}
PLAIN = {
    **CODED,
    **{name: request for name, (request, _) in UNDECODED.items()},
    "plain": post(),
    "streamed": post(STREAM),
    "chat": post(CHAT, path="/v1/chat/completions"),
    "chat, streamed": post(CHAT | {"stream": True}, path="/v1/chat/completions"),
    "responses": post({"input": "hello", "max_output_tokens": 4}, path="/v1/responses"),
    "messages, streamed": post(CHAT | {"stream": True}, path="/v1/messages"),
    "one engine": post({"prompt": "once", "max_tokens": 1}),
    "no id": post(X_Request_Id=None),
    "an odd id": post(X_Request_Id="a b"),
    "closes": post(Connection="close"),
    "closes a stream": post(STREAM, Connection="close"),
    "not JSON": post(b"{"),
    "no object": post(b"[]"),
    "another type": post(Content_Type="text/plain"),
    "no type": post(Content_Type=None),
    "private": post({"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}),
    "an odd rank": post(X_Data_Parallel_Rank="one"),
    "a rank that is not there": post(X_Data_Parallel_Rank="7"),
    "another model": post({"model": "gpt", "prompt": "x", "max_tokens": 4}),
    "longer than accepted": post(LONG),
    "chunked and longer": post(
        b"61a80\r\n" + b"x" * 400_000 + b"\r\n0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked"
    ),
    "chunked": post(
        b'2\r\n{"\r\n1e\r\nprompt": "x", "max_tokens": 4}\r\n0\r\n\r\n',
        Content_Length=None,
        Transfer_Encoding="chunked",
    ),
    "empty": post(b""),
    "expects": post(Expect="100-continue"),
    "a query": post(path=f"{PATH}?a=b"),
    "an absolute target": post(path=f"http://localhost{PATH}"),
    "an absolute target with a query": post(STREAM, path=f"http://elsewhere:8000{PATH}?a=b"),
    "an escaped path": post(path="/v1/%63ompletions"),
    "tokenize": post({"prompt": "x"}, path="/tokenize"),
    **{name: post(body, path=path, **headers) for name, (path, body, headers, _) in MESSAGES.items()},
    "256 KiB": post({"prompt": "x" * 262_144, "max_tokens": 4}),
}
OTHERS = {
    "messages: GET": post(b"", path="/v1/messages", method="GET"),
    "messages: batches": post(path="/v1/messages/batches"),
    "GET": post(b"", method="GET"),
    "HEAD": post(b"", method="HEAD"),
    "another path": post(path="/v1/nothing"),
    "an absolute target elsewhere": post(path="http://localhost/v1/nothing"),
    "an absolute GET": post(b"", path="http://localhost/health", method="GET"),
    "an escaped slash": post(path="/v1%2fnothing"),
}


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_both_ways_give_the_same_answer(both, name):
    """Status, headers and body; and what is for an endpoint does not take uvicorn's way."""
    request = (PLAIN | OTHERS)[name]
    answers = []
    before = both[0].asgi
    for served in both:
        with served.open() as client:
            answers.append(client.send(request).answer(to_head=name == "HEAD"))

    assert answers[0] == answers[1]
    assert both[0].asgi - before == (name in OTHERS)


@pytest.mark.parametrize("name", CODED)
def test_a_compressed_body_is_read(both, name):
    """Coding agents compress large requests. Engines get what it says."""
    for served in both:
        assert served.ask(CODED[name]).status == 200


@pytest.mark.parametrize("name", UNDECODED)
def test_a_compressed_body_is_refused_in_a_sentence(both, name):
    """Its bounds are those of what comes out; a coding that is not read is named, with those that are."""
    request, status = UNDECODED[name]
    for served in both:
        answer = served.ask(request)
        assert answer.status == status
        assert answer.headers.get("accept-encoding") == ("gzip, deflate, identity" if status == 415 else None)
        assert "body" in json.loads(answer.body)["error"]["message"]


ANTHROPIC = {name: status for name, (_, _, _, status) in MESSAGES.items()}
ANTHROPIC |= {"messages: GET": 405, "messages: batches": 404}


OLD = {
    "plain": PLAIN["plain"],
    "streamed": PLAIN["streamed"],
    "one engine": PLAIN["one engine"],
    "not JSON": PLAIN["not JSON"],
    "longer than accepted": PLAIN["longer than accepted"],
    "an absolute target": PLAIN["an absolute target with a query"],
    "an escaped path": post(STREAM, path="/v1/%63ompletions"),
    "kept alive": post(STREAM, Connection="keep-alive"),
    "expects": post(STREAM, Expect="100-continue"),
    "a model's list": post(b"", path="/v1/models", method="GET"),
    "metrics": post(b"", path="/openapi.json", method="GET"),
}


@pytest.mark.parametrize("name", OLD)
def test_a_client_of_http_1_0_gets_the_same_without_chunks(both, name):
    """It knows none, nor 100 Continue: the end of the connection is the end of the answer (RFC 9112, 6.1 and 6.3)."""
    request = OLD[name].replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    now = both[0].ask(OLD[name])
    with both[0].open() as client:
        answer = client.send(request).answer()
        assert client.is_over()

    assert answer.headers.pop("connection") == "close"
    assert "transfer-encoding" not in answer.headers
    now.headers.pop("transfer-encoding", None)
    now.headers.pop("connection", None)
    assert answer == now


UPLOADS = {
    "an endpoint": (PATH, {"Connection": "close"}, 413),
    "FastAPI": ("/v1/nothing", {"Connection": "close"}, 404),
    "FastAPI, in HTTP/1.0": ("/health", {"version": "1.0"}, 405),
    "FastAPI, not asked for": ("/v1/nothing", {"Expect": "100-continue"}, 404),
    "an operator": ("/instances/add", {"Connection": "close"}, 404),
}


@pytest.mark.parametrize("case", UPLOADS)
def test_a_client_that_is_refused_and_still_sends_reads_why(both, case):
    """Were its connection closed at once, what it sends would have the kernel take the answer back."""
    path, options, status = UPLOADS[case]
    upload = post(b"x" * 3_000_000, path=path, **options)
    for _ in range(5):
        with both[0].open() as client:
            assert client.send(upload).answer().status == status
            assert client.sock.recv(1) == b""  # and no reset


def test_a_client_of_http_1_0_is_told_that_its_stream_broke_off():
    """Its only sign of the end is that of the connection, so the last event has to say it."""
    engines = sims()
    engines["d0"].inject(SimulatedFault(FaultKind.DROP, after=2))
    with routers(engines, ways=["protocol"]) as (served,), served.open() as client:
        body = client.send(post(STREAM, version="1.0")).rest().partition(b"\r\n\r\n")[2]

    *_, last, end = body.split(b"\n\n")
    assert json.loads(last.strip().removeprefix(b"data: "))["error"]["type"] == "EngineError"
    assert end == b""


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("tls"), "ca")
    pair = authority.sign("router")
    settings = replace(QUIET, tls_cert=str(pair.cert), tls_key=str(pair.key))
    with routers(sims(), settings, ways=["protocol"]) as (served,):
        served.tls = ssl.create_default_context(cafile=authority.own.cert)
        yield served


@pytest.mark.parametrize("name", PLAIN)
def test_a_client_over_tls_gets_the_same(both, over_tls, name):
    """Also one that asks for more before it has its answer."""
    with both[0].open() as client, over_tls.open() as other:
        expected = client.send(PLAIN[name]).answer()
        assert other.send(PLAIN[name]).answer() == expected
    with over_tls.open() as other:
        other.send(PLAIN["streamed"] + PLAIN[name])
        assert (other.answer().status, other.answer()) == (200, expected)


def test_a_client_that_expects_it_is_told_to_go_on_before_it_sends_its_body(both):
    """RFC 9110, 10.1.1; and a refusal comes instead, while the body is still to be sent."""
    head, _, body = post(STREAM, Expect="100-continue").partition(b"\r\n\r\n")
    too_long = post(LONG, Expect="100-continue").partition(b"\r\n\r\n")[0]
    for served in both:
        with served.open() as client:
            client.send(head + b"\r\n\r\n")
            assert client.sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert client.send(body).answer().status == 200
        with served.open() as client:
            client.send(too_long + b"\r\n\r\n")
            assert client.sock.recv(12) == b"HTTP/1.1 413"


REFUSED_BY_HEAD = {
    "too long": (post(LONG, Expect="100-continue"), 413),
    "another type": (post(Expect="100-continue", Content_Type="text/plain"), 415),
    "no endpoint": (post(Expect="100-continue", path="/v1/nothing"), 404),
    "no such method": (post(Expect="100-continue", path="/health"), 405),
}


@pytest.mark.parametrize("name", REFUSED_BY_HEAD)
def test_a_refusal_before_100_continue_ends_the_connection(both, name):
    """The client may leave its body out or send it: what comes next is one of two things (RFC 9110, 10.1.1)."""
    request, status = REFUSED_BY_HEAD[name]
    head = request.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    for served in both[:1] if "no" in name.split() else both:
        with served.open() as client:
            answer = client.send(head).answer()
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            assert client.is_over()


def test_a_request_that_is_let_in_by_its_head_keeps_the_connection(both):
    """It was told to send its body."""
    for served in both:
        with served.open() as client:
            for _ in range(2):
                answer = client.send(post(Expect="100-continue")).answer()
                assert (answer.status, answer.headers.get("connection")) == (200, None)


STREAMED = {
    "completions": post(STREAM),
    "chat": PLAIN["chat, streamed"],
    "messages": PLAIN["messages, streamed"],
    "responses": post({"input": "hello", "max_output_tokens": 4, "stream": True}, path="/v1/responses"),
    "several prompts": post(STREAM | {"prompt": ["one", "two"]}),
    "one engine": post(STREAM | {"max_tokens": 1}),
}


@pytest.mark.parametrize("name", STREAMED)
def test_no_proxy_holds_a_stream_back(both, name):
    """nginx would to its end, with its defaults; a whole answer may be held."""
    for served in both:
        answer = served.ask(STREAMED[name])
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-cache")
        assert "x-accel-buffering" not in served.ask(PLAIN["plain"]).headers


READ = ["/health", "/ready", "/readiness", "/live", "/liveness", "/metrics", "/", "/stats", "/docs", "/openapi.json"]


@pytest.mark.parametrize("path", [*READ, "/v1/models", "/v1/models?a=b"])
def test_head_is_answered_as_get_is(both, path):
    """Load balancers ask so (HAProxy's httpchk), and take a 405 for a router that is down."""
    for served in both:
        with served.open() as client:
            got = client.send(post(b"", path=path, method="GET")).answer()
            asked = client.send(post(b"", path=path, method="HEAD")).answer(to_head=True)
            assert client.send(post()).answer().status == 200
        assert (asked.status, got.status) == (200, 200)
        assert asked.headers.keys() - {"content-length"} == got.headers.keys() - {"content-length", "transfer-encoding"}


@pytest.mark.parametrize(
    "fault",
    [
        SimulatedFault(FaultKind.STATUS, status=400),
        SimulatedFault(FaultKind.STATUS, status=500),
        SimulatedFault(FaultKind.DROP),
        SimulatedFault(FaultKind.DROP, after=2),
        SimulatedFault(FaultKind.ERROR_EVENT, after=0),
        SimulatedFault(FaultKind.ERROR_EVENT, after=2),
        SimulatedFault(FaultKind.END, after=2),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.after}",
)
def test_what_goes_wrong_at_an_engine_looks_the_same(fault):
    """Before the first byte it is an error, and later the end of the stream says so."""
    engines = sims()
    engines["d0"].inject(fault)
    answers = []
    with routers(engines) as found:
        for served in found:
            with served.open() as client:
                answers.append(client.send(post(STREAM)).answer())

    assert answers[0] == answers[1]
    assert answers[0].status != 200 or "error" in answers[0].body


@pytest.mark.parametrize("resume", [False, True])
def test_a_stream_that_might_go_on_elsewhere_looks_the_same(resume):
    """Such a stream is not poured: another engine may have to take over."""
    engines = sims(1, 2)
    engines["d0"].inject(SimulatedFault(FaultKind.DROP, after=2, times=2))
    each = []
    with routers(engines, replace(QUIET, resume_streams=resume)) as found:
        for served in found:
            with served.open() as client:
                each.append([client.send(post(STREAM)).answer() for _ in range(2)])

    assert each[0] == each[1]
    assert sorted("error" in answer.body for answer in each[0]) == [False, not resume]


APP = "https://app.example"
ASKS = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}


def test_a_page_of_an_allowed_origin_reads_answers_on_both_ways(tmp_path):
    """Streams and errors as well, with its key; a browser's question needs none. Others read nothing."""
    keys = tmp_path / "keys"
    keys.write_text("me:open-sesame-0001\n")
    settings = replace(QUIET, api_keys_file=str(keys), allowed_origins=(APP,), admin_key="open")
    key = {"Authorization": "Bearer open-sesame-0001"}
    read = {
        "plain": post(Origin=APP, **key),
        "streamed": post(STREAM, Origin=APP, **key),
        "no key": post(Origin=APP),
        "not JSON": post(b"{", Origin=APP, **key),
        "models": post(b"", path="/v1/models", method="GET", Origin=APP, **key),
        "a method": post(b"", method="PUT", Origin=APP, **key),
    }
    unread = {
        "another origin": post(Origin="https://evil.example", **key),
        "no origin": post(**key),
    }
    never = {"health": post(b"", path="/health", method="GET", Origin=APP)}
    never |= {"instances": post(b"", path="/instances", method="GET", Origin=APP, X_Api_Key="open")}
    with routers(sims(), settings) as found:
        for served in found:
            for request in read.values():
                headers = served.ask(request).headers
                assert (headers["access-control-allow-origin"], headers["vary"]) == (APP, "Origin")
            for request in unread.values():
                headers = served.ask(request).headers
                assert ("access-control-allow-origin" in headers, headers["vary"]) == (False, "Origin")
            for request in never.values():
                assert not {"access-control-allow-origin", "vary"} & served.ask(request).headers.keys()
            for path, status, allowed in (
                (PATH, 204, "POST"),
                ("/v1/models", 204, "GET, HEAD"),
                ("/instances", 405, None),
            ):
                asked = served.ask(post(b"", path=path, method="OPTIONS", Origin=APP, **ASKS))
                assert (asked.status, asked.headers.get("access-control-allow-methods")) == (status, allowed)
            refused = served.ask(post(b"", method="OPTIONS", Origin="https://evil.example", **ASKS))
            assert refused.status == 403
            assert "access-control-allow-origin" not in refused.headers


def test_without_allowed_origins_no_page_reads_anything(both):
    """The default."""
    for served in both:
        for request in (post(), post(b"", method="OPTIONS", Origin=APP, **ASKS)):
            assert not {"access-control-allow-origin", "vary"} & served.ask(request).headers.keys()


@pytest.mark.parametrize("status", OverloadStatus)
def test_a_router_without_room_says_so_by_the_status_that_is_set(status):
    """A mesh ejects a router that answers 503, and not one that answers 429; both say when to come again."""
    engines = sims()
    engines["p0"] = prefill = SlowPrefill(engines["p0"])
    settings = replace(QUIET, max_concurrency=1, max_queue=0, overload_status=status)
    with routers(engines, settings) as found:
        for served in found:
            prefill.may_answer.clear()
            with served.open() as client:
                client.send(post(STREAM))
                until(lambda served=served: served.router.live.gate.admission.admitted == 1)
                answers = [served.ask(post(path=path)) for path in (PATH, "/v1/messages", "/tokenize")]
                prefill.may_answer.set()
            until(lambda served=served: served.router.lifetime.in_flight == 0)
            assert {answer.status for answer in answers} == {int(status)}
            assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
            assert ("RateLimitError" in answers[0].body) == (status == "429")


def test_a_client_may_name_its_request_in_another_header():
    """The first of those that are set; the router's own X-Request-Id counts only if it is among them."""
    settings = replace(QUIET, request_id_headers=("X-Correlation-Id", "X-Trace"))
    with routers(sims(), settings) as found:
        for served in found:
            for path, method in ((PATH, "POST"), ("/v1/models", "GET"), ("/v1/nothing", "POST")):
                named = {"X_Trace": "second", "X_Correlation_Id": "first"}
                answers = [
                    served.ask(post(path=path, method=method, **named)),
                    served.ask(post(path=path, method=method, X_Trace="second")),
                    served.ask(post(path=path, method=method)),
                ]
                assert [answer.headers["x-request-id"] for answer in answers] == ["first", "second", "ID"]


class SlowPrefill:
    """An engine that answers prompts when it may."""

    def __init__(self, engine):
        self.engine, self.may_answer = engine, threading.Event()

    async def __call__(self, scope, receive, send):
        while scope["type"] == "http" and scope["method"] == "POST" and not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        await self.engine(scope, receive, send)

    def ask(self, served, request):
        """Return the answer to a request, which begins with a comment: the engine waits until the client has it."""
        self.may_answer.clear()
        with served.open() as client:
            client.send(request).incoming.wait_for(COMMENT)
            self.may_answer.set()
            answer = client.answer()
        assert answer.body.startswith(COMMENT.decode())
        return answer


COMMENT = b": keep-alive\n\n"
COMMENTS = replace(QUIET, stream_comment_interval_s=0.05)


def test_a_stream_that_waits_for_its_prefill_gets_comments():
    """A proxy would close its connection; the events are those of a stream without comments."""
    engines = sims()
    engines["p0"] = prefill = SlowPrefill(engines["p0"])
    with routers(engines, COMMENTS) as found:
        for served in found:
            answer = prefill.ask(served, post(STREAM))
            events = answer.body.replace(COMMENT.decode(), "")  # a busy machine may be slow between events, too
            assert answer.status == 200
            assert answer.headers["x-accel-buffering"] == "no"
            assert events.startswith("data: {")
            assert "error" not in events


def test_a_router_that_leaves_says_so_on_both_ways():
    """First with the answer, which closes the connection; later in place of it."""
    with routers(sims()) as found:
        answers = []
        for served in found:
            for step in (Step.SHUTDOWN, Step.GRACE_OVER):
                served.router.lifetime.on(step)
                with served.open() as client:
                    answers.append(client.send(post(STREAM)).answer())
                    assert client.is_over()

    assert answers[:2] == answers[2:]
    assert [(answer.status, answer.headers["connection"]) for answer in answers[:2]] == [(200, "close"), (503, "close")]


@pytest.mark.parametrize("first", ["plain", "streamed", "not JSON", "GET"])
def test_several_requests_on_one_connection(both, first):
    """One after the other, and one behind the other: answers come in the order of the requests."""
    requests = [(PLAIN | OTHERS)[first], post(STREAM), post(), post(STREAM)]
    for served in both:
        with served.open() as client:
            each = [client.send(request).answer() for request in requests]
        with served.open() as client:
            client.send(b"".join(requests))
            assert [client.answer() for _ in requests] == each


LATE = post({"prompt": "y" * 1000, "max_tokens": 4}, X_Request_Id="too-late")[:-1]
BROKEN = post(b"xyz\r\n", X_Request_Id="broken", Content_Length=None, Transfer_Encoding="chunked")


@pytest.mark.parametrize(
    ("sent", "name", "status", "why"),
    [(LATE, "too-late", 408, "too slow"), (BROKEN, "broken", 400, "the size of a chunk")],
)
def test_the_log_says_what_a_client_got_whose_body_was_given_up(sent, name, status, why, caplog):
    """It has not gone: its connection has answered it."""
    caplog.set_level("INFO", logger="pdrelay.access")
    with routers(sims(), replace(QUIET, receive_timeout_s=0.3), ["protocol"]) as (served,):
        answer = None
        while answer is None:  # a client that has sent nothing in time is hung up on without one
            with suppress(Over):
                answer = served.ask(sent)
        # routers of other tests may write late
        until(lambda: any(f"client_id={name!r}" in line for line in caplog.messages))

    assert answer.status == status
    for line in [line for line in caplog.messages if f"client_id={name!r}" in line]:
        assert f" status={status} " in line
        assert why in line


def legs_of(engine):
    """What has reached an engine, without the router's word that nobody will come for a transfer."""
    return [entry for entry in engine.log if not abandoned(json.loads(entry.body))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["p0", "d0"])
def test_a_client_that_leaves_is_noticed_at_the_engine(way, where):
    """Within a prefill, and within a stream: the leg is closed within 100 ms, and nothing is held any more."""
    engines = sims(prefill_s=20.0 if where == "p0" else 0.0, token_s=0.05)
    with routers(engines, ways=[way]) as (served,):
        delays = []
        for number in range(20):
            if delays and min(delays) < 0.5:
                break  # else the machine is busy with something else
            with served.open() as client:
                client.send(post(STREAM | {"max_tokens": 500}))
                until(lambda count=number: len(legs_of(engines[where])) > count)
                if where == "d0":
                    client.sock.recv(10)
            left = time.monotonic()
            until(lambda count=number: legs_of(engines[where])[count].state != "open")
            delays.append(time.monotonic() - left)
            until(lambda: served.router.lifetime.in_flight == 0)
            assert served.router.live.gate.admission.admitted == 0
            assert legs_of(engines[where])[number].state == "hung up"
        assert min(delays) < 0.5  # of which the test's own thread may take most


class Flood:
    """A decode engine that sends as fast as it may."""

    EVENTS = 128
    EVENT = b"data: " + b"x" * (512 * 1024) + b"\n\n"

    def __init__(self):
        self.sent = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(self.EVENTS):
            await send({"type": "http.response.body", "body": self.EVENT, "more_body": True})
            self.sent += 1
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@pytest.mark.slow  # 64 MiB
@pytest.mark.parametrize("way", WAYS)
def test_a_slow_client_holds_up_its_engine(way):
    """The router keeps little of 64 MiB for a client that does not read; then all of it arrives."""
    flood = Flood()
    with routers({**sims(1, 0), "d0": flood}, ways=[way]) as (served,), served.open() as client:
        client.send(post(STREAM, Connection="close"))
        until(lambda: flood.sent > 2)
        seen = -1
        while seen != flood.sent:
            seen = flood.sent
            time.sleep(0.3)
        assert seen < Flood.EVENTS / 2

        body = client.answer().body
        assert len(body) == Flood.EVENTS * len(Flood.EVENT) + len("data: [DONE]\n\n")


def test_a_client_that_leaves_is_noticed_though_it_has_asked_for_more():
    """Its next request waits behind a stream that nobody reads any more."""
    engines = sims(token_s=0.05)
    with routers(engines, ways=["protocol"]) as (served,):
        with served.open() as client:
            client.send(post(STREAM | {"max_tokens": 200}) + post())
            client.sock.recv(10)
        until(lambda: engines["d0"].log[0].state == "hung up")
        until(lambda: served.router.lifetime.in_flight == 0)
