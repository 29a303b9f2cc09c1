"""The life of one request, against engines that only exist in memory."""

import asyncio
import json

import pytest

from support.scripted import DONE, EVENT, EVENTS, JSON, Scripted, call, router_of
from xpyd_proxy.core.model import EngineResponse, Role
from xpyd_proxy.core.routing.request_rules import Timeouts
from xpyd_proxy.errors import EngineError, EngineTimeout

PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
}
PREFILLED = EngineResponse(200, "application/json", json.dumps({"kv_transfer_params": PARAMS}).encode())
KEY = (b"authorization", b"k")


class Timed(Scripted):
    """Engines that take a quarter and half of a second of a clock that is theirs."""

    def __init__(self, *, prefill=PREFILLED, parts=(EVENT, EVENT, DONE), status=200, content_type=EVENTS):
        super().__init__(self._prefill, self._decode)
        self.now = 0.0
        self._prefilled, self._answer = prefill, (status, list(parts), content_type)

    async def _prefill(self, _):
        self.now += 0.25
        if isinstance(self._prefilled, Exception):
            raise self._prefilled
        return self._prefilled

    async def _decode(self, _):
        self.now += 0.5
        return self._answer


def router_with(engines, x=1, y=1, **options):
    options = {"retries": 0, "decode_only_fallback": False, "patience": Timeouts(prefill_s=30.0)} | options
    return router_of(engines, x, y, clock=lambda: engines.now, **options)


async def served(engines, asked=None, **options):
    """Serve a request to its end."""
    router = router_with(engines, **options)
    client = await router.serve(asked or call(headers=(KEY,)), name="xpyd-1")
    assert not engines.open
    assert router.is_idle()
    return client


async def test_both_connections_of_a_good_request_are_given_back():
    """The next request needs no new one."""
    engines = Timed()
    await served(engines)

    assert engines.kept == 2


async def test_each_leg_is_timed():
    """Until its answer begins."""
    client = await served(Timed())

    assert client.record.server_timing() == 'prefill;desc="prefill-0";dur=250.0, decode;desc="decode-0";dur=500.0'


async def test_a_failed_leg_is_timed_too():
    """How long a failure took is what one wants to know of it."""
    client = await served(Timed(prefill=EngineTimeout("slow")))

    assert client.error == ("EngineTimeoutError", "slow")
    assert client.record.server_timing() == 'prefill;desc="prefill-0";dur=250.0'


async def test_a_whole_answer_is_collected_before_it_is_trusted():
    """If it breaks off, the status can still say so."""
    client = await served(Timed(parts=[b'{"id"', b":1}"], content_type=JSON))
    assert (client.status, client.body) == (200, b'{"id":1}')
    assert not client.response.streams

    client = await served(Timed(parts=[b'{"id"', EngineError("broke off")], content_type=JSON))
    assert (client.status, client.error) == (502, ("EngineError", "broke off"))


async def test_an_end_without_a_line_break_is_an_end():
    """Servers differ in how they finish."""
    assert (await served(Timed(parts=[EVENT, b"data: [DONE]"]))).body == EVENT + b"data: [DONE]"


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
    engines = Timed()

    async def prefill(_):
        await go.wait()
        return PREFILLED

    engines.prefill = prefill
    router = router_with(engines)
    client = router.start()
    await asyncio.sleep(0)
    loads = {member.instance.role: member.load.own for member in router.registry.members()}
    go.set()
    await client.end()

    assert loads == {Role.PREFILL: 1, Role.DECODE: 1}
    assert router.is_idle()
