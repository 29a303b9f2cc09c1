"""Blocks that nobody will come for are given back at once, and the client does not wait for it."""

import asyncio
import json

import msgspec
import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.model import EngineResponse, Instance, InstanceId, LegRequest, Role
from pdrelay_proxy.core.protocol.request_bodies import release_body
from pdrelay_proxy.core.raw_json import Fields, decode
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.requests.release import Releaser
from support.scripted import (
    DONE,
    EVENT,
    Scripted,
    call,
    good_decode,
    good_prefill,
    never,
    params_of,
    prefilled,
    pulled_prefill,
    request_id,
    router_of,
    until,
)

DOWN = EngineError("down", reached=False)
NO = EngineResponse(400, "application/json", b'{"error":{"message":"too many"}}')


class Notes:
    """Writes down what became of releases."""

    def __init__(self):
        self.told = []

    def released(self, prefill, /, *, freed):
        self.told.append((prefill.id, freed))


class Refusing(Scripted):
    """Decode engines that are asked to free blocks answer as the test says."""

    refusals = ()

    async def post(self, leg, *, timeout_s):
        assert leg.instance.role is Role.DECODE
        self.legs.append(leg)
        outcome = self.refusals[len(self.releases) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @property
    def releases(self):
        return [leg for leg in self.legs if b"2147483647" in leg.body]


class Unsent(Refusing):
    """Engines whose connections take their time, and never are there if the coroutine does not return."""

    def __init__(self, prefill, decode):
        super().__init__(prefill, decode, connects=False)


async def down(_):
    raise DOWN


async def served(router):
    """Serve a request, and wait for what is released behind it."""
    client = await router.serve(call(model="m"))
    await drained(router)
    return client


async def drained(router):
    async with router.releaser:
        pass
    assert router.is_idle()


@pytest.mark.parametrize("refusals", [(NO,), (DOWN, NO), (EngineResponse(401, "", b""), DOWN, NO)])
async def test_a_decode_leg_that_was_never_sent_is_refused_on_purpose(refusals):
    """A decode engine that says no tells the prefill engine to free; any of them can, if it can be reached."""
    notes = Notes()
    engines = Unsent(pulled_prefill, down)
    engines.refusals = refusals
    router = router_of(engines, y=3, retries=0, told=(notes,))
    client = await served(router)

    assert client.error == ("EngineError", "down")
    assert notes.told == [("prefill-0", True)]
    assert len(engines.releases) == len(refusals)
    assert len({leg.instance.id for leg in engines.releases}) == len(refusals)
    assert {leg.path for leg in engines.releases} == {"/v1/completions"}
    params = {**json.loads(prefilled(engines.legs[0], transfer_mode="pull").body)["kv_transfer_params"]}
    assert params_of(engines.releases[0]) == params
    assert json.loads(engines.releases[0].body)["model"] == "m"
    assert request_id(engines.releases[0]) == "r"


async def test_the_engine_that_could_not_be_reached_is_asked_last():
    """It would not answer now either."""
    engines = Unsent(pulled_prefill, down)
    engines.refusals = (NO,)
    router = router_of(engines, y=2, retries=0)
    client = await served(router)

    assert client.error == ("EngineError", "down")
    assert [leg.instance.id for leg in engines.releases] == ["decode-1"]


async def test_the_engine_that_was_being_connected_to_when_the_client_left_is_asked_last():
    """It may never answer; another one frees the blocks within milliseconds."""

    engines = Unsent(pulled_prefill, never)
    engines.refusals = (NO,)
    router = router_of(engines, y=2)
    client = router.start()
    await until(lambda: engines.of(Role.DECODE))
    (tried,) = engines.of(Role.DECODE)
    client.hang_up()
    await drained(router)

    assert tried.instance.id == "decode-0"
    assert [leg.instance.id for leg in engines.releases] == ["decode-1"]


@pytest.mark.parametrize("fleet", [0, 1, 5])
async def test_blocks_that_no_decode_engine_gives_back_are_abandoned(fleet):
    """All decode engines may be gone: the prefill engine is there, and knows the transfer by its name."""

    class Gone(Unsent):
        async def post(self, leg, *, timeout_s):
            asked.append(leg)
            if leg.instance.role is Role.DECODE:
                raise DOWN
            return EngineResponse(200, "application/json", b"{}")

    async def last(leg):
        for instance in router.registry.known(Role.DECODE)[fleet:]:
            router.registry.remove(instance.id, now=0.0)
        return await pulled_prefill(leg)

    asked = []
    notes = Notes()
    engines = Gone(last, down)
    router = router_of(engines, y=max(fleet, 1), retries=0, told=(notes,))
    await served(router)

    (prefill,) = engines.of(Role.PREFILL)
    assert [leg.instance.role for leg in asked] == [Role.DECODE] * min(fleet, 3) + [Role.PREFILL]
    assert params_of(asked[-1])["abandoned_transfer_id"] == params_of(prefill)["transfer_id"]
    assert notes.told == [("prefill-0", True)]


@pytest.mark.parametrize("outcome", [(500, [b"{}"]), (400, [NO.body]), (200, [])])
async def test_a_decode_leg_that_was_sent_settles_it_itself(outcome):
    """A second release would free what the engine may still be reading."""

    async def decode(_):
        return outcome

    engines = Refusing(pulled_prefill, decode)
    router = router_of(engines, retries=0)
    client = await served(router)

    assert client.status in (400, 502)
    assert not engines.releases


@pytest.mark.parametrize(("code", "releases"), [(400, ["decode-0"]), (500, [])])
async def test_a_decode_engine_that_refuses_in_its_stream_has_told_nobody(code, releases):
    """There vLLM tells its connector nothing (completion/serving.py); a failure may be one of the load."""

    async def decode(_):
        return 200, [b'data: {"error":{"message":"too many logprobs","code":%d}}\n\n' % code, DONE]

    engines = Refusing(pulled_prefill, decode)
    engines.refusals = (NO,)
    router = router_of(engines, retries=0)
    client = await served(router)

    assert client.status == code
    assert [leg.instance.id for leg in engines.releases] == releases


async def test_blocks_that_are_pushed_are_not_given_back_this_way():
    """A refused decode leg does not free them; that was tried."""
    engines = Unsent(good_prefill, down)
    router = router_of(engines, retries=0)
    client = await served(router)

    assert client.error == ("EngineError", "down")
    assert not engines.releases


async def test_a_good_request_gives_nothing_back():
    """Its decode engine does."""
    engines = Refusing(pulled_prefill, good_decode)
    router = router_of(engines)
    client = await served(router)

    assert client.body == EVENT + DONE
    assert not engines.releases


class Abandoned(Scripted):
    """Prefill engines take note of what is abandoned."""

    def __init__(self, prefill, decode, **options):
        super().__init__(prefill, decode, **options)
        self.abandoned = []

    async def post(self, leg, *, timeout_s):
        assert (leg.instance.role, leg.path) == (Role.PREFILL, "/v1/completions")
        self.abandoned.append(leg)
        return EngineResponse(200, "application/json", b"{}")


async def left(engines, *, role=Role.PREFILL, **options):
    """Serve a request whose client leaves when an engine of a role has it, and wait for what is released behind it."""
    router = router_of(engines, **options)
    client = router.start(call(model="m"))
    await until(lambda: engines.of(role))
    client.hang_up()
    await drained(router)
    return engines.abandoned


async def test_a_prefill_whose_client_left_is_abandoned():
    """It may have finished at that moment: then its blocks are leased, and only its name is known here."""
    notes = Notes()
    engines = Abandoned(never, never)
    (leg,) = await left(engines, told=(notes,))

    (prefill,) = engines.of(Role.PREFILL)
    assert leg.instance.id == "prefill-0"
    assert request_id(leg) == request_id(prefill)
    assert json.loads(leg.body) == {
        "model": "m",
        "prompt": [0],
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": False,
            "abandoned_transfer_id": params_of(prefill)["transfer_id"],
        },
    }
    assert notes.told == [("prefill-0", True)]


async def test_what_is_abandoned_is_said_again_where_the_connection_breaks():
    """Saying it twice does no harm; unsaid, it keeps the blocks pinned for a whole lease."""

    class Breaking(Abandoned):
        async def post(self, leg, *, timeout_s):
            await super().post(leg, timeout_s=timeout_s)
            if len(self.abandoned) == 1:
                raise DOWN
            return EngineResponse(200, "application/json", b"{}")

    notes = Notes()
    first, again = await left(Breaking(never, never), told=(notes,))

    assert (first.instance, first.body) == (again.instance, again.body)
    assert notes.told == [("prefill-0", True)]


async def test_a_prefill_whose_good_answer_cannot_be_read_is_abandoned():
    """It has computed the prompt, and nobody knows what it has leased: each try has a name of its own."""

    async def half(leg):
        return EngineResponse(200, "application/json", b'{"id":"cmpl-')

    router = router_of(engines := Abandoned(half, good_decode), decode_only_fallback=False)
    client = await served(router)
    await drained(router)

    names = [params_of(leg)["transfer_id"] for leg in engines.of(Role.PREFILL)]
    assert client.status == 502
    assert [json.loads(leg.body)["kv_transfer_params"]["abandoned_transfer_id"] for leg in engines.abandoned] == names


async def test_a_prefill_whose_time_is_over_is_abandoned():
    """It may have finished at that moment, or does when it goes on: a move gives an engine little time."""
    now = [0.0]
    engines = Abandoned(never, never)
    router = router_of(engines, clock=lambda: now[0], first_token_timeout_s=5.0, decode_only_fallback=False)
    client = router.start(call(model="m"))
    await until(lambda: engines.of(Role.PREFILL))
    now[0] = 5.1
    client.request.check_deadlines(now[0])
    await client.end()
    await drained(router)

    (leg,) = engines.abandoned
    assert request_id(leg) == request_id(engines.legs[0])
    assert params_of(leg)["abandoned_transfer_id"] == params_of(engines.legs[0])["transfer_id"]


async def test_a_prefill_that_refuses_is_not_abandoned():
    """It has computed nothing."""

    async def refuses(leg):
        return EngineResponse(500, "application/json", b"{}")

    router = router_of(engines := Abandoned(refuses, good_decode))
    await served(router)
    await drained(router)

    assert engines.abandoned == []


async def test_a_prefill_that_was_never_sent_is_not_abandoned():
    """The engine knows nothing of it."""
    assert await left(Abandoned(never, never, connects=False)) == []


async def test_a_prefill_whose_answer_is_there_is_not_abandoned():
    """What it has leased is known: the decode engine settles it."""
    assert await left(Abandoned(pulled_prefill, never), role=Role.DECODE) == []


async def test_a_transfer_that_a_decode_engine_knows_is_not_abandoned():
    """In push both have their leg at once: the decode engine's end tells the prefill engine."""
    router = router_of(engines := Abandoned(good_prefill, good_decode), mode="push")
    await router.serve(call(model="m"))
    engines.prefill = engines.decode = never
    client = router.start(call(model="m"))
    await until(lambda: len(engines.of(Role.DECODE)) == 2)
    client.hang_up()
    await drained(router)

    assert engines.abandoned == []


async def test_what_cannot_be_given_back_is_counted():
    """No engine answers as it should, or too many are at it: the lease frees the blocks."""
    notes = Notes()
    prefill, decode = (Instance(InstanceId(f"{role}-0"), role, Address("http", "h", 1)) for role in Role)
    leg, last = (LegRequest(one, "/v1/completions", b"{}", ()) for one in (decode, prefill))

    async def ok(leg):
        return EngineResponse(200 if leg is not last else 404, "", b"")

    class Engines(Scripted):
        async def post(self, leg, *, timeout_s):
            await asyncio.sleep(0)
            return await self.prefill(leg)

    for engines, legs in ((Engines(ok, ok), [leg]), (Engines(down, ok), [leg, leg]), (Engines(ok, ok), [])):
        async with Releaser(engines, (notes,)) as releaser:
            releaser.release(prefill, legs, last)
    assert notes.told == [("prefill-0", False)] * 3

    notes.told.clear()
    async with Releaser(Engines(ok, ok), (notes,)) as releaser:
        for _ in range(70):
            releaser.release(prefill, [leg], last)
        assert len(notes.told) == 6
    assert len(notes.told) == 70


async def test_a_router_that_ends_does_not_wait_for_a_silent_engine():
    """It waits as long as an engine may take to free blocks, and then drops what is under way."""
    prefill = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "h", 1))

    class Silent:
        async def post(self, leg, *, timeout_s):
            await asyncio.Event().wait()

    async with asyncio.timeout(6), Releaser(Silent()) as releaser:
        releaser.abandon(prefill, LegRequest(prefill, "/v1/completions", b"{}", ()))

    assert len(asyncio.all_tasks()) == 1


def test_the_release_asks_for_more_than_any_engine_has():
    """And says nothing of what the client wrote but the model: another prompt would do as well."""
    fields = decode(b'{"model":"m","messages":[],"max_tokens":5}', Fields)
    body = json.loads(release_body(fields, msgspec.Raw(b'{"a": 1.0}')))

    assert body == {
        "model": "m",
        "prompt": [0],
        "max_tokens": 2**31 - 1,
        "stream": False,
        "kv_transfer_params": {"a": 1.0},
    }


async def test_blocks_that_may_be_gone_are_asked_for_by_nobody():
    """A lease that has run out leads to another request's KV cache: then the prompt is computed again."""
    now = [0.0]

    async def decode(leg):
        if leg.instance.id == "decode-0":
            now[0] += 21.0
            raise DOWN
        return await good_decode(leg)

    engines = Unsent(pulled_prefill, decode)
    engines.refusals = (NO, NO)
    router = router_of(engines, y=2, clock=lambda: now[0])
    client = await served(router)

    assert client.body == EVENT + DONE
    assert [request_id(leg) for leg in engines.of(Role.PREFILL)] == ["r", "r-r1"]
    (used,) = [leg for leg in engines.of(Role.DECODE) if leg.instance.id == "decode-1" and leg not in engines.releases]
    assert params_of(used)["remote_request_id"].startswith("cmpl-r-r1")


async def test_only_an_engine_that_fits_takes_over_blocks():
    """Another version of vLLM cannot read them; that engine has a prefill engine of its own."""

    async def decode(leg):
        if leg.instance.id == engines.of(Role.DECODE)[0].instance.id:
            raise DOWN
        return await good_decode(leg)

    engines = Unsent(pulled_prefill, decode)
    engines.refusals = (DOWN, NO)
    router = router_of(engines, x=2, y=2)
    for role in Role:
        for instance, version in zip(router.registry.known(role), ("1", "2"), strict=True):
            router.registry.learn(instance.id, EngineCapabilities(version=version))
    client = await served(router)

    assert client.body == EVENT + DONE
    down = engines.of(Role.DECODE)[0].instance.id
    (used,) = [leg for leg in engines.of(Role.DECODE) if leg.instance.id != down and leg not in engines.releases]
    assert request_id(used) == "r-r1"
    assert {leg.instance.id for leg in engines.of(Role.PREFILL)} == {"prefill-0", "prefill-1"}
    releases = {request_id(leg): leg.instance.id for leg in engines.releases}
    assert releases["r"] == down  # nor could the other one tell it to free


@pytest.mark.parametrize(("lease", "prefills"), [(3.0, 2), (30.0, 1)])
async def test_blocks_whose_lease_may_be_over_are_given_back_and_computed_anew(lease, prefills):
    """The answer names the lease; it takes 10 s to find the first decode engine unreachable."""
    now, first = [0.0], [True]

    async def naming_its_lease(leg):
        return prefilled(leg, transfer_mode="pull", pdrelay_lease=lease)

    async def late_at_first(leg):
        if not first:
            return await good_decode(leg)
        first.clear()
        now[0] += 10.0
        raise DOWN

    engines = Refusing(naming_its_lease, late_at_first)
    engines.refusals = (NO,)
    await served(router_of(engines, y=2, clock=lambda: now[0]))

    assert len(engines.of(Role.PREFILL)) == prefills
    assert len(engines.releases) == prefills - 1
