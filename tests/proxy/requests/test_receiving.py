"""A request up to its admission: its head, the pieces of its body, and what is wrong with them."""

import json

import pytest

from support.scripted import DONE, EVENT, Asked, Scripted, call, good_decode, good_prefill, pulled_prefill, router_of
from xpyd_proxy.core.admission.lifetime import Step
from xpyd_proxy.core.admission.limits import AdmissionLimits
from xpyd_proxy.core.model import Role, SingleEngineReason
from xpyd_proxy.core.request_record import CLIENT_CLOSED_REQUEST
from xpyd_proxy.errors import EngineError
from xpyd_proxy.requests.body_reader import LARGE
from xpyd_proxy.requests.lifecycle import RequestState
from xpyd_proxy.settings import Settings


def router(**options):
    return router_of(Scripted(good_prefill, good_decode), **options)


def long_call():
    """A body that is read in a thread."""
    return call(prompt="x" * (LARGE + 1))


async def test_a_body_may_come_in_any_pieces():
    """It is charged while it comes, and once it is here as part of its request."""
    waiting = router(limits=AdmissionLimits(concurrency=0, queue=1, wait_s=5.0))
    client, body = waiting.start(sends=False), call().body
    for place in range(len(body)):
        client.request.take(body[place : place + 1])
        assert waiting.gate.admission.held_bytes == place + 1
    client.request.begin()
    assert client.request.state is RequestState.WAITING
    assert waiting.gate.admission.held_bytes == len(body)

    client.hang_up()
    assert waiting.is_idle()


@pytest.mark.parametrize("pieces", [1, 3, 1000])
async def test_a_long_body_is_served_as_a_short_one(pieces):
    """It is read in a thread; nobody else waits for it."""
    asked, before = long_call(), router()
    client = before.start(sends=False)
    size = len(asked.body) // pieces + 1
    for place in range(0, len(asked.body), size):
        client.request.take(asked.body[place : place + size])
    client.request.begin()
    assert client.request.state is RequestState.RECEIVED
    await client.end()

    assert client.body == EVENT + DONE
    assert json.loads(before.engines.legs[0].body)["prompt"] == json.loads(asked.body)["prompt"]
    assert before.is_idle()


async def test_a_client_that_leaves_while_its_body_is_read_is_gone_at_once():
    """What the thread finds out is for nobody."""
    before = router()
    client = before.start(long_call())
    assert client.request.state is RequestState.RECEIVED
    client.hang_up()

    assert client.is_over
    assert before.is_idle()
    assert not before.engines.legs
    async with before.examiner:
        pass


async def test_a_client_that_leaves_within_its_body_holds_nothing():
    """Whatever of it has come."""
    before = router()
    client = before.start(sends=False)
    client.request.take(b'{"prompt":')
    client.hang_up()
    await client.end()

    assert client.record.status == CLIENT_CLOSED_REQUEST
    assert not client.response.begun
    assert before.is_idle()


@pytest.mark.parametrize("is_long", [True, False])
async def test_what_is_no_json_is_refused(is_long):
    """By the thread, too."""
    before = router()
    client = await before.serve(Asked("/v1/completions", b"{" + b" " * (LARGE if is_long else 0)))

    assert (client.status, client.error[0]) == (400, "BadRequestError")
    assert before.is_idle()
    assert not before.engines.legs


async def test_a_body_that_is_too_large_is_refused_while_it_comes():
    """What comes of it later is dropped."""
    before = router(settings=Settings(max_body_bytes=100))
    client = before.start(sends=False)
    client.request.take(b"x" * 100)
    assert not client.is_over
    client.request.take(b"x")
    client.request.take(b"x" * 1000)
    client.request.begin()
    await client.end()

    assert (client.status, client.error[0]) == (413, "RequestTooLargeError")
    assert before.is_idle()


async def test_bodies_of_more_bytes_than_the_router_holds_are_refused_while_they_come():
    """However small each piece is."""
    before = router(limits=AdmissionLimits(held_bytes=100))
    client = before.start(sends=False)
    for _ in range(101):
        client.request.take(b"x")
    await client.end()

    assert (client.status, client.error[0]) == (503, "ServiceUnavailableError")
    assert "max_inflight_bytes" in client.error[1]
    assert before.is_idle()


async def test_a_head_that_is_refused_is_answered_without_its_body():
    """And nothing is sent to an engine."""
    before = router()
    client = await before.serve(call(headers=((b"origin", b"https://elsewhere.example"),)))

    assert (client.status, client.error[0]) == (403, "PermissionDeniedError")
    assert before.is_idle()
    assert not before.engines.legs


async def test_a_router_that_is_about_to_end_keeps_no_connection():
    """The client's next request goes to another one."""
    before = router()
    before.lifetime.on(Step.TOLD)
    client = await before.serve()
    assert (client.status, client.response.keep_alive) == (200, False)

    before.lifetime.on(Step.GRACE_OVER)
    client = await before.serve(name="late")
    assert (client.status, client.error[0]) == (503, "ServiceUnavailableError")
    assert b"retry-after: 1\r\n" in client.response.lines
    assert before.is_idle()


async def test_a_call_that_generates_no_text_goes_to_one_engine_as_it_is():
    """And to another one if that fails."""
    body = b'{"input": "hi",  "model":"m"}'

    async def decode(leg):
        if leg.instance.id == "decode-0":
            raise EngineError("broke off")
        return 200, [b'{"data":', b"[]}"], "application/json"

    engines = Scripted(good_prefill, decode)
    before = router_of(engines, y=2)
    client = await before.serve(Asked("/v1/embeddings", body))

    assert (client.status, client.body) == (200, b'{"data":[]}')
    assert [(leg.path, leg.body) for leg in engines.legs] == [("/v1/embeddings", body)] * 2
    assert not engines.of(Role.PREFILL)
    assert (client.record.mode, client.record.single_reason) == ("single", SingleEngineReason.ONE_LEG)
    assert before.is_idle()


async def test_a_request_is_in_flight_from_its_head_on():
    """A router that is told to end waits for its body, and answers it when it has no more time."""
    router = router_of(Scripted(pulled_prefill, good_decode))
    client = router.start(sends=False)

    assert router.lifetime.in_flight == 1
    await router.requests.__aexit__()
    await client.end()
    assert client.status == 503
    assert router.is_idle()
