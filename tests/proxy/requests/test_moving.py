"""Streams that move: cut at a token of one engine, and continued by two others, without a token lost or doubled."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.greedy import HALF, event, events, ids_of, read
from support.scripted import (
    NEVER_BROKEN,
    Scripted,
    call,
    never,
    params_of,
    prefilled,
    pulled_prefill,
    request_id,
    router_of,
    until,
)
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.fleet.compatibility import EngineCapabilities
from xpyd_proxy.core.fleet.engine_metrics import ShownLoad
from xpyd_proxy.core.model import Api, EngineResponse, Role
from xpyd_proxy.core.request_record import MoveOutcome
from xpyd_proxy.core.request_timeline import router_timeline
from xpyd_proxy.errors import ConfigError, EngineError
from xpyd_proxy.io.request_path.access_log import text
from xpyd_proxy.live import check
from xpyd_proxy.requests.lifecycle import RequestState
from xpyd_proxy.settings import Settings

BODY = {"stream": True, "temperature": 0, "max_tokens": 24, "stream_options": {"include_usage": True}}
PROMPTS = {Api.COMPLETIONS: {"prompt": "hi"}, Api.CHAT: {"messages": [{"role": "user", "content": "hi"}]}}


class Engines(Scripted):
    """They free blocks when they are asked to."""

    async def ask(self, leg, *, timeout_s):
        return EngineResponse(400, "application/json", b"{}")


class Fleet:
    """Engines that stop behind some events of a stream until they are let go, and the router before them."""

    def __init__(self, x=1, y=2, *, holds_at=(8,), prefill=pulled_prefill, per_event=1, then=None, **options):
        """``holds_at``: after how many events the engines stop, one leg after the other; later legs do not stop."""
        self.engines = Engines(prefill, self._decode)
        self.router = router_of(self.engines, x, y, **({"resume_streams": True} | options))
        self.go_on = asyncio.Event()
        self.sent = 0  # events of the stream that stops now
        self._holds_at, self._per_event, self._then = list(holds_at), per_event, then or {}
        for name in ("decode-0", "decode-1", "decode-2")[:y]:
            self.router.registry.learn(name, EngineCapabilities(engine_id=f"engine of {name}"))

    async def _decode(self, leg):
        if (script := self._then.get(leg.instance.id)) is not None:
            return await script(leg)
        stream = list(events(json.loads(leg.body), name=f"cmpl-{request_id(leg)}", per_event=self._per_event))
        if not self._holds_at:
            return 200, stream
        at = self._holds_at.pop(0)
        if at >= len(stream):
            return 200, stream
        return 200, [*stream[:at], self._wait(len(stream[:at])), *stream[at:]]

    async def _wait(self, sent):
        self.sent = sent
        await self.go_on.wait()
        return b": nothing\n\n"

    def drain(self, name="decode-0"):
        self.router.registry.drain(name, now=0.0, moves=True)
        self.router.moves.look()

    @property
    def outcomes(self):
        self.router.telemetry.later.settle()
        return {(outcome,): n for (_, outcome), n in self.router.telemetry.counters.streams_moved.items()}


def whole(api, **fields):
    """What a client should have read at the end."""
    return read(b"".join(events(BODY | PROMPTS[api] | fields, name="cmpl-r")))


def asked(api, **fields):
    return call(api, **BODY | PROMPTS[api] | fields)


async def cut_once(fleet, api=Api.COMPLETIONS, **fields):
    """Serve a request whose engine is drained when it has stopped."""
    client = fleet.router.start(asked(api, **fields))
    await until(lambda: fleet.sent)
    fleet.drain(client.request.streams_from)
    await client.end()
    assert not fleet.engines.open
    assert fleet.router.is_idle()
    return client


@pytest.mark.parametrize("api", PROMPTS)
async def test_the_client_gets_one_stream(api):
    """One id, one usage as of one request, one end; the engine that drains is closed before others are asked."""
    fleet = Fleet()
    client = await cut_once(fleet, api)

    assert read(client.body) == whole(api)
    assert [leg.instance.id for leg in fleet.engines.legs] == ["prefill-0", "decode-0", "prefill-0", "decode-1"]
    assert len({request_id(leg) for leg in fleet.engines.legs}) == 2
    assert fleet.outcomes == {("moved",): 1}


@pytest.mark.parametrize("api", PROMPTS)
async def test_the_prefill_engine_asks_the_one_that_drains_for_all_so_far(api):
    """Its prompt is the client's and the tokens that were made; the next engine reads that prompt's KV cache."""
    fleet = Fleet()
    await cut_once(fleet, api)

    _, first, prefill, decode = (json.loads(leg.body) for leg in fleet.engines.legs)
    told = params_of(fleet.engines.legs[2])
    made = len(ids_of(prefill)) - len(ids_of(first))
    assert told["xpyd_cached_on"] == "engine of decode-0"
    assert told["xpyd_cached_share"] == 1
    assert told["do_remote_decode"] is True
    assert 0 < made <= 8
    assert prefill["max_tokens"] == 1
    assert decode["max_tokens"] == 24 - made
    assert decode["kv_transfer_params"]["remote_engine_id"] == "e1"
    assert ids_of(decode) == ids_of(prefill)


@given(
    api=st.sampled_from(tuple(PROMPTS)),
    tokens=st.integers(2, 30),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=2),
    per_event=st.integers(1, 3),
    stops=st.lists(st.integers(0, 39), max_size=2),
    least=st.integers(0, 4),
    prompt=st.text(min_size=1, max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_wherever_it_is_cut(api, tokens, cuts, per_event, stops, least, prompt):
    """Texts, usage and end are those of one engine: behind half a character, before an end, twice in a row."""
    said = {"prompt": prompt} if api is Api.COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    fields = {"max_tokens": tokens, "stop_token_ids": stops, "min_tokens": min(least, tokens)} | said

    async def serve():
        fleet = Fleet(y=3, holds_at=cuts, per_event=per_event)
        client = fleet.router.start(asked(api, **fields))
        for _ in cuts:
            await until(lambda: fleet.sent or client.is_over)
            if client.is_over:
                break
            fleet.sent, leg = 0, client.request.record.decode
            fleet.drain(leg.instance)
            if client.request.record.decode is leg:
                fleet.go_on.set()  # it is not cut there
        fleet.go_on.set()
        await client.end()
        assert fleet.router.is_idle()
        return client

    client = asyncio.run(serve())

    assert client.error is None
    assert read(client.body) == whole(api, **fields)


STAYING = {
    "stop texts": {"stop": ["zzz"]},
    "logprobs": {"logprobs": 1},
    "a seed": {"temperature": 1, "seed": 7},
    "penalties": {"presence_penalty": 0.5},
}


@pytest.mark.parametrize("fields", STAYING.values(), ids=STAYING)
async def test_a_stream_that_cannot_go_on_exactly_ends_at_its_engine(fields):
    """It is counted once, and the engine keeps draining."""
    fleet = Fleet()
    client = fleet.router.start(asked(Api.COMPLETIONS, **fields))
    await until(lambda: fleet.sent)
    fleet.drain()
    fleet.router.moves.look()
    fleet.go_on.set()
    await client.end()

    assert client.error is None
    assert len(fleet.engines.legs) == 2
    assert fleet.outcomes == {("stayed",): 1}


@pytest.mark.parametrize("options", [{"resume_streams": False}, {"x": 0}, {"y": 1}], ids=str)
async def test_nothing_is_cut_that_no_engine_can_take(options):
    """Without the tokens, without a prefill engine, without another decode engine."""
    fleet = Fleet(**options)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    before = len(fleet.engines.legs)
    fleet.drain(client.request.record.decode.instance)
    fleet.go_on.set()
    await client.end()

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert len(fleet.engines.legs) == before


async def test_a_sampled_stream_is_cut_where_its_text_is_complete():
    """What it has shown of a character could be followed by other tokens at another engine."""

    def half(number):
        return event({"id": "r", "choices": [{"index": 0, "text": "", "finish_reason": None, "token_ids": [number]}]})

    def full(number, **more):
        told = {"index": 0, "text": f" {number}", "finish_reason": None, "token_ids": [number]} | more
        return event({"id": "r", "choices": [told]})

    middle, end = asyncio.Event(), asyncio.Event()
    seen = []

    async def wait(what, then):
        seen.append(what)
        await what.wait()
        return then

    async def decode(leg):
        if leg.instance.id == "decode-1":
            return 200, [full(5, finish_reason="length"), b"data: [DONE]\n\n"]
        two = {"index": 0, "text": " 1 2", "finish_reason": None, "token_ids": [1, 2]}  # of several tokens
        first = event({"id": "r", "choices": [two | {"prompt_token_ids": [9]}]})
        return 200, [full(8, prompt_token_ids=[9]), first, wait(middle, half(HALF)), wait(end, full(4)), never()]

    fleet = Fleet(then={"decode-0": decode, "decode-1": decode})
    client = fleet.router.start(asked(Api.COMPLETIONS, temperature=1))
    await until(lambda: seen == [middle])
    fleet.drain()
    assert client.request.streams_from == "decode-0"
    middle.set()
    await until(lambda: seen == [middle, end])
    fleet.router.moves.look()
    assert client.request.streams_from == "decode-0"
    end.set()
    await until(lambda: b" 4" in client.body)
    fleet.router.moves.look()
    await client.end()

    assert read(client.body)[0] == " 8 1 2 4 5"
    assert json.loads(fleet.engines.legs[-1].body)["prompt"] == [9, 8, 1, 2, HALF, 4]


async def test_so_many_move_at_the_same_time():
    """The prefill engine has other things to do; a move that is over makes room for the next."""
    waiting, go_on = [], asyncio.Event()

    async def prefill(leg):
        if "xpyd_cached_on" in params_of(leg):
            waiting.append(leg)
            await go_on.wait()
        return await pulled_prefill(leg)

    fleet = Fleet(prefill=prefill, holds_at=[8] * 10, move_concurrency=3, y=1)
    clients = [fleet.router.start(asked(Api.COMPLETIONS), f"r{number}") for number in range(10)]
    await until(lambda: all(client.request.state is RequestState.STREAMING for client in clients))
    fleet.router.registry.add(Role.DECODE, Address("http", "h", 9))
    fleet.drain()
    await until(lambda: len(waiting) == 3)
    for _ in range(20):
        fleet.router.moves.look()
        await asyncio.sleep(0)

    assert len(waiting) == 3
    go_on.set()
    for client in clients:
        await client.end()
        assert read(client.body)[0] == whole(Api.COMPLETIONS)[0]
    assert fleet.outcomes == {("moved",): 10}
    assert fleet.router.is_idle()


async def test_the_engine_is_not_empty_while_its_kv_cache_is_read():
    """An operator who sees it drained stops it."""
    asks, go_on = [], asyncio.Event()

    async def prefill(leg):
        if "xpyd_cached_on" in params_of(leg):
            asks.append(fleet.router.registry.get("decode-0").load.own)
            await go_on.wait()
        return await pulled_prefill(leg)

    fleet = Fleet(prefill=prefill)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.drain()
    await until(lambda: asks)
    assert not fleet.router.registry.settle(patience_s=60, now=1.0)
    go_on.set()
    await client.end()

    assert asks == [1]
    assert [one.id for one in fleet.router.registry.settle(patience_s=60, now=1.0)] == ["decode-0"]


# ---- moves that fail


async def test_if_the_prefill_engine_fails_another_takes_its_place():
    """Nothing of the rest is shown yet: both legs are sent again."""

    async def prefill(leg):
        if "xpyd_cached_on" in params_of(leg) and leg.instance.id == first:
            raise EngineError("dead")
        return await pulled_prefill(leg)

    fleet = Fleet(2, prefill=prefill)
    first = "prefill-0"
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.engines.of(Role.PREFILL)[-1].instance.id == "prefill-1"
    assert [str(retry) for retry in client.record.retries] == ["prefill-0 bad_response"]
    assert fleet.outcomes == {("moved",): 1}


async def test_without_a_prefill_engine_another_decode_engine_computes_the_rest():
    """As for a stream that broke off."""

    async def prefill(leg):
        if "xpyd_cached_on" in params_of(leg):
            raise EngineError("dead")
        return await pulled_prefill(leg)

    fleet = Fleet(prefill=prefill)
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.engines.legs[-1].instance.id == "decode-1"
    assert "kv_transfer_params" not in json.loads(fleet.engines.legs[-1].body)
    assert fleet.outcomes == {("resumed",): 1}


@pytest.mark.parametrize("api", PROMPTS)
async def test_without_another_decode_engine_the_stream_goes_back(api):
    """The one that drains has the KV cache, and lives."""

    async def dead(leg):
        raise EngineError("dead", reached=False)

    fleet = Fleet(then={"decode-1": dead})
    client = await cut_once(fleet, api)

    assert read(client.body) == whole(api)
    assert fleet.engines.legs[-1].instance.id == "decode-0"
    assert fleet.outcomes == {("resumed",): 1}


async def test_if_all_fail_the_client_gets_an_error():
    """Behind what it has; never another text."""

    async def dead(leg):
        raise EngineError("dead")

    async def once(leg):
        if len(fleet.engines.of(Role.DECODE)) > 1:
            raise EngineError("dead, too")
        stream = list(events(json.loads(leg.body), name="cmpl-r"))
        return 200, [*stream[:8], fleet._wait(8)]

    fleet = Fleet(then={"decode-0": once, "decode-1": dead})
    client = await cut_once(fleet)

    assert client.error == ("EngineError", "dead, too")
    assert whole(Api.COMPLETIONS)[0].startswith(read(client.got)[0])
    assert fleet.outcomes == {("failed",): 1}


async def test_an_engine_that_breaks_off_behind_the_move_is_followed_by_another():
    """By the rules of streams that break off."""

    async def breaking(leg):
        stream = list(events(json.loads(leg.body), name="cmpl-x"))
        return 200, [*stream[:5], EngineError("broke off")]

    fleet = Fleet(y=3, then={"decode-1": breaking})
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.outcomes == {("moved",): 1}


async def test_a_stream_that_breaks_off_behind_its_move_goes_back_if_nobody_else_is_left():
    """The engine that drains lives, and has most of its KV cache; it gets nothing else."""

    async def breaking(leg):
        stream = list(events(json.loads(leg.body), name="cmpl-x"))
        return 200, [*stream[:5], EngineError("broke off")]

    fleet = Fleet(then={"decode-1": breaking})
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert [leg.instance.id for leg in fleet.engines.of(Role.DECODE)] == ["decode-0", "decode-1", "decode-0"]
    assert fleet.outcomes == {("moved",): 1}


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_engines_have_little_time_for_a_move(side):
    """The client waits: the rest of its stream comes from elsewhere."""
    now = [0.0]

    async def prefill(leg):
        if side == "prefill" and "xpyd_cached_on" in params_of(leg):
            await never()
        return await pulled_prefill(leg)

    then = {"decode-1": never} if side == "decode" else {}
    fleet = Fleet(prefill=prefill, then=then, clock=lambda: now[0], move_timeout_s=7.0)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.drain()
    await until(lambda: len(fleet.engines.legs) == (3 if side == "prefill" else 4))
    now[0] = 6.9
    client.request.look(now[0])
    assert len(fleet.engines.open) == 1
    now[0] = 7.1
    client.request.look(now[0])
    await client.end()

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.engines.legs[-1].instance.id == ("decode-1" if side == "prefill" else "decode-0")
    assert fleet.outcomes == {("resumed",): 1}


async def test_a_client_that_leaves_ends_the_move():
    """Nothing is held, at no engine."""

    async def prefill(leg):
        if "xpyd_cached_on" in params_of(leg):
            await never()
        return await pulled_prefill(leg)

    fleet = Fleet(prefill=prefill)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.drain()
    await until(lambda: len(fleet.engines.legs) == 3)
    client.hang_up()
    await client.end()

    assert not fleet.engines.open
    assert fleet.router.is_idle()
    assert fleet.outcomes == {("disconnected",): 1}


async def test_in_push_the_prefill_engine_goes_first():
    """The next engine must not ask for tokens before the prefill engine has read what it needs."""

    async def prefill(leg):
        return prefilled(leg)

    fleet = Fleet(prefill=prefill, holds_at=[99, 8])
    await fleet.router.serve(asked(Api.COMPLETIONS), "first")  # the router learns where the engine is
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert client.record.mode == "push_cold"
    assert [leg.instance.role for leg in fleet.engines.legs[4:]] == [Role.PREFILL, Role.DECODE]


# ---- what is seen of it


async def test_the_log_and_the_timeline_tell():
    """How long the client waited, and from where the stream came."""
    now = [0.0]

    async def prefill(leg):
        if "xpyd_cached_on" in params_of(leg):
            now[0] = 5.0
        return await pulled_prefill(leg)

    fleet = Fleet(prefill=prefill, clock=lambda: now[0])
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    now[0] = 2.0
    fleet.drain()
    await client.end()
    record = client.record

    assert [(move.source, move.outcome, move.gap_s) for move in record.moves] == [("decode-0", MoveOutcome.MOVED, 3.0)]
    assert "moves='decode-0 moved after 3000.0 ms'" in text(record)
    assert "decode=decode-1" in text(record)
    rows = [(row.what, row.where, row.duration_ms) for row in router_timeline(record, 5.0).rows]
    assert rows == [("stream", "decode-0", 2000.0), ("prefill leg", "prefill-0", 3000.0)]


async def test_two_drains_in_a_row():
    """The engine that took the stream is drained, too."""
    fleet = Fleet(y=3, holds_at=[8, 5])
    client = fleet.router.start(asked(Api.COMPLETIONS))
    for _ in range(2):
        await until(lambda: fleet.sent)
        fleet.sent = 0
        fleet.drain(client.request.streams_from)
    await client.end()

    legs = [leg.instance.id for leg in fleet.engines.of(Role.DECODE)]
    assert read(client.body) == whole(Api.COMPLETIONS)
    assert len(set(legs)) == 3
    assert [move.source for move in client.record.moves] == legs[:2]
    assert len({request_id(leg) for leg in fleet.engines.of(Role.DECODE)}) == 3


class TestFullEngines:
    """Streams leave a decode engine that has no KV room, as many as it says, the newest first."""

    def test_streams_that_could_not_move_are_told_at_the_start(self):
        check(Settings(move_above=0.9, resume_streams=True))
        with pytest.raises(ConfigError, match=r"move_above is 0\.9, and no stream could move"):
            check(Settings(move_above=0.9))

    def _stopped(self, count):
        fleet = Fleet(holds_at=(8,) * count, breaking=replace(NEVER_BROKEN, move_above=0.95))
        fleet.router.registry.drain("decode-1", now=0.0)
        return fleet

    async def _begun(self, fleet, count):
        clients = []
        for n in range(count):
            clients.append(fleet.router.start(asked(Api.COMPLETIONS), f"r{n}"))
            await until(lambda: clients[-1].request.streams_from == "decode-0" and fleet.sent)
            fleet.sent = 0
        fleet.router.registry.undrain("decode-1", now=0.0)
        return clients

    def _shown(self, fleet, usage, **others):
        loads = {"decode_0": usage} | others
        shown = {name.replace("_", "-"): ShownLoad(0.0, 1, value) for name, value in loads.items()}
        fleet.router.registry.relief.look(shown)
        fleet.router.moves.look()

    async def test_the_newest_leave_and_the_others_stay(self):
        fleet = self._stopped(5)
        clients = await self._begun(fleet, 5)

        self._shown(fleet, 1.0, decode_1=0.0)
        await clients[-1].end()
        self._shown(fleet, 0.8, decode_1=0.2)
        fleet.go_on.set()
        for client in clients:
            await client.end()

        assert [bool(client.request.record.moves) for client in clients] == [False] * 4 + [True]
        assert dict(fleet.router.telemetry.counters.streams_moved) == {("kv_room", "moved"): 1}
        assert {read(client.body)[0] for client in clients} == {whole(Api.COMPLETIONS)[0]}

    async def test_no_stream_goes_to_another_full_engine(self):
        fleet = self._stopped(2)
        clients = await self._begun(fleet, 2)

        self._shown(fleet, 1.0, decode_1=1.0, decode_9=0.0)  # there is room, but the router cannot use it
        fleet.go_on.set()
        for client in clients:
            await client.end()

        assert [client.request.record.moves for client in clients] == [(), ()]
        assert fleet.outcomes == {}

    async def test_without_a_target_nothing_is_tried_until_the_next_look_at_kv_caches(self):
        """Engines are chosen for each stream: that of thousands, four times a second, would take the event loop."""
        fleet = self._stopped(2)
        clients = await self._begun(fleet, 2)
        registry = fleet.router.registry

        registry.drain("decode-1", now=0.0)
        self._shown(fleet, 1.0, decode_1=0.0)
        registry.undrain("decode-1", now=0.0)
        fleet.router.moves.look()
        assert [client.request.record.moves for client in clients] == [(), ()]

        self._shown(fleet, 1.0, decode_1=0.0)
        await clients[-1].end()
        fleet.go_on.set()
        await clients[0].end()
        assert [len(client.request.record.moves) for client in clients] == [0, 1]
