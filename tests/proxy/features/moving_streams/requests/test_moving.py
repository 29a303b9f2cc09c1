"""Streams that move: cut at a token of one engine, and continued by two others, without a token lost or doubled."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_proxy.consistency import check
from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.lifetime import cut_short
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.engine_metrics import ShownLoad
from pdrelay_proxy.core.model import Api, EngineResponse, EngineRole, Role
from pdrelay_proxy.core.request_record import MoveOutcome
from pdrelay_proxy.core.routing.retries import RetryBudget
from pdrelay_proxy.errors import ConfigError, EngineError
from pdrelay_proxy.features.moving_streams.core.kv_relief import KvRelief
from pdrelay_proxy.features.moving_streams.move_counts import MoveCounts
from pdrelay_proxy.features.moving_streams.requests.stream_moves import StreamMoves
from pdrelay_proxy.features.moving_streams.settings import MoveSettings
from pdrelay_proxy.features.why.request_timeline import router_timeline
from pdrelay_proxy.io.request_path.access_log import text
from pdrelay_proxy.requests.lifecycle import RequestState
from pdrelay_proxy.settings import Settings
from support.greedy import HALF, event, events, ids_of, read
from support.scripted import (
    Noted,
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
from support.searching import examples

BODY = {"stream": True, "temperature": 0, "max_tokens": 24, "stream_options": {"include_usage": True}}
SAID = [{"role": "user", "content": "hi"}]
PROMPTS = {Api.COMPLETIONS: {"prompt": "hi"}, Api.CHAT: {"messages": SAID}}
STAY = {Api.RESPONSES: {"input": "hi", "store": False}, Api.MESSAGES: {"messages": SAID}}


class Engines(Scripted):
    """They free blocks when they are asked to."""

    async def post(self, leg, *, timeout_s):
        return EngineResponse(400, "application/json", b"{}")


class Fleet:
    """Engines that stop behind some events of a stream until they are let go, and the router before them."""

    def __init__(
        self,
        x=1,
        y=2,
        *,
        holds_at=(8,),
        prefill=pulled_prefill,
        per_event=1,
        then=None,
        kv_role=None,
        above=None,
        most=8,
        **options,
    ):
        """``holds_at``: after how many events the engines stop, one leg after the other; later legs do not stop.

        ``above``: from which share of its KV cache in use an engine is full; ``most``: moves at the same time.
        """
        self.engines = Engines(prefill, self._decode)
        self.counts = MoveCounts()
        watchers = [partial(StreamMoves, KvRelief(above), self.counts.count, most=most)]
        self.router = router_of(self.engines, x, y, watchers=watchers, **({"resume_streams": True} | options))
        self.go_on = asyncio.Event()
        self.sent = 0  # events of the stream that stops now
        self._holds_at = list(holds_at)
        self._per_event = per_event
        self._then = then or {}
        for name in [f"decode-{number}" for number in range(y)]:
            self.router.registry.learn(name, EngineCapabilities(kv_role=kv_role))

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

    def hold_next(self, at=8):
        """Have the next leg stop."""
        self._holds_at.append(at)

    def drain(self, name="decode-0"):
        self.router.registry.departures.drain(name, now=0.0, moves=True)
        self.router.moves.cut_streams()

    @property
    def outcomes(self):
        return {(outcome,): n for (_, outcome), n in self.counts.moved.items()}


def whole(api, **fields):
    """What a client should have read at the end."""
    return read(b"".join(events(BODY | PROMPTS[api] | fields, name="cmpl-r")))


def is_rest(leg):
    """Tell whether it is a leg of a stream that was cut."""
    return "-r" in request_id(leg)


def waiting_prefill():
    """Return an event, and a prefill engine that answers once it is set."""
    go_on = asyncio.Event()

    async def prefill(leg):
        await go_on.wait()
        return await pulled_prefill(leg)

    return go_on, prefill


def asked(api, **fields):
    return call(api, **BODY | (PROMPTS | STAY)[api] | fields)


async def cut_once(fleet, api=Api.COMPLETIONS, **fields):
    """Serve a request whose engine is drained when it has stopped."""
    client = fleet.router.start(asked(api, **fields))
    await until(lambda: fleet.sent)
    fleet.drain(client.request.streams_from)
    await client.end()
    assert not fleet.engines.open
    assert fleet.router.is_idle()
    return client


class FaultyNotes(list):
    """They cannot be told that the leg of an engine has ended."""

    def append(self, told, /):
        if told[:2] == ("ended", "decode-0"):
            raise RuntimeError("a bug")
        super().append(told)


async def test_a_stream_whose_leg_cannot_be_closed_holds_no_place_of_a_move():
    """The client gets an error; the engine is free, and other streams may move."""
    notes = Noted()
    notes.told = FaultyNotes()
    fleet = Fleet(most=1, spans=notes)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.drain(client.request.streams_from)
    await client.end()

    assert client.request.failure.args == ("a bug",)
    assert fleet.outcomes == {("failed",): 1}
    assert fleet.router.is_idle()


@pytest.mark.parametrize("api", PROMPTS)
async def test_the_client_gets_one_stream(api):
    """One id, one usage as of one request, one end; the engine that drains is closed before others are asked."""
    fleet = Fleet()
    client = await cut_once(fleet, api)

    assert read(client.body) == whole(api)
    assert [leg.instance.id for leg in fleet.engines.legs] == ["prefill-0", "decode-0", "decode-0", "decode-1"]
    assert len({request_id(leg) for leg in fleet.engines.legs}) == 2
    assert fleet.outcomes == {("moved",): 1}


async def test_what_engines_have_cached_of_a_stream_that_moved_is_told_to_no_client():
    """All of it, for the stream has come from there: that is no number to bill a client by."""
    details = b'"prompt_tokens_details":{"cached_tokens":9},"total_tokens":'

    async def rest(leg):
        stream = events(json.loads(leg.body), name=f"cmpl-{request_id(leg)}")
        return 200, [each.replace(b'"total_tokens":', details) for each in stream]

    fleet = Fleet(then={"decode-1": rest})
    client = await cut_once(fleet)

    *_, (usage,), _, _ = read(client.body)
    assert fleet.outcomes == {("moved",): 1}
    assert usage.pop("prompt_tokens_details") is None
    assert [usage] == whole(Api.COMPLETIONS)[2]


@pytest.mark.parametrize("api", PROMPTS)
async def test_the_engine_that_drains_is_the_prefill_engine_of_the_rest(api):
    """It has the KV cache of the prompt and of the tokens that were made; the next engine reads it there."""
    fleet = Fleet()
    await cut_once(fleet, api)

    _, first, prefill, decode = (json.loads(leg.body) for leg in fleet.engines.legs)
    told = params_of(fleet.engines.legs[2])
    made = len(ids_of(prefill)) - len(ids_of(first))
    assert fleet.engines.legs[2].instance == replace(
        fleet.engines.legs[1].instance, role=Role.PREFILL, declared=Role.DECODE
    )
    assert "pdrelay_cached_on" not in told
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
@settings(max_examples=examples(150), deadline=None)
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
            fleet.sent = 0
            leg = client.request.record.decode
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
    "stop texts": (Api.COMPLETIONS, {"stop": ["zzz"]}),
    "logprobs": (Api.COMPLETIONS, {"logprobs": 1}),
    "a seed": (Api.COMPLETIONS, {"temperature": 1, "seed": 7}),
    "penalties": (Api.COMPLETIONS, {"presence_penalty": 0.5}),
    "responses": (Api.RESPONSES, {}),  # vLLM shows no token ids (tests/contract/test_openai_bodies.py)
    "messages": (Api.MESSAGES, {}),
}


@pytest.mark.parametrize(("api", "fields"), STAYING.values(), ids=STAYING)
async def test_a_stream_that_cannot_go_on_exactly_ends_at_its_engine(api, fields):
    """It is counted once, and the engine keeps draining."""
    fleet = Fleet()
    client = fleet.router.start(asked(api, **fields))
    await until(lambda: fleet.sent)
    fleet.drain()
    fleet.router.moves.cut_streams()
    fleet.go_on.set()
    await client.end()

    assert client.error is None
    assert len(fleet.engines.legs) == 2
    assert fleet.outcomes == {("stayed",): 1}


async def looking_back(leg):
    return prefilled(leg, transfer_mode="pull", pdrelay_looks_back=True)


async def test_a_stream_stays_where_the_engines_own_defaults_look_back():
    """The router cannot see a penalty of the generation config: the prefill engine says that there is one."""
    fleet = Fleet(prefill=looking_back)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.drain()
    fleet.router.moves.cut_streams()
    fleet.go_on.set()
    await client.end()

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert len(fleet.engines.legs) == 2
    assert fleet.outcomes == {("stayed",): 1}


@pytest.mark.parametrize("options", [{"resume_streams": False}, {"x": 0, "kv_role": "kv_consumer"}, {"y": 1}], ids=str)
async def test_nothing_is_cut_that_no_engine_can_take(options):
    """Without the tokens, without an engine that has or computes the KV cache, without another decode engine."""
    fleet = Fleet(**options)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    before = len(fleet.engines.legs)
    fleet.drain(client.request.record.decode.instance)
    fleet.go_on.set()
    await client.end()

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert len(fleet.engines.legs) == before


@pytest.mark.parametrize("dead", [(), ("decode-0",), ("decode-0", "prefill-0")], ids=len)
async def test_a_stream_moves_to_the_weights_that_it_began_with(dead):
    """Others may serve under the same name for a while; also where two engines, or one alone, compute all so far."""

    async def prefill(leg):
        if is_rest(leg) and leg.instance.id in dead:
            raise EngineError("dead")
        return await pulled_prefill(leg)

    fleet = Fleet(y=3, prefill=prefill)
    for number, root in enumerate(("/m/1", "/m/2", "/m/1")):
        fleet.router.registry.learn(f"decode-{number}", EngineCapabilities(root=root, files={"": root}))
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert {leg.instance.id for leg in fleet.engines.of(Role.DECODE)} == {"decode-0", "decode-2"}


@pytest.mark.parametrize("api", PROMPTS)
async def test_both_engines_of_the_rest_are_told_the_model_that_the_stream_began_with(api):
    """Its client has named none: an engine that serves another one says so."""
    fleet = Fleet()
    await cut_once(fleet, api, model=None)

    assert [json.loads(leg.body)["model"] for leg in fleet.engines.legs[-2:]] == ["m", "m"]


async def test_a_stream_stays_where_only_other_weights_are_left():
    """It ends where it began, as without a move."""
    fleet = Fleet()
    for number in range(2):
        fleet.router.registry.learn(f"decode-{number}", EngineCapabilities(files={"": f"/m/{number}"}))
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.drain(client.request.streams_from)
    fleet.go_on.set()
    await client.end()

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert {leg.instance.id for leg in fleet.engines.of(Role.DECODE)} == {"decode-0"}


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
    fleet.router.moves.cut_streams()
    assert client.request.streams_from == "decode-0"
    end.set()
    await until(lambda: b" 4" in client.body)
    fleet.router.moves.cut_streams()
    await client.end()

    assert read(client.body)[0] == " 8 1 2 4 5"
    assert json.loads(fleet.engines.legs[-1].body)["prompt"] == [9, 8, 1, 2, HALF, 4]


class Named(str):
    """The name of a model, which has the place of another one in a set: it counts how often that is looked up."""

    looks = 0

    def __eq__(self, other):
        self.looks += 1
        return super().__eq__(other)

    def __hash__(self):
        return hash("a")


@pytest.mark.parametrize("stage", ["streams", "prompts"])
async def test_what_no_engine_can_take_is_looked_at_once(stage):
    """The last engine of a revision has thousands: choosing engines for each of them would stop the router."""
    go_on = asyncio.Event()
    looks = []

    async def prefill(leg):
        if stage == "prompts":
            await go_on.wait()
        return await pulled_prefill(leg)

    for count in (1, 20):
        go_on.clear()
        fleet = Fleet(prefill=prefill, holds_at=[8] * count, y=1, kv_role="kv_consumer")
        registry = fleet.router.registry
        clients = [fleet.router.start(asked(Api.COMPLETIONS, model="a"), f"r{number}") for number in range(count)]
        await until(
            lambda count=count, fleet=fleet: len(fleet.engines.legs) == (2 * count if stage == "streams" else count)
        )
        if stage == "streams":
            await until(lambda clients=clients: all(client.request.continuation.can_move() for client in clients))
        other = registry.add(Role.DECODE, Address("http", "h", 9))
        name = Named("b")
        registry.learn(other.id, EngineCapabilities(models=frozenset({name})))
        before = name.looks
        fleet.drain()
        looks.append(name.looks - before)
        go_on.set()
        fleet.go_on.set()
        for client in clients:
            await client.end()
            assert read(client.body)[0] == whole(Api.COMPLETIONS)[0]
        assert fleet.outcomes == {}
        assert fleet.router.is_idle()

    assert 0 < looks[0] == looks[1]


async def test_so_many_move_at_the_same_time():
    """The prefill engine has other things to do; a move that is over makes room for the next."""
    waiting = []
    go_on = asyncio.Event()

    async def prefill(leg):
        if is_rest(leg):
            waiting.append(leg)
            await go_on.wait()
        return await pulled_prefill(leg)

    fleet = Fleet(prefill=prefill, holds_at=[8] * 10, most=3, y=1)
    clients = [fleet.router.start(asked(Api.COMPLETIONS), f"r{number}") for number in range(10)]
    await until(lambda: all(client.request.state is RequestState.STREAMING for client in clients))
    fleet.router.registry.add(Role.DECODE, Address("http", "h", 9))
    fleet.drain()
    await until(lambda: len(waiting) == 3)
    for _ in range(20):
        fleet.router.moves.cut_streams()
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
    asks = []
    go_on = asyncio.Event()

    async def prefill(leg):
        if is_rest(leg):
            asks.append(leg)
        return await pulled_prefill(leg)

    async def reads(leg):
        asks.append(leg)
        await go_on.wait()
        return 200, list(events(json.loads(leg.body), name="cmpl-r"))

    fleet = Fleet(prefill=prefill, then={"decode-1": reads})
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.drain()
    await until(lambda: len(asks) == 2)
    assert not fleet.router.registry.settle(patience_s=60, now=1.0)
    go_on.set()
    await client.end()

    assert [one.id for one in fleet.router.registry.settle(patience_s=60, now=1.0)] == ["decode-0"]


async def test_a_prompt_that_is_still_computed_gets_another_decode_engine():
    """A late prefill engine would hold up the engine that is left for as long as its queue takes."""
    go_on, prefill = waiting_prefill()
    fleet = Fleet(prefill=prefill, holds_at=())
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.engines.legs)
    registry = fleet.router.registry
    (chosen,) = [name for name in ("decode-0", "decode-1") if registry.get(name).load.in_flight]
    fleet.drain(chosen)
    drained = [one.id for one in registry.settle(patience_s=60, now=1.0)]
    go_on.set()
    await client.end()

    assert drained == [chosen]
    assert {leg.instance.id for leg in fleet.engines.of(Role.DECODE)} == {"decode-0", "decode-1"} - {chosen}
    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.router.is_idle()


async def test_a_prompt_does_not_change_to_a_decode_engine_of_another_model():
    """To look for one must not end the look at all other requests."""
    go_on, prefill = waiting_prefill()
    fleet = Fleet(prefill=prefill, holds_at=())
    registry = fleet.router.registry
    for name, models in (("decode-0", {"a"}), ("decode-1", {"b"})):
        registry.learn(name, EngineCapabilities(models=frozenset(models)))
    client = fleet.router.start(asked(Api.COMPLETIONS, model="a"))
    await until(lambda: fleet.engines.legs)
    fleet.drain("decode-0")
    assert registry.member("decode-0").load.in_flight == 1
    go_on.set()
    await client.end()

    assert read(client.body)[0] == whole(Api.COMPLETIONS)[0]
    assert [leg.instance.id for leg in fleet.engines.legs] == ["prefill-0", "decode-0"]
    assert fleet.router.is_idle()


# ---- moves that fail


@pytest.mark.parametrize("dead", [("decode-0",), ("decode-0", "prefill-0")], ids=len)
async def test_if_the_engine_that_drains_fails_a_prefill_engine_computes_all_so_far(dead):
    """The one that has the prompt comes first. Nothing of the rest is shown yet: both legs are sent again."""

    async def prefill(leg):
        if is_rest(leg) and leg.instance.id in dead:
            raise EngineError("dead")
        return await pulled_prefill(leg)

    fleet = Fleet(2, prefill=prefill)
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.engines.of(Role.PREFILL)[-1].instance.id == ("prefill-0", "prefill-1")[len(dead) - 1]
    assert [str(retry) for retry in client.record.retries] == [f"{name} bad_response" for name in dead]
    assert fleet.outcomes == {("moved",): 1}
    assert "pdrelay_cached_on" not in params_of(fleet.engines.of(Role.PREFILL)[-1])


async def test_streams_do_not_wait_for_an_engine_that_has_failed_to_hand_one_over():
    """A frozen engine would cost each of them the time for a move; one that is left later is asked again."""
    asks = []

    async def prefill(leg):
        if is_rest(leg):
            asks.append(leg.instance.id)
            if leg.instance.id == "decode-0":
                raise EngineError("dead")
        return await pulled_prefill(leg)

    fleet = Fleet(prefill=prefill, holds_at=[8] * 3, most=1, y=1)
    clients = [fleet.router.start(asked(Api.COMPLETIONS), f"r{number}") for number in range(3)]
    await until(lambda: all(client.request.state is RequestState.STREAMING for client in clients))
    fleet.router.registry.add(Role.DECODE, Address("http", "h", 9))
    fleet.drain()
    for client in clients:
        await client.end()
    assert asks == ["decode-0", "prefill-0", "prefill-0", "prefill-0"]

    registry = fleet.router.registry
    registry.departures.undrain("decode-0", now=0.0)
    fleet.router.moves.cut_streams()
    registry.departures.drain("decode-1", now=0.0)
    fleet.hold_next()
    last = fleet.router.start(asked(Api.COMPLETIONS), "r3")
    await until(lambda: last.request.streams_from == "decode-0")
    registry.departures.undrain("decode-1", now=0.0)
    fleet.drain()
    await last.end()
    assert asks[4:] == ["decode-0", "prefill-0"]
    assert fleet.router.is_idle()


@pytest.mark.parametrize(
    "known",
    [
        EngineCapabilities(kv_role="kv_consumer"),
        EngineCapabilities(connector="pdrelay"),
    ],
    ids=["it hands nothing over", "several ranks behind one address"],
)
async def test_a_prefill_engine_computes_what_the_engine_cannot_hand_over(known):
    fleet = Fleet()
    for name in ("decode-0", "decode-1"):
        fleet.router.registry.learn(name, known)
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert [leg.instance.id for leg in fleet.engines.legs] == ["prefill-0", "decode-0", "prefill-0", "decode-1"]
    assert fleet.outcomes == {("moved",): 1}


async def test_an_engine_that_misses_its_probes_is_not_asked():
    """It may be frozen: the client would wait for it."""
    fleet = Fleet()
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.router.registry.member("decode-0").life.missed("no answer", now=0.0)
    fleet.drain()
    await client.end()

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.engines.legs[2].instance.id == "prefill-0"


async def test_without_a_prefill_engine_another_decode_engine_computes_the_rest():
    """As for a stream that broke off."""

    async def prefill(leg):
        if is_rest(leg):
            raise EngineError("dead")
        return await pulled_prefill(leg)

    fleet = Fleet(prefill=prefill)
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.engines.legs[-1].instance.id == "decode-1"
    assert "kv_transfer_params" not in json.loads(fleet.engines.legs[-1].body)
    assert fleet.outcomes == {("resumed",): 1}


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("y", [2, 4])
@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_the_stream_goes_back_from_engines_that_do_not_take_it_alone(status, y, retries):
    """They are busy, or take no prompt that long: it was moved by nothing that its client has done."""

    async def prefill(leg):
        if is_rest(leg):
            raise EngineError("dead")
        return await pulled_prefill(leg)

    async def refusing(leg):
        return status, [b'{"error":{"message":"The model `m` does not exist.","code":%d}}' % status], "application/json"

    others = dict.fromkeys(("decode-1", "decode-2", "decode-3"), refusing)
    fleet = Fleet(y=y, prefill=prefill, then=others, retries=retries)
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.engines.legs[-1].instance.id == "decode-0"
    assert fleet.outcomes == {("resumed",): 1}


async def test_a_stream_that_goes_back_takes_one_retry_of_the_budget():
    """A target that dies fails all moves to it at once: what no other engine can take is not tried, nor paid for."""

    async def breaking(leg):
        return 200, [EngineError("broke off")]

    fleet = Fleet(then={"decode-1": breaking}, budget=RetryBudget(share=0.0, floor=0.0, most=1.0))
    client = await cut_once(fleet)

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert [leg.instance.id for leg in fleet.engines.of(Role.DECODE)] == ["decode-0", "decode-1", "decode-0"]
    assert fleet.outcomes == {("resumed",): 1}


async def test_a_stream_goes_back_to_an_engine_of_both_roles_as_to_a_decode_engine():
    """Its leg is counted and judged as what it is."""

    async def dead(leg):
        raise EngineError("dead", reached=False)

    fleet = Fleet(then={"decode-0": dead})
    registry = fleet.router.registry
    registry.departures.change_role("decode-1", EngineRole.BOTH, now=0.0)
    registry.departures.drain("decode-0", now=0.0)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    registry.departures.undrain("decode-0", now=0.0)
    fleet.drain("decode-1")
    await client.end()

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert (fleet.engines.legs[-1].instance.id, fleet.engines.legs[-1].instance.role) == ("decode-1", Role.DECODE)
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


async def test_what_the_next_engine_takes_for_reasoning_is_not_left_out():
    """Its parser has not seen how the answer began. The client gets an error, and no shorter text that seems whole."""

    async def thinks(leg):
        said = [{"reasoning": "so"}, {"content": ""}]
        ends = [None, "stop"]
        choices = [
            {"index": 0, "delta": delta, "token_ids": [1], "finish_reason": end}
            for delta, end in zip(said, ends, strict=True)
        ]
        return 200, [*(event({"id": "x", "choices": [one]}) for one in choices), b"data: [DONE]\n\n"]

    fleet = Fleet(then={"decode-1": thinks})
    client = await cut_once(fleet, Api.CHAT)

    assert client.error is not None
    assert whole(Api.CHAT)[0].startswith(read(client.got)[0])


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


@pytest.mark.parametrize("begins", [True, False])
async def test_a_stream_does_not_go_back_to_other_weights(begins):
    """Its engine was drained to be replaced, and was: the client gets an error, and nothing of another model."""

    async def breaking(leg):
        fleet.router.registry.learn("decode-0", EngineCapabilities(files={"": "/m/2"}))
        stream = list(events(json.loads(leg.body), name="cmpl-x"))
        return 200, [*(stream[:5] if begins else []), EngineError("broke off")]

    fleet = Fleet(then={"decode-1": breaking})
    for name in ("decode-0", "decode-1"):
        fleet.router.registry.learn(name, EngineCapabilities(files={"": "/m/1"}))
    client = await cut_once(fleet)

    first, *others = fleet.engines.of(Role.DECODE)
    assert client.error[0] == "EngineError"
    assert whole(Api.COMPLETIONS)[0].startswith(read(client.got)[0])
    assert first.instance.id == "decode-0"
    assert {leg.instance.id for leg in others} == {"decode-1"}


@pytest.mark.parametrize("side", ["lender", "prefill", "decode"])
async def test_engines_have_little_time_for_a_move(side):
    """The client waits: the rest of its stream comes from elsewhere. A lender has a quarter: it computes a block."""
    now = [0.0]

    async def prefill(leg):
        if side == "prefill" and is_rest(leg) and leg.instance.id == "prefill-0":
            await never()
        if side == "lender" and is_rest(leg) and leg.instance.id == "decode-0":
            await never()
        return await pulled_prefill(leg)

    then, seconds = {"decode-1": never} if side == "decode" else {}, 2.0 if side == "lender" else 8.0
    kv_role = "kv_consumer" if side == "prefill" else "kv_both"
    fleet = Fleet(prefill=prefill, then=then, kv_role=kv_role, clock=lambda: now[0], stream_idle_timeout_s=64.0)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.drain()
    await until(lambda: len(fleet.engines.legs) == (4 if side == "decode" else 3))
    now[0] = seconds - 0.1
    client.request.check_deadlines(now[0])
    assert len(fleet.engines.open) == 1
    now[0] = seconds + 0.1
    client.request.check_deadlines(now[0])
    await client.end()

    assert read(client.body) == whole(Api.COMPLETIONS)
    assert fleet.engines.legs[-1].instance.id == ("decode-0" if side == "decode" else "decode-1")
    assert fleet.outcomes == {("moved" if side == "lender" else "resumed",): 1}


@pytest.mark.parametrize("side", Role)
async def test_an_engine_with_too_little_time_for_moves_is_not_broken(side):
    """Several of them end at once, in a fleet that has perhaps no other: a long queue is no failure."""
    now = [0.0]

    async def prefill(leg):
        if side is Role.PREFILL and is_rest(leg):
            await never()
        return await pulled_prefill(leg)

    kv_role = "kv_consumer" if side is Role.PREFILL else "kv_both"
    fleet = Fleet(
        prefill=prefill,
        then={"decode-1": never} if side is Role.DECODE else {},
        holds_at=[8] * 8,
        y=1,
        kv_role=kv_role,
        clock=lambda: now[0],
        stream_idle_timeout_s=64.0,
        breaking=Settings(),
    )
    registry = fleet.router.registry
    clients = [fleet.router.start(asked(Api.COMPLETIONS), f"r{number}") for number in range(8)]
    await until(lambda: all(client.request.state is RequestState.STREAMING for client in clients))
    registry.add(Role.DECODE, Address("http", "h", 9))
    fleet.drain()
    slow = "prefill-0" if side is Role.PREFILL else "decode-1"
    await until(lambda: len([leg for leg in fleet.engines.open if leg.instance.id == slow]) == 8)
    now[0] = 8.1
    for client in clients:
        client.request.check_deadlines(now[0])
    for client in clients:
        await client.end()

    assert {read(client.body)[0] for client in clients} == {whole(Api.COMPLETIONS)[0]}
    assert registry.member(slow).life.may_serve(now=now[0])
    assert fleet.outcomes == {("resumed",): 8}


async def moving_without_end():
    """Return a fleet and the client of a stream that moves: no prefill engine answers for the rest."""

    async def prefill(leg):
        if is_rest(leg):
            await never()
        return await pulled_prefill(leg)

    fleet = Fleet(prefill=prefill)
    client = fleet.router.start(asked(Api.COMPLETIONS))
    await until(lambda: fleet.sent)
    fleet.drain()
    await until(lambda: len(fleet.engines.legs) == 3)
    return fleet, client


async def test_a_client_that_leaves_ends_the_move():
    """Nothing is held, at no engine."""
    fleet, client = await moving_without_end()
    client.hang_up()
    await client.end()

    assert not fleet.engines.open
    assert fleet.router.is_idle()
    assert fleet.outcomes == {("disconnected",): 1}


async def test_a_request_that_is_over_while_its_stream_moves_says_why():
    """No engine has failed: none gets more of it, and the client does not read that its stream could not move."""
    fleet, client = await moving_without_end()
    client.request.interrupt(cut_short())
    await client.end()

    assert client.error == ("ServiceUnavailableError", "the router has to end before this request is finished")
    assert len(fleet.engines.legs) == 3
    assert not fleet.engines.open
    assert fleet.router.is_idle()
    assert fleet.outcomes == {("failed",): 1}


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
        if is_rest(leg):
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
    assert rows == [("stream", "decode-0", 2000.0), ("prefill leg", "decode-0", 3000.0)]


class TestFullEngines:
    """Streams leave a decode engine that has no KV room, as many as it says, the newest first."""

    def test_streams_that_could_not_move_are_told_at_the_start(self):
        check(Settings(resume_streams=True).with_features(MoveSettings(0.9)))
        with pytest.raises(ConfigError, match=r"move_above is 0\.9, and no stream could move"):
            check(Settings().with_features(MoveSettings(0.9)))

    def _stopped(self, count):
        fleet = Fleet(holds_at=(8,) * count, above=0.95)
        fleet.router.registry.departures.drain("decode-1", now=0.0)
        return fleet

    async def _begun(self, fleet, count):
        clients = []
        for n in range(count):
            clients.append(fleet.router.start(asked(Api.COMPLETIONS), f"r{n}"))
            await until(lambda: clients[-1].request.streams_from == "decode-0" and fleet.sent)
            fleet.sent = 0
        fleet.router.registry.departures.undrain("decode-1", now=0.0)
        return clients

    def _shown(self, fleet, usage, **others):
        loads = {"decode_0": usage} | others
        shown = {name.replace("_", "-"): ShownLoad(0.0, 1, value) for name, value in loads.items()}
        fleet.router.moves.relief.take_loads(shown)
        fleet.router.moves.cut_streams()

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
        assert dict(fleet.counts.moved) == {("kv_room", "moved"): 1}
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

    async def test_no_stream_goes_to_another_full_engine_either_if_the_first_one_fails(self):
        """It would be computed anew there, or go on from there at once."""

        async def dead(leg):
            raise EngineError("dead")

        fleet = Fleet(y=4, then={"decode-1": dead}, above=0.95)
        registry = fleet.router.registry
        for name in ("decode-1", "decode-2", "decode-3"):
            registry.departures.drain(name, now=0.0)
        (client,) = await self._begun(fleet, 1)
        registry.departures.drain("decode-1", now=0.0)
        registry.departures.undrain("decode-1", now=0.0)
        registry.departures.undrain("decode-2", now=0.0)
        self._shown(fleet, 1.0, decode_1=0.0, decode_2=1.0, decode_3=0.0)
        registry.departures.undrain("decode-3", now=0.0)
        await client.end()

        assert read(client.body)[0] == whole(Api.COMPLETIONS)[0]
        assert [leg.instance.id for leg in fleet.engines.of(Role.DECODE)] == ["decode-0", "decode-1", "decode-3"]

    async def test_without_a_target_nothing_is_tried_until_the_next_look_at_kv_caches(self):
        """Engines are chosen for each stream: that of thousands, four times a second, would take the event loop."""
        fleet = self._stopped(2)
        clients = await self._begun(fleet, 2)
        registry = fleet.router.registry

        registry.departures.drain("decode-1", now=0.0)
        self._shown(fleet, 1.0, decode_1=0.0)
        registry.departures.undrain("decode-1", now=0.0)
        fleet.router.moves.cut_streams()
        assert [client.request.record.moves for client in clients] == [(), ()]

        self._shown(fleet, 1.0, decode_1=0.0)
        await clients[-1].end()
        fleet.go_on.set()
        await clients[0].end()
        assert [len(client.request.record.moves) for client in clients] == [0, 1]
