"""Waiting for a place."""

import asyncio
import random

import pytest

from pdrelay_proxy.core.admission.ticket import TicketState
from pdrelay_proxy.errors import KeyOverLimit, RouterFull
from pdrelay_proxy.requests.gate import Gate
from pdrelay_proxy.settings import Settings
from support.clock import Clock
from support.scripted import DONE, EVENT, Scripted, call, good_decode, never, pulled_prefill, router_of, until
from support.simulated_loop import advance, settle, simulated


class Crowd:
    """Tickets that stay, unless the gate refuses them."""

    def __init__(self, **limits):
        self.gate = Gate(Settings(**limits), Clock())
        self.inside = []
        self.refused = {}
        self.tickets = {}

    def arrive(self, name):
        ticket = self.tickets[name] = self.gate.arrive("a", 0, 10)
        if ticket.state is TicketState.WAITING:
            self.gate.watch(ticket, lambda: self._decided(name))
        else:
            self._enter(name)

    def _decided(self, name):
        self.gate.unwatch(self.tickets[name])
        self._enter(name)

    def _enter(self, name):
        try:
            self.gate.check(self.tickets[name])
            self.inside.append(name)
        except (KeyOverLimit, RouterFull) as error:
            self.refused[name] = error


@pytest.mark.parametrize(
    ("limits", "error", "says"),
    [
        ({"max_key_concurrency": 1}, KeyOverLimit, "the key a has 1 requests at work already (max_key_concurrency)"),
        ({"max_key_rate": 1}, KeyOverLimit, "the key a sends more than 1 requests a second (max_key_rate)"),
        ({"max_rate": 1}, RouterFull, "the router takes 1 requests a second, and this one is over it (max_rate)"),
        (
            {"max_inflight_bytes": 10},
            RouterFull,
            "the router holds as many bytes of requests as it may (max_inflight_bytes)",
        ),
        (
            {"max_concurrency": 1, "max_queue": 0},
            RouterFull,
            "the router has as many requests waiting as it may (max_queue)",
        ),
    ],
)
async def test_a_refusal_says_which_limit_it_was(limits, error, says):
    """By the name that its operator gave it."""
    crowd = Crowd(**limits)
    crowd.arrive("first")
    crowd.arrive("second")

    found = crowd.refused["second"]
    assert type(found) is error
    assert str(found) == says
    assert found.retry_after_s >= 1


async def test_more_places_are_filled_at_once():
    """When the limits change while requests wait."""
    crowd = Crowd(max_concurrency=1, max_queue=5, max_queue_wait_s=5)
    for number in range(3):
        crowd.arrive(number)
    assert crowd.gate.admission.waiting == 2
    crowd.gate.change(Settings(max_concurrency=3, max_queue=5, max_queue_wait_s=5))
    await until(lambda: crowd.inside == [0, 1, 2])


async def test_a_thousand_requests_through_a_narrow_gate_leave_nothing_behind():
    """Whatever becomes of each: served, left while it waits or while it is served, refused, expired."""
    limits = Settings(max_concurrency=7, max_queue=500, max_queue_wait_s=0.2, max_key_concurrency=900)
    clock = Clock()

    async def prefill(leg):
        await asyncio.sleep(random.random() * 0.002)
        return await pulled_prefill(leg)

    engines = Scripted(prefill, good_decode)
    router = router_of(engines, limits=limits, clock=clock)
    clients = [router.start(call(priority=number % 5), name=f"r{number}") for number in range(1000)]
    for client in clients[::11]:
        client.hang_up()
    await until(lambda: router.gate.admission.waiting < 300)
    clock.now += 0.2
    for client in clients:
        await client.end()

    by_status = [client.record.status for client in clients]
    served = by_status.count(200)
    left = by_status.count(499)
    told = by_status.count(503) + by_status.count(429)
    admission = router.gate.admission
    assert router.is_idle()
    assert not engines.open
    assert not router.gate._watching
    assert served > 0
    assert told > 0
    assert left > 0
    assert served + told + left == 1000
    assert told <= sum(admission.refused.values()) <= told + left  # some left before they heard it
    assert all(client.response.is_whole for client in clients if client.record.status == 200)


async def test_a_request_that_waits_too_long_is_told():
    """With a time for its next try; nobody has to look at the queue for it but the router's own timer."""
    engines = Scripted(never, good_decode)
    clock = Clock()
    router = router_of(engines, limits=Settings(max_concurrency=1, max_queue=5, max_queue_wait_s=0.2), clock=clock)
    first, second = router.start(name="a"), router.start(name="b")
    clock.now += 0.2
    await second.end()

    told = "the router had no place for this request within 0.2 s (max_concurrency)"
    assert (second.status, second.error) == (503, ("ServiceUnavailableError", told))
    assert b"retry-after: 5\r\n" in second.response.lines
    assert not first.is_over
    first.hang_up()
    assert router.is_idle()


def crowded(engines, **limits):
    """A router with one place, whose streams have a comment after 10 s without an event."""
    limits = Settings(max_concurrency=1, max_queue=5, **limits)
    return router_of(engines, limits=limits, clock=simulated().time, stream_comment_interval_s=10.0)


async def test_a_stream_that_waits_in_the_queue_gets_comments():
    """A proxy would close its connection: it does not know for what nothing comes. A whole answer gets none."""
    router = crowded(Scripted(pulled_prefill, good_decode), max_queue_wait_s=60.0)
    place = router.gate.arrive("-", 0, 0)
    stream = router.start(call(stream=True), name="a")
    whole = router.start(call(), name="b")
    await advance(25)
    waiting = (stream.status, stream.body, whole.status)
    router.gate.leave(place)
    await settle()

    assert waiting == (200, b": keep-alive\n\n" * 2, None)
    assert stream.body == b": keep-alive\n\n" * 2 + EVENT + DONE
    assert b"x-accel-buffering: no\r\n" in stream.response.lines
    assert [await each.end() and each.record.queue_s for each in (stream, whole)] == [25.0, 25.0]
    assert router.is_idle()


@pytest.mark.parametrize(("seconds", "has_comments"), [(5, False), (25, True)])
async def test_a_stream_that_waits_too_long_is_told_by_its_status_until_it_had_a_comment(seconds, has_comments):
    """Then by an event, as all that fails later."""
    router = crowded(Scripted(pulled_prefill, good_decode), max_queue_wait_s=float(seconds))
    router.gate.arrive("-", 0, 0)
    client = router.start(call(stream=True), name="a")
    await advance(seconds + 1)

    told = f"the router had no place for this request within {seconds} s (max_concurrency)"
    assert client.error == ("ServiceUnavailableError", told)
    assert client.status == (200 if has_comments else 503)
    assert client.body.startswith(b": keep-alive\n\n" * 2) is has_comments
