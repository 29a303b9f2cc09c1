"""What an ASGI application hears and says, and the bytes that a client gets of it."""

import asyncio
import logging
import tracemalloc

import pytest

from pdrelay_proxy.api.asgi_exchange import AsgiExchange, path_of
from pdrelay_proxy.api.flow_control import HIGH_WATER, FlowControl
from pdrelay_proxy.core.http.framing import read_head
from pdrelay_proxy.errors import BadFraming


class Transport:
    """Keeps what is written."""

    def __init__(self):
        self.said = b""
        self.closed = False
        self.reads = True

    def write(self, data):
        self.said += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True


class Connection:
    """As much of one as an exchange sees."""

    def __init__(self):
        self.transport = Transport()
        self.complete = 0
        self.flow = FlowControl(self.transport)

    def default_lines(self):
        return b"date: today\r\n"

    def answered(self, *, keep_alive):
        self.complete += 1
        if not keep_alive:
            self.transport.close()


def exchange(app, lines=(), *, method="GET", target="/x", old=False):
    """Begin a request; returns its connection, itself and the task of its application."""
    version = "1.0" if old else "1.1"
    raw = "\r\n".join([f"{method} {target} HTTP/{version}", "Host: h", *lines, "", ""]).encode()
    connection = Connection()
    made = AsgiExchange(connection, read_head(raw), {"type": "http"})
    return connection, made, asyncio.ensure_future(made.run(app))


def answering(*messages):
    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    return app


def start(*headers, status=200):
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data=b"", *, more=False):
    return {"type": "http.response.body", "body": data, "more_body": more}


async def said(app, lines=(), **options):
    """Return the connection once the application has ended, all of the request having come."""
    connection, made, task = exchange(app, lines, **options)
    made.serve()
    await task
    return connection


async def test_an_answer_of_known_length():
    """Behind the server's own headers."""
    connection = await said(
        answering(start((b"content-length", b"2"), (b"x-a", b"1")), body(b"h", more=True), body(b"i"))
    )

    assert connection.transport.said == b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\nx-a: 1\r\n\r\nhi"
    assert (connection.complete, connection.transport.closed) == (1, False)


async def test_an_answer_of_unknown_length_goes_in_chunks():
    """Each part in one; an empty part is none, for that would be the end."""
    connection = await said(answering(start(), body(b"hello", more=True), body(b"", more=True), body(b"!")))

    assert connection.transport.said.endswith(b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n")


async def test_a_client_of_http_1_0_gets_no_chunks():
    """The end of the connection is the end of the answer."""
    connection = await said(answering(start(), body(b"hello")), old=True)

    assert connection.transport.said == b"HTTP/1.1 200 OK\r\ndate: today\r\nconnection: close\r\n\r\nhello"
    assert connection.transport.closed


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_some_answers_have_no_body(method, status):
    """Whatever the application says."""
    connection = await said(answering(start((b"content-length", b"5"), status=status), body(b"hello")), method=method)

    assert connection.transport.said.endswith(b"content-length: 5\r\n\r\n")
    assert not connection.transport.closed


@pytest.mark.parametrize("lines", [["Connection: close"], []])
@pytest.mark.parametrize("header", [(b"connection", b"close"), (b"x-a", b"1")])
async def test_either_side_may_close(lines, header):
    """It is said once."""
    connection = await said(answering(start((b"content-length", b"0"), header), body()), lines)
    closes = bool(lines) or header[0] == b"connection"

    assert connection.transport.said.count(b"connection: close\r\n") == closes
    assert connection.transport.closed is closes


@pytest.mark.parametrize(
    "header", [(b"x-a", b"1\r\nset-cookie: a=b"), (b"x-a: 1\r\nx-b", b"1"), (b"", b"1"), (b"x-a", b"\x00")]
)
async def test_a_header_that_is_two_is_not_sent(caplog, header):
    """The application has a bug, and the client gets none of it."""
    caplog.set_level(logging.ERROR)
    connection = await said(answering(start(header), body(b"hi")))

    assert connection.transport.said.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert connection.transport.said.endswith(b"connection: close\r\n\r\nInternal Server Error")
    assert connection.transport.closed
    assert "has failed at GET /x" in caplog.text


@pytest.mark.parametrize("length", [b"1", b"3"])
async def test_a_body_that_is_not_as_long_as_said_ends_the_connection(caplog, length):
    """A client would take what follows for its rest, or the rest for what follows."""
    caplog.set_level(logging.ERROR)
    connection = await said(answering(start((b"content-length", length)), body(b"hi")))

    assert connection.transport.closed
    assert connection.complete == 0
    assert "content-length" in caplog.text


@pytest.mark.parametrize("begun", [True, False])
async def test_an_application_that_fails_or_says_nothing(caplog, begun):
    """Half of an answer has no other end than the connection's."""
    caplog.set_level(logging.ERROR)

    async def fails(scope, receive, send):
        if begun:
            await send(start())
        raise KeyError

    for app in (fails, answering(start()) if begun else answering()):
        connection = await said(app)
        assert connection.transport.closed
        assert connection.transport.said.startswith(b"HTTP/1.1 200" if begun else b"HTTP/1.1 500")
    assert "has failed at" in caplog.text
    assert "has not answered" in caplog.text


async def test_messages_out_of_order_are_an_error(caplog):
    """Also behind the end."""
    caplog.set_level(logging.ERROR)
    early = await said(answering(body(b"hi")))
    late = await said(answering(start((b"content-length", b"0")), body(), body(b"more")))

    assert early.transport.said.startswith(b"HTTP/1.1 500")
    assert late.transport.said.endswith(b"content-length: 0\r\n\r\n")
    assert caplog.text.count("RuntimeError: http.response.body cannot be sent now") == 2


async def test_a_body_is_heard_piece_by_piece_and_then_that_the_client_has_gone():
    """No more is read from a client than the application takes."""
    heard = []

    async def app(scope, receive, send):
        while not heard or heard[-1]["type"] == "http.request":
            heard.append(await receive())

    connection, made, task = exchange(app, ["Content-Length: 90000"], method="POST")
    made.receive_body(b"a" * (HIGH_WATER + 1))
    assert not connection.transport.reads
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert connection.transport.reads
    made.receive_body(b"b")
    made.serve()
    await asyncio.sleep(0)
    made.leave()
    await task

    assert b"".join(one.get("body", b"") for one in heard) == b"a" * (HIGH_WATER + 1) + b"b"
    assert [one.get("more_body") for one in heard] == [True, False, None]
    assert connection.transport.said == b""


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_is_asked_for_its_body_when_somebody_wants_it(reads):
    """Its connection ends with the answer: the body may come, or not."""

    async def app(scope, receive, send):
        if reads:
            await receive()
        await send(start((b"content-length", b"0")))
        await send(body())

    connection, made, task = exchange(app, ["Content-Length: 2", "Expect: 100-continue"], method="POST")
    await asyncio.sleep(0)
    made.receive_body(b"hi")
    made.serve()
    await task

    assert connection.transport.said.startswith(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200" if reads else b"HTTP/1.1 200"
    )
    assert connection.transport.closed


async def test_of_a_request_that_is_answered_nothing_is_left():
    """Its connection keeps it until the next one, however long that takes."""
    app = answering(start((b"content-length", b"0")), body())
    tracemalloc.start()
    _connection, made, task = exchange(app, ["X-A: " + "a" * 50_000, "Content-Length: 1000000"], method="POST")
    made.receive_body(bytearray(500_000))
    await task
    made.receive_body(bytearray(500_000))
    del task
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert made.response_complete
    assert left < 40_000


async def test_who_does_not_read_is_waited_for():
    """Until the client has read, or has gone."""
    connection, made, task = exchange(answering(start(), body(b"hi")))
    connection.flow.pause_writing()
    made.serve()
    await asyncio.sleep(0)
    assert connection.transport.said == b""
    connection.flow.resume_writing()
    await task

    assert connection.complete == 1


async def test_a_server_that_ends_cuts_it_off():
    """With an answer, if none has begun."""
    connection, _, task = exchange(lambda *_: asyncio.sleep(100))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert connection.transport.said.startswith(b"HTTP/1.1 500")
    assert connection.transport.closed


async def test_the_scope_says_what_was_asked():
    """The path without escapes, a host and a query."""
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope)

    await said(app, ["X-A: 1"], target="http://elsewhere/a%20b?c=d%20e")

    assert (seen["path"], seen["raw_path"], seen["query_string"]) == ("/a b", b"/a%20b", b"c=d%20e")
    assert (seen["method"], seen["http_version"], seen["type"]) == ("GET", "1.1", "http")
    assert (b"x-a", b"1") in seen["headers"]


@pytest.mark.parametrize(("target", "query"), [("http://elsewhere", b""), ("http://elsewhere:80?c=d", b"c=d")])
async def test_an_absolute_url_without_a_path_is_the_root(target, query):
    """It has to be accepted (RFC 9112, 3.2.2), and means the same as with a slash (RFC 9110, 4.2.3)."""
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope)

    await said(app, target=target)

    assert (seen["path"], seen["raw_path"], seen["query_string"]) == ("/", b"/", query)
    assert path_of(target.encode()) == "/"


@pytest.mark.parametrize("target", ["http://", "x:y", "?a=b"])
async def test_a_target_without_a_path_is_refused(target):
    """Nothing is there that an application could look for."""
    with pytest.raises(BadFraming, match="write a path"):
        exchange(answering(), target=target)
