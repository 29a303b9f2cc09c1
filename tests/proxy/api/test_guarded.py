"""A connection of a client, at what is no socket: the bytes that it gets are handed to it, turn by turn of the loop."""

import asyncio
import gc
import weakref

import pytest
import uvicorn
from uvicorn.server import ServerState

from pdrelay_proxy.api.clients import Clients
from pdrelay_proxy.api.guarded import connection_class
from pdrelay_proxy.api.unread_answers import UnreadAnswers
from pdrelay_proxy.app import build
from pdrelay_proxy.settings import Settings
from support.simulated_loop import advance, in_simulated_time, simulated


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.said, self.closed = b"", False

    def write(self, data):
        self.said += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def can_write_eof(self):
        return False

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


async def empty(scope, receive, send):
    """Answer without a body, whatever is sent."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def waiting(scope, receive, send):
    """Read to the end."""
    while (await receive())["type"] != "http.disconnect":
        pass


def connected(clients=None, app=None):
    """Connect a client to a router that listens nowhere; returns the connection and its transport."""
    requests = build(Settings(prefill=("127.0.0.1:1",), decode=("127.0.0.1:2",))).requests
    kind = connection_class(clients or Clients(), UnreadAnswers(None, lambda: None), requests)
    config = uvicorn.Config(app or empty, http=kind, lifespan="off", log_config=None)
    config.load()
    connection = kind(config, ServerState(), {})
    transport = Transport()
    connection.connection_made(transport)
    return connection, transport


async def test_requests_that_are_refused_at_once_leave_others_their_turn():
    """Hundreds of them come in one packet, and each costs as much as one that comes alone; no key is needed."""
    refused = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    connection, transport = connected()
    said = []
    turns = 0

    connection.data_received(refused * 300)
    while not said or said[-1] < 300:
        said.append(transport.said.count(b"HTTP/1.1 415 "))
        turns += 1
        assert turns < 300
        await asyncio.sleep(0)
    connection.connection_lost(None)

    assert max(after - before for before, after in zip([0, *said], said, strict=False)) <= 16


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n", None])
async def test_trailers_that_wait_for_their_end_are_charged(end):
    """As the beginning of a head is: 64 KiB of each connection, whatever becomes of its request."""
    charged = []
    connection, _ = connected(Clients(charge=charged.append))
    connection.data_received(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: "
    )
    for _ in range(6):
        connection.data_received(b"b" * 10_000)

    assert sum(charged) == 60_003
    if end is None:
        connection.connection_lost(None)
    else:
        connection.data_received(end)
    assert sum(charged) == 0


@pytest.mark.parametrize("app", [empty, waiting])
async def test_a_connection_that_has_ended_leaves_nothing_to_the_garbage_collector(app):
    """That looks at old objects seldom, and this may have some of a body."""
    gc.disable()
    try:
        connection, _ = connected(app=app)
        connection.data_received(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n" + bytes(8000))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ended = weakref.ref(connection)
        connection.connection_lost(None)
        del connection, _
        for _turn in range(5):
            await asyncio.sleep(0)

        assert ended() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("stopped_s", "closes_at"), [(0, 5.0), (10, 19.9)])
def test_a_client_that_rests_is_heard_after_the_router_has_stood_still(stopped_s, closes_at):
    """Its next request came in time, and is not read yet: it would be reset without an answer."""

    async def main():
        loop = simulated()
        connection, transport = connected()
        connection.data_received(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        loop.call_at(4.9, loop.stand_still, stopped_s)
        while not transport.closed:
            await advance(0.1)
        connection.connection_lost(None)

    assert in_simulated_time(main())[0] == pytest.approx(closes_at, abs=0.25)
