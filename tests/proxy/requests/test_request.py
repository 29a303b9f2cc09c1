"""The life of one request, against engines that only exist in memory."""

import asyncio
import json

import pytest

from support.scripted import DONE, EVENT, EVENTS, JSON, Scripted, call, never, router_of, until
from xpyd_proxy.core.model import EngineResponse, Role
from xpyd_proxy.core.request_record import CLIENT_CLOSED_REQUEST
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


async def test_the_bytes_of_the_decode_engine_are_the_answer():
    """Unchanged, after one prefill."""
    engines = Timed()
    client = await served(engines)

    assert (client.status, client.body) == (200, EVENT + EVENT + DONE)
    assert client.response.is_whole
    assert [(leg.instance.id, leg.path) for leg in engines.legs] == [
        ("prefill-0", "/v1/completions"),
        ("decode-0", "/v1/completions"),
    ]
    assert json.loads(engines.legs[1].body)["kv_transfer_params"] == PARAMS


async def test_both_connections_of_a_good_request_are_given_back():
    """The next request needs no new one."""
    engines = Timed()
    await served(engines)

    assert engines.kept == 2


async def test_both_legs_carry_the_clients_headers_and_our_id():
    """Once each: two ids in one request would be a riddle for the engine."""
    engines = Timed()
    await served(engines)

    assert [leg.headers for leg in engines.legs] == [(KEY, (b"x-request-id", b"xpyd-1"))] * 2


async def test_each_leg_is_timed():
    """Until its answer begins."""
    client = await served(Timed())

    assert client.record.server_timing() == 'prefill;desc="prefill-0";dur=250.0, decode;desc="decode-0";dur=500.0'


async def test_a_failed_leg_is_timed_too():
    """How long a failure took is what one wants to know of it."""
    client = await served(Timed(prefill=EngineTimeout("slow")))

    assert client.error == ("EngineTimeoutError", "slow")
    assert client.record.server_timing() == 'prefill;desc="prefill-0";dur=250.0'


async def test_a_prefill_has_its_time_limit():
    """And the client is told which engine has not kept it."""
    engines = Timed()
    engines.prefill = never
    router = router_with(engines)
    client = router.start(call(headers=(KEY,)))
    await asyncio.sleep(0)
    client.request.look(29.9)
    assert not client.is_over
    client.request.look(30.0)
    await client.end()

    assert client.error == ("EngineTimeoutError", "prefill-0 did not answer within 30 s")
    assert not engines.open
    assert router.is_idle()


async def test_nothing_more_is_read_than_the_client_takes():
    """A stream is not collected behind the client's back."""
    engines = Timed(parts=[EVENT] * 50 + [DONE])
    client = router_with(engines).start()
    client.response.on_write = lambda _: client.request.pause()
    await until(lambda: client.body == EVENT * 2)
    await asyncio.sleep(0.01)
    assert client.body == EVENT * 2

    client.response.on_write = lambda _: None
    client.request.resume()
    await client.end()
    assert client.body == EVENT * 50 + DONE


async def test_a_client_that_reads_nothing_from_the_start_is_waited_for():
    """The engine is held up as soon as its stream has begun."""
    engines = Timed(parts=[EVENT] * 50 + [DONE])
    client = router_with(engines).start()
    client.request.pause()
    await until(lambda: client.response.begun)
    await asyncio.sleep(0.01)
    assert client.body == EVENT

    client.request.resume()
    await client.end()
    assert client.body == EVENT * 50 + DONE


async def test_leaving_early_closes_the_engine_request():
    """The client has hung up: every further token would be made for nobody."""
    engines = Timed(parts=[EVENT] * 50 + [DONE])
    router = router_with(engines)
    client = router.start()
    client.response.on_write = lambda _: client.hang_up()
    await client.end()

    assert client.body == EVENT * 2
    assert not client.response.is_whole
    assert client.record.status == CLIENT_CLOSED_REQUEST
    assert not engines.open
    assert router.is_idle()


async def test_a_whole_answer_is_collected_before_it_is_trusted():
    """If it breaks off, the status can still say so."""
    client = await served(Timed(parts=[b'{"id"', b":1}"], content_type=JSON))
    assert (client.status, client.body) == (200, b'{"id":1}')
    assert not client.response.streams

    client = await served(Timed(parts=[b'{"id"', EngineError("broke off")], content_type=JSON))
    assert (client.status, client.error) == (502, ("EngineError", "broke off"))


async def test_the_first_event_decides_whether_there_is_a_reply():
    """However it arrives; comments before it belong to the stream."""
    parts = [b": keep", b"-alive\n\nda", b'ta: {"id":', b'"x"}\n', b"\n", DONE]
    assert (await served(Timed(parts=parts))).body == b"".join(parts)

    error = b'{"error":{"message":"no room","type":"x","param":null,"code":503}}'
    client = await served(Timed(parts=[b": keep-alive\n\n", b"data: " + error + b"\n\n", DONE]))
    assert (client.status, client.body) == (503, error)


@pytest.mark.parametrize("parts", [[], [b": keep-alive\n\n"], [EngineError("decode-0 broke off")]])
async def test_a_stream_without_any_event_is_no_reply(parts):
    """200 and nothing else would be an empty answer."""
    client = await served(Timed(parts=parts))

    assert client.status == 502
    assert client.error[1].startswith("decode-0")


@pytest.mark.parametrize("end", [[], [EngineError("decode-0 broke off")], [b'data: {"half'], [b"data: [DO"]])
async def test_a_stream_that_ends_early_ends_with_an_error_after_its_whole_lines(end):
    """What is sent on is good; half a line is not sent."""
    client = await served(Timed(parts=[EVENT, EVENT, *end]))

    assert client.got == EVENT + EVENT
    assert client.error[0] == "EngineError"
    assert client.error[1].startswith("decode-0")
    assert client.response.is_whole


async def test_an_end_without_a_line_break_is_an_end():
    """Servers differ in how they finish."""
    assert (await served(Timed(parts=[EVENT, b"data: [DONE]"]))).body == EVENT + b"data: [DONE]"


@pytest.mark.parametrize("parts", [[EVENT + DONE], [EVENT, DONE], [EVENT, EVENT, b"data: [DONE]"]])
async def test_an_end_that_comes_with_the_last_piece_is_an_end(parts):
    """A short answer comes in one read, with its end."""
    engines = Timed(parts=parts)
    engines.ends_at_once = True
    client = await served(engines)

    assert client.body == b"".join(parts)
    assert client.response.is_whole
    assert client.error is None


@pytest.mark.parametrize(
    ("prefill", "status", "kind"),
    [
        (EngineResponse(400, "application/json", b"{}"), 400, None),
        (EngineResponse(500, "application/json", b"{}"), 502, "EngineError"),
        (EngineResponse(200, "application/json", b"{}"), 502, "EngineError"),
        (EngineTimeout("slow"), 504, "EngineTimeoutError"),
    ],
)
async def test_without_a_prefill_nothing_is_decoded(prefill, status, kind):
    """The decode engine would do the work of both, or die."""
    engines = Timed(prefill=prefill)
    client = await served(engines)

    assert client.status == status
    assert (client.error and client.error[0]) == kind
    assert len(engines.legs) == 1


async def test_a_refused_decode_is_told_in_the_engines_words():
    """Its body is read, then its request is closed."""
    body = b'{"error":{"message":"too long"}}'
    client = await served(Timed(parts=[body], status=400, content_type=JSON))

    assert (client.status, client.body) == (400, body)


async def test_a_request_that_cannot_be_split_needs_one_engine():
    """And none of the other kind."""
    engines = Timed()
    client = await served(engines, call(n=2), x=0)

    assert [leg.instance.id for leg in engines.legs] == ["decode-0"]
    assert "kv_transfer_params" not in json.loads(engines.legs[0].body)
    assert client.record.server_timing() == 'mode;desc="single", reason;desc="n", decode;desc="decode-0";dur=500.0'


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


async def test_a_shutdown_tells_each_request_that_is_under_way():
    """A stream by an event at its end, and what has not begun by a status."""
    engines = Timed(parts=[EVENT, never()])
    router = router_with(engines)
    async with router.requests:
        streaming = router.start(name="a")
        await until(lambda: streaming.response.begun)
        engines.prefill = never
        waiting = router.start(name="b")
        await until(lambda: len(engines.open) == 2)
    said = "ServiceUnavailableError", "the router has to end before this request is finished"

    assert (streaming.got, streaming.error, streaming.response.keep_alive) == (EVENT, said, False)
    assert (waiting.status, waiting.error) == (503, said)
    assert b"retry-after: 1\r\n" in waiting.response.lines
    assert not engines.open
    assert router.is_idle()
