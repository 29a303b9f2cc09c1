"""Whatever engines, clients and the router itself do, in whatever order: each request has one end, and all is free."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_proxy.core.model import EngineResponse, Role
from pdrelay_proxy.core.request_record import CLIENT_CLOSED_REQUEST
from pdrelay_proxy.errors import EngineError, EngineTimeout
from pdrelay_proxy.features.first_token.settings import FirstTokenFrom
from pdrelay_proxy.requests.lifecycle import RequestState
from pdrelay_proxy.settings import Settings
from support.greedy import events, first_answer, read
from support.scripted import DONE, EVENT, JSON, Noted, Scripted, call, prefilled, request_id, router_of
from support.searching import examples

ERROR = b'{"error":{"message":"no","type":"x","param":null,"code":400}}'
RETRIES = 2
RAISES = {
    "bad": lambda: EngineError("bad"),
    "down": lambda: EngineError("down", reached=False),
    "slow": lambda: EngineTimeout("slow"),
    "bug": lambda: ZeroDivisionError("bug"),
}
PARTS = {
    "error event": [b'data: {"error":{"code":500}}\n\n'],
    "empty": [],
    "no end": [EVENT],
    "late": [EVENT, EngineError("late")],
    "late error event": [EVENT, b'data: {"error":{"code":500}}\n\n', DONE],
}

pauses = st.integers(0, 4)  # turns of the event loop
prefills = st.sampled_from(["good", "other engine", "pull", *RAISES, 400, 500, 503, "no params", "never", "unsendable"])
decodes = st.sampled_from(["good", "whole", *RAISES, 400, 500, 503, *PARTS, "falls silent", "never", "unsendable"])
ways = st.tuples(
    st.sampled_from(["waits", "hangs up", "is slow"]),
    st.integers(0, 12),  # turns until it does
    st.sampled_from([{}, {"stream": True}, {"n": 2}, {"priority": -1}]),
)


@dataclass
class Scripts:
    """Engines follow two scripts, leg by leg, and then do their work."""

    prefill: list
    decode: list

    async def step(self, script):
        turns, does = script.pop(0) if script else (0, "good")
        for _ in range(turns):
            await asyncio.sleep(0)
        if does == "never":
            await asyncio.Event().wait()
        if does in RAISES:
            raise RAISES[does]()
        return does

    async def on_prefill(self, leg):
        match await self.step(self.prefill):
            case int(status):
                return EngineResponse(status, JSON, ERROR)
            case "no params":
                return EngineResponse(200, JSON, b"{}")
            case does:
                engine = "e2" if does == "other engine" else "e1"
                return prefilled(leg, engine=engine, transfer_mode="pull" if does == "pull" else "push")

    async def on_decode(self, _):
        match await self.step(self.decode):
            case int(status):
                return status, [ERROR], JSON
            case "whole":
                return 200, [b'{"id":', b"1}"], JSON
            case "falls silent":
                return 200, [EVENT, asyncio.Event().wait()]
            case does:
                return 200, PARTS.get(does, [EVENT, DONE])


class Engines(Scripted):
    """Some legs cannot be written as HTTP, and some decode engines are asked to free blocks."""

    scripts = None

    def send(self, call, instance, path, **more):
        script = self.scripts.prefill if instance.role is Role.PREFILL else self.scripts.decode
        if script and script[0][1] == "unsendable":
            script.pop(0)
            raise EngineError(f"{instance.id} was not asked", reached=False)
        super().send(call, instance, path, **more)

    async def post(self, leg, *, timeout_s):
        await asyncio.sleep(0)
        return EngineResponse(400, JSON, ERROR)


def check_end(client):
    """Accept the end of one request: one of those that a client can understand, or none if it has gone."""
    response, record = client.response, client.record
    assert client.request.state is RequestState.OVER
    assert client.request.response_complete
    assert response.closed.is_set()  # twice would have raised
    if record.status == CLIENT_CLOSED_REQUEST:
        assert not response.is_whole
    else:
        assert response.is_whole
        assert record.status == response.status
    if client.status == 200 and client.error is None and response.is_whole:
        assert client.body in (EVENT + DONE, b'{"id":1}', b"".join(PARTS["late error event"]))
    assert response.keep_alive or client.error[0] == "ServiceUnavailableError"


@dataclass
class World:
    """A router before scripted engines, its clients, and a clock that moves when nothing else does."""

    scripts: Scripts
    engines: Engines
    notes: Noted
    router: object
    now: list
    clients: list

    @classmethod
    def of(cls, scripts, engines_of, places, *, connects, ends_at_once):
        engines = Engines(scripts.on_prefill, scripts.on_decode, connects=connects, ends_at_once=ends_at_once)
        engines.scripts, notes, now = scripts, Noted(), [0.0]
        router = router_of(
            engines,
            *engines_of,
            retries=RETRIES,
            spans=notes,
            limits=Settings(max_concurrency=places, max_queue=2, max_queue_wait_s=1.0),
            first_token_timeout_s=1.0,
            stream_idle_timeout_s=1.0,
            total_timeout_s=2.0,
            clock=lambda: now[0],
        )
        return cls(scripts, engines, notes, router, now, [])

    async def behave(self, number, does, turns, fields):
        """Send a request, and do something while it is under way."""
        client = self.router.start(call(**fields), name=f"r{number}")
        self.clients.append(client)
        await pass_by(turns)
        if does == "hangs up":
            client.hang_up()
        elif does == "is slow":
            client.request.pause()
            await asyncio.sleep(0.001)
            client.request.resume()

    async def finish(self):
        """Let time pass until all requests are over: what hangs has its time limit."""
        await asyncio.sleep(0.002)
        while not all(client.is_over for client in self.clients):
            self.now[0] += 0.5
            for request in self.router.requests:
                request.check_deadlines(self.now[0])
            self.router.gate.expire()
            await pass_by(3)

    async def check(self):
        for client in self.clients:
            check_end(await client.end())
        async with self.router.releaser:
            pass
        await pass_by(3)  # an attempt to connect that was given up ends in the event loop's own time
        check_legs(self.engines, self.notes, len(self.clients))
        assert self.router.is_idle()
        assert len(asyncio.all_tasks()) == 1


async def pass_by(turns):
    for _ in range(turns):
        await asyncio.sleep(0)


@settings(max_examples=examples(300), deadline=None)
@given(
    prefill_script=st.lists(st.tuples(pauses, prefills), max_size=8),
    decode_script=st.lists(st.tuples(pauses, decodes), max_size=8),
    engines_of=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    clients=st.lists(ways, min_size=1, max_size=5),
    places=st.sampled_from([100, 1, 2]),
    ends_in=st.sampled_from([None, 0, 1, 3, 8, 20]),
    connects=st.booleans(),
    ends_at_once=st.booleans(),
)
def test_nothing_is_left_running(
    prefill_script, decode_script, engines_of, clients, places, ends_in, connects, ends_at_once
):
    """Several requests at once, over engines that fail, hang, restart and refuse; some clients leave, others dawdle.

    ``ends_in``: turns of the event loop until the router is shut down; None: it goes on until all are served.
    """

    async def run():
        scripts = Scripts(list(prefill_script), list(decode_script))
        world = World.of(scripts, engines_of, places, connects=connects, ends_at_once=ends_at_once)
        async with asyncio.TaskGroup() as group, world.router.requests:
            for number, way in enumerate(clients):
                group.create_task(world.behave(number, *way))
            await pass_by(1)  # they are all there
            await pass_by(40 if ends_in is None else ends_in)
            if ends_in is None:
                await world.finish()
        if ends_in is None:
            scripts.prefill.clear()
            scripts.decode.clear()
            world.clients.append(await world.router.serve(name="last"))
            assert world.clients[-1].body == EVENT + DONE
        await world.check()

    asyncio.run(run())


def check_legs(engines, notes, requests):
    """Accept what has become of the legs: each is closed once, and no id is used for two prefills."""
    assert not engines.open
    told = Counter((one[0], *one[1:3]) for one in notes.told)
    began = {one[1:]: count for one, count in told.items() if one[0] == "began"}
    ended = {one[1:]: count for one, count in told.items() if one[0] == "ended"}
    assert began == ended
    assert sum(one[0] == "over" for one in notes.told) == notes.requests == requests
    legs = [(request_id(leg), leg.instance.role) for leg in engines.legs if leg.instance.role is Role.PREFILL]
    assert len(legs) == len(set(legs)), "an id was used for two prefills"
    for name in {request.split("-")[0] for request, _ in legs}:
        assert len([one for one, _ in legs if one.split("-")[0] == name]) <= 1 + RETRIES


BODY = {"prompt": "once", "stream": True, "temperature": 0, "max_tokens": 12}
ENDS = {"breaks off": [EngineError("broke off")], "ends": [], "says so": [b'data: {"error":{"code":500}}\n\n', DONE]}


@settings(max_examples=examples(100), deadline=None)
@given(
    breaks=st.lists(st.tuples(st.integers(0, 16), st.sampled_from([*ENDS])), max_size=5),
    leaves=st.one_of(st.none(), st.integers(0, 60)),
    ends_at_once=st.booleans(),
    resumes=st.booleans(),
    first=st.sampled_from(FirstTokenFrom),
)
def test_a_stream_is_that_of_one_engine_or_ends_with_an_error(breaks, leaves, ends_at_once, resumes, first):
    """Wherever its engines break off, and in whichever way; whichever of them makes the first token."""
    whole = b"".join(events(BODY, name="x"))
    offer = {"apis": ["completions"], "max_model_len": 4096}

    async def run():
        left = []

        async def decode(leg):
            stream = [*events(json.loads(leg.body), name="x")]
            if not left:
                return 200, stream
            after, how = left.pop(0)
            return (200, stream) if after >= len(stream) else (200, [*stream[:after], *ENDS[how]])

        async def prefill(leg):
            params = prefilled(leg, transfer_mode="pull", pdrelay_first_token=offer)
            answer = first_answer(json.loads(leg.body), name="x") | json.loads(params.body)
            return EngineResponse(200, JSON, json.dumps(answer).encode())

        engines = Scripted(prefill, decode, ends_at_once=ends_at_once)
        notes = Noted()
        router = router_of(engines, 1, 4, resume_streams=resumes, first_token_from=first, spans=notes)
        await router.serve(call(**BODY), name="teaches")
        left += breaks
        client = router.start(call(**BODY))
        if leaves is not None:
            for _ in range(leaves):
                await asyncio.sleep(0)
            client.hang_up()
        await client.end()

        assert client.request.state is RequestState.OVER
        assert router.is_idle()
        check_legs(engines, notes, 2)
        shown = client.got.partition(b'data: {"error"')[0]  # an engine's own passes where nobody goes on
        got = read(shown)[0] if client.response.begun else ""
        if client.response.is_whole and client.error is None and shown == client.body:
            assert read(client.body) == read(whole)
        else:
            assert read(whole)[0].startswith(got)

    asyncio.run(run())
