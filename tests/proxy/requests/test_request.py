"""The life of one request, against engines that only exist in memory."""

import asyncio
import json

import pytest

from pdrelay_proxy.core.model import Api, Role
from pdrelay_proxy.core.server_timing import server_timing
from pdrelay_proxy.errors import EngineError, EngineTimeout
from support.scripted import DONE, EVENT, EVENTS, JSON, Scripted, call, good_decode, pulled_prefill, router_of


class Timed(Scripted):
    """Engines that take a quarter and half of a second of a clock that is theirs."""

    def __init__(self, *parts, content_type=EVENTS, fails=None):
        super().__init__(self._prefill, self._decode)
        self.now = 0.0
        self._fails = fails
        self._answer = 200, list(parts) or [EVENT, DONE], content_type

    async def _prefill(self, leg):
        self.now += 0.25
        if self._fails is not None:
            raise self._fails
        return await pulled_prefill(leg)

    async def _decode(self, _):
        self.now += 0.5
        return self._answer


async def served(engines, x=1, y=1):
    """Serve a request to its end."""
    router = router_of(engines, x, y, clock=lambda: engines.now, retries=0, decode_only_fallback=False)
    client = await router.serve()
    assert not engines.open
    assert router.is_idle()
    return client


async def test_both_connections_of_a_good_request_are_given_back():
    """The next request needs no new one."""
    engines = Timed()
    await served(engines)

    assert engines.kept == 2


@pytest.mark.parametrize("fields", [{}, {"previous_response_id": "resp_before"}, {"max_output_tokens": 1}])
async def test_no_client_chooses_the_id_under_which_an_engine_keeps_its_response(fields):
    """Two clients with one id would continue each other's conversation; whether one engine serves them or two."""
    engines = Timed(b'{"object":"response","status":"completed","usage":{"output_tokens":1}}', content_type=JSON)
    router = router_of(engines, clock=lambda: engines.now)
    await router.serve(call(Api.RESPONSES, request_id="resp_of-both", **fields), name="r7")

    assert {json.loads(leg.body)["request_id"] for leg in engines.legs} == {"resp_r7"}
    assert len(engines.legs) == (1 if fields else 2)


async def test_each_leg_is_timed():
    """Until its answer begins."""
    client = await served(Timed())

    assert server_timing(client.record) == 'prefill;desc="prefill-0";dur=250.0, decode;desc="decode-0";dur=500.0'


async def test_a_failed_leg_is_timed_too():
    """How long a failure took is what one wants to know of it."""
    client = await served(Timed(fails=EngineTimeout("slow")))

    assert client.error == ("EngineTimeoutError", "slow")
    assert server_timing(client.record) == 'prefill;desc="prefill-0";dur=250.0'


async def test_a_whole_answer_is_collected_before_it_is_trusted():
    """If it breaks off, the status can still say so."""
    client = await served(Timed(b'{"id"', b":1}", content_type=JSON))
    assert (client.status, client.body) == (200, b'{"id":1}')
    assert not client.response.streams

    client = await served(Timed(b'{"id"', EngineError("broke off"), content_type=JSON))
    assert (client.status, client.error) == (502, ("EngineError", "broke off"))


async def test_an_end_without_a_line_break_is_an_end():
    """Servers differ in how they finish."""
    assert (await served(Timed(EVENT, b"data: [DONE]"))).body == EVENT + b"data: [DONE]"


@pytest.mark.parametrize(("x", "y", "missing"), [(0, 1, "prefill"), (1, 0, "decode"), (0, 0, "decode")])
async def test_missing_engines_are_noticed_before_any_work(x, y, missing):
    """A prefill without a decode engine would pin blocks for nothing."""
    engines = Timed()
    client = await served(engines, x=x, y=y)

    assert client.status == 503
    assert missing in client.error[1]
    assert not engines.legs


async def test_the_slot_of_the_decode_engine_is_held_while_the_prefill_runs():
    """Or its queue would be as long as the prefills that are under way allow, and no policy would see it."""
    go = asyncio.Event()

    async def prefill(leg):
        await go.wait()
        return await pulled_prefill(leg)

    router = router_of(Scripted(prefill, good_decode))
    client = router.start()
    await asyncio.sleep(0)
    loads = {member.instance.role: member.load.in_flight for member in router.registry.members()}
    go.set()
    await client.end()

    assert loads == {Role.PREFILL: 1, Role.DECODE: 1}
    assert router.is_idle()
