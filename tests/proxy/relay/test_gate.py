"""Waiting for a place."""

import asyncio
import time

import pytest

from support.sim import until_async
from xpyd_proxy.core.limits import Limits
from xpyd_proxy.errors import KeyOverLimit, RouterFull
from xpyd_proxy.relay.gate import Gate


class Requests:
    """Requests that stay until they are told to end."""

    def __init__(self, **limits):
        self.gate = Gate(Limits(**limits), time.monotonic)
        self.inside = []

    def start(self, name, key="a", priority=0):
        return asyncio.create_task(self._stay(name, key, priority))

    async def _stay(self, name, key, priority):
        async with self.gate.admitted(key, priority, 10):
            self.inside.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                self.inside.remove(name)


async def end(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_the_next_one_enters_when_one_leaves():
    """The more important first."""
    requests = Requests(concurrency=1, queue=5, wait_s=5)
    tasks = [requests.start("first"), requests.start("second"), requests.start("urgent", priority=-1)]
    await until_async(lambda: requests.gate.admission.waiting == 2)
    assert requests.inside == ["first"]

    await end(tasks[0])
    await until_async(lambda: requests.inside == ["urgent"])
    await end(tasks[2])
    await until_async(lambda: requests.inside == ["second"])
    await end(tasks[1])
    assert (requests.gate.admission.admitted, requests.gate.admission.held_bytes) == (0, 0)


async def test_a_client_that_leaves_while_it_waits_frees_its_place_at_once():
    """In the same turn of the event loop."""
    requests = Requests(concurrency=1, queue=1, wait_s=5)
    tasks = [requests.start("first"), requests.start("second")]
    await until_async(lambda: requests.gate.admission.waiting == 1)
    await end(tasks[1])

    assert requests.gate.admission.waiting == 0
    await end(tasks[0])


async def test_waiting_has_an_end():
    """Which the client is told, with a time for its next try."""
    requests = Requests(concurrency=1, queue=5, wait_s=0.02)
    first = requests.start("first")
    await until_async(lambda: requests.inside == ["first"])

    with pytest.raises(RouterFull, match=r"no place for this request within 0.02 s \(max_concurrency\)") as caught:
        await requests.start("second")
    assert caught.value.retry_after_s == 5
    await end(first)


async def test_one_that_is_less_important_gives_way():
    """It need not wait to be told."""
    requests = Requests(concurrency=1, queue=1, wait_s=5)
    first, second = requests.start("first"), requests.start("second")
    await until_async(lambda: requests.gate.admission.waiting == 1)
    third = requests.start("third", priority=-5)

    with pytest.raises(RouterFull, match=r"as many requests waiting as it may \(max_queue\)"):
        await second
    await end(first, third)
    assert requests.gate.admission.waiting == 0


@pytest.mark.parametrize(
    ("limits", "error", "says"),
    [
        ({"key_concurrency": 1}, KeyOverLimit, "the key a has 1 requests at work already (max_key_concurrency)"),
        ({"key_rate": 1}, KeyOverLimit, "the key a sends more than 1 requests a second (max_key_rate)"),
        ({"rate": 1}, RouterFull, "the router takes 1 requests a second, and this one is over it (max_rate)"),
        ({"held_bytes": 10}, RouterFull, "the router holds as many bytes of requests as it may (max_held_bytes)"),
        ({"concurrency": 1}, RouterFull, "the router has as many requests waiting as it may (max_queue)"),
    ],
)
async def test_a_refusal_says_which_limit_it_was(limits, error, says):
    """By the name that its operator gave it."""
    requests = Requests(**limits)
    first = requests.start("first")
    await until_async(lambda: requests.inside == ["first"])

    with pytest.raises(error) as caught:
        await requests.start("second")
    assert str(caught.value) == says
    assert caught.value.retry_after_s >= 1
    await end(first)


async def test_more_places_are_filled_at_once():
    """When the limits change while requests wait."""
    requests = Requests(concurrency=1, queue=5, wait_s=5)
    tasks = [requests.start(str(number)) for number in range(3)]
    await until_async(lambda: requests.gate.admission.waiting == 2)
    requests.gate.change(Limits(concurrency=3, queue=5, wait_s=5))
    await until_async(lambda: len(requests.inside) == 3)
    await end(*tasks)


async def test_a_thousand_requests_through_a_narrow_gate_leave_nothing_behind():
    """Whatever becomes of each: served, cancelled while it waits or while it is served, refused, expired."""
    gate, served = Gate(Limits(concurrency=7, queue=500, wait_s=0.05, key_concurrency=400), time.monotonic), []

    async def one(number):
        async with gate.admitted(str(number % 3), number % 5, number):
            await asyncio.sleep(0.0005)
            served.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(1000)]
    await asyncio.sleep(0.005)
    for task in tasks[::11]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)

    admission = gate.admission
    assert (admission.admitted, admission.waiting, admission.held_bytes) == (0, 0, 0)
    assert not gate._woken
    told = sum(isinstance(result, RouterFull | KeyOverLimit) for result in results)
    cancelled = sum(isinstance(result, asyncio.CancelledError) for result in results)
    assert told <= sum(admission.refused.values()) <= told + cancelled  # some left before they heard it
    assert told + cancelled + len(served) == 1000
