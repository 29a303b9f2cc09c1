"""The loop that owns the clock tells the order of events, and says so when a test waits for nothing."""

import asyncio
import socket
import time

import pytest

from support.simulated_loop import Stuck, advance, in_simulated_time, settle


def test_an_hour_of_waiting_takes_no_time():
    seconds, _ = in_simulated_time(asyncio.sleep(3600))

    assert seconds == 3600


def test_timers_come_in_their_order_and_settle_lets_none_come():
    order = []

    async def story():
        loop = asyncio.get_running_loop()
        loop.call_later(2, order.append, "two")
        loop.call_later(1, order.append, "one")
        loop.call_soon(loop.call_soon, order.append, "soon")
        await settle()
        order.append("calm")
        await advance(1.5)
        order.append("later")
        await advance(1.5)

    in_simulated_time(story())

    assert order == ["soon", "calm", "one", "later", "two"]


def test_settle_waits_for_bytes_between_socket_pairs_and_for_threads():
    heard = []

    async def story():
        near, far = socket.socketpair()
        reader, near_writer = await asyncio.open_connection(sock=near)
        _, writer = await asyncio.open_connection(sock=far)

        async def listen():
            heard.append(await reader.readexactly(3))
            heard.append(await asyncio.to_thread(time.sleep, 0.02))

        task = asyncio.create_task(listen())
        writer.write(b"abc")
        await settle()
        assert task.done()
        for each in (writer, near_writer):
            each.close()
            await each.wait_closed()

    seconds, _ = in_simulated_time(story())

    assert heard == [b"abc", None]
    assert seconds == 0


def test_a_test_that_waits_for_what_nobody_does_fails_and_names_its_tasks():
    async def forgotten():
        await asyncio.Event().wait()

    async def story():
        await asyncio.create_task(forgotten(), name="the one that waits")

    with pytest.raises(Stuck, match="the one that waits"):
        in_simulated_time(story())
