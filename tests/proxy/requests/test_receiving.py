"""A request up to its admission: its head, the pieces of its body, and what is wrong with them."""

import threading

from pdrelay_proxy.requests.body_reader import LARGE
from pdrelay_proxy.requests.lifecycle import RequestState
from pdrelay_proxy.settings import Settings
from support.scripted import Scripted, call, good_decode, good_prefill, pulled_prefill, router_of


def router(**options):
    return router_of(Scripted(good_prefill, good_decode), **options)


def long_call():
    """A body that is read in a thread."""
    return call(prompt="x" * (LARGE + 1))


async def test_a_body_may_come_in_any_pieces():
    """It is charged while it comes, and once it is here as part of its request."""
    waiting = router(limits=Settings(max_concurrency=0, max_queue=1, max_queue_wait_s=5.0))
    client = waiting.start(sends=False)
    body = call().body
    for place in range(len(body)):
        client.request.receive_body(body[place : place + 1])
        assert waiting.gate.admission.held_bytes == place + 1
    client.request.serve()
    assert client.request.state is RequestState.WAITING
    assert waiting.gate.admission.held_bytes == len(body)

    client.hang_up()
    assert waiting.is_idle()


async def test_a_client_that_leaves_while_its_body_is_read_is_gone_at_once():
    """What the thread finds out is for nobody."""
    before = router()
    may_end = threading.Event()
    for _ in range(2):  # both threads are busy, so it is still to be read when its client leaves
        before.body_reader.submit(may_end.wait)
    client = before.start(long_call())
    assert client.request.state is RequestState.RECEIVED
    client.hang_up()

    assert client.is_over
    assert before.is_idle()
    assert not before.sender.legs
    async with before.body_reader:
        may_end.set()


async def test_a_request_is_in_flight_from_its_head_on():
    """A router that is told to end waits for its body, and answers it when it has no more time."""
    router = router_of(Scripted(pulled_prefill, good_decode))
    client = router.start(sends=False)

    assert router.lifetime.in_flight == 1
    await router.requests.__aexit__()
    await client.end()
    assert client.status == 503
    assert router.is_idle()
