"""The endpoints as an ASGI application: the same requests, by other messages."""

import asyncio
from contextlib import suppress

import pytest

from pdrelay_proxy.api.endpoint_asgi import Endpoints
from pdrelay_proxy.core.admission.lifetime import Step
from pdrelay_proxy.core.request_record import CLIENT_CLOSED_REQUEST
from support.scripted import EVENT, Scripted, call, good_decode, never, pulled_prefill, router_of, until
from support.simulated_loop import in_simulated_time

SCOPE = {"path": "/v1/completions", "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}


class Connection:
    """What a server does with one request: hands over its body, takes the messages, and may cut it off."""

    def __init__(self, engines, body=None, **rules):
        self.router = router_of(engines, **rules)
        self.sent = []
        incoming = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": body or call().body, "more_body": False})
        self.task = asyncio.create_task(Endpoints(self.router.requests)(SCOPE, incoming.get, self._send))

    async def _send(self, message):
        self.sent.append(message)

    async def end(self):
        async with asyncio.timeout(30):
            with suppress(asyncio.CancelledError):
                await self.task
        assert self.router.is_idle()
        return self

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def bodies(self):
        return [(message["body"], message["more_body"]) for message in self.sent[1:]]

    @property
    def record(self):
        ((record,),) = self.router.ended.values()
        return record


async def test_a_request_that_the_server_cuts_off_is_one_that_has_left():
    """As long as the router is to go on."""
    engines = Scripted(pulled_prefill, never)
    connection = Connection(engines)
    await until(lambda: len(engines.legs) == 2)
    connection.task.cancel()
    await connection.end()

    assert connection.task.cancelled()
    assert connection.record.status == CLIENT_CLOSED_REQUEST
    assert not engines.open


async def test_a_request_that_is_cut_off_at_the_end_of_the_router_is_told():
    """Its time is over, and the client is still there."""
    engines = Scripted(pulled_prefill, never)
    connection = Connection(engines)
    await until(lambda: len(engines.legs) == 2)
    connection.router.lifetime.on(Step.SHUTDOWN)
    connection.router.lifetime.on(Step.GRACE_OVER)
    connection.task.cancel()
    await connection.end()

    assert connection.status == 503
    assert connection.headers[b"connection"] == b"close"
    assert b"has to end before this request is finished" in connection.bodies[0][0]
    assert not engines.open


def test_comments_are_no_sign_of_life_of_an_engine():
    """Its stream stands still for longer than it may, however often the client is told that the router lives."""

    async def ask():
        stalls = Scripted(pulled_prefill, lambda _leg: _begun_and_never())
        timing = {"stream_comment_interval_s": 1.0, "stream_idle_timeout_s": 10.0, "retries": 0}
        clock = asyncio.get_running_loop().time
        return await Connection(stalls, call(stream=True).body, clock=clock, **timing).end()

    seconds, connection = in_simulated_time(ask())
    told = b"".join(body for body, _ in connection.bodies)

    assert 10 <= seconds < 12
    assert told.count(b": keep-alive") == 10
    assert b'"error"' in told


async def _begun_and_never():
    return 200, [EVENT, never()]


@pytest.mark.parametrize("how", ["cancelled", "raised"])
async def test_a_body_that_is_not_read_to_its_end_holds_nothing(how):
    """Its bytes were charged for ever."""
    router = router_of(Scripted(pulled_prefill, good_decode))
    messages = [{"type": "http.request", "body": b"x" * 1000, "more_body": True}]

    async def receive():
        if messages:
            return messages.pop()
        if how == "raised":
            raise OSError("no more")
        return await never()

    async def send(_):
        pass

    task = asyncio.create_task(Endpoints(router.requests)(SCOPE, receive, send))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert router.is_idle()
