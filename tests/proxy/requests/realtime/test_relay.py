"""The end of a session, with sides in memory."""

import asyncio

from pdrelay_proxy.core.protocol.realtime import Side, SocketClosed
from pdrelay_proxy.requests.realtime.relay import Relay


class Socket:
    """One side. It says nothing, and takes its end when the test wants it."""

    def __init__(self):
        self.has_left, self.is_told, self.takes_it = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_cut_off = False

    async def receive(self):
        await self.has_left.wait()
        raise SocketClosed(Side.CLIENT, 1000, "")

    async def send(self, message):
        raise AssertionError

    async def close(self, code, reason):
        self.is_told.set()
        await self.takes_it.wait()

    def abort(self):
        self.is_cut_off = True


async def test_a_server_without_more_time_cuts_off_the_side_that_does_not_take_its_end():
    """That is the end of the session as well: no error, and nothing is left at work."""
    client, engine = Socket(), Socket()
    session = asyncio.ensure_future(Relay(client, engine, idle_s=60, total_s=60, clock=lambda: 0.0).run())
    client.has_left.set()
    client.takes_it.set()
    await engine.is_told.wait()
    await asyncio.sleep(0)
    session.cancel()
    end = await session

    assert end.code == 1000
    assert (client.is_cut_off, engine.is_cut_off) == (False, True)
    assert asyncio.all_tasks() == {asyncio.current_task()}
