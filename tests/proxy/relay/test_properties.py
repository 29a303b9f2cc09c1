"""Whatever the engines do, and in whatever order: no leg is left behind, and no name is used twice."""

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from support.scripted import DONE, EVENT, Scripted, call, prefilled, relay_of, request_id
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import Answer, RequestId, Role
from xpyd_proxy.errors import EngineError, EngineTimeout, ProxyError

ERROR = b'{"error":{"message":"no","type":"x","param":null,"code":400}}'
RETRIES = 2
RAISES = {"bad": EngineError("bad"), "down": EngineError("down", reached=False), "slow": EngineTimeout("slow")}
PARTS = {
    "error event": [b'data: {"error":{"code":500}}\n\n'],
    "empty": [],
    "late": [EVENT, EngineError("late")],
}

pauses = st.integers(0, 4)  # turns of the event loop
prefills = st.sampled_from(["good", "other engine", "pull", "bad", "down", "slow", 400, 500, "no params", "never"])
decodes = st.sampled_from(["good", "bad", "down", 400, 500, "error event", "empty", "late", "never"])


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
            raise RAISES[does]
        return does

    async def on_prefill(self, leg):
        match await self.step(self.prefill):
            case int(status):
                return Answer(status, "application/json", ERROR)
            case "no params":
                return Answer(200, "application/json", b"{}")
            case does:
                engine = "e2" if does == "other engine" else "e1"
                return prefilled(leg, engine=engine, transfer_mode="pull" if does == "pull" else "push")

    async def on_decode(self, _):
        does = await self.step(self.decode)
        return (does, [ERROR]) if isinstance(does, int) else (200, PARTS.get(does, [EVENT, DONE]))


class Ledger:
    """A watcher that knows which legs are open: each begins, is answered at most once, and ends once."""

    def __init__(self):
        self.open = {}
        self.count = 0

    def began(self, instance, request, /):
        assert (instance.id, request) not in self.open
        self.open[instance.id, request] = False
        self.count += 1

    def answered(self, instance, request, seconds, /):
        assert self.open[instance.id, request] is False
        self.open[instance.id, request] = True

    def ended(self, instance, request, failure, /):
        del self.open[instance.id, request]


async def serve(relay, name, limit):
    """Serve one request; a client that has waited too long hangs up."""
    try:
        async with asyncio.timeout(limit), relay.serve(call(), Journey(RequestId(name))) as reply:
            return b"".join([reply.body, *([chunk async for chunk in reply.rest] if reply.rest else [])])
    except (ProxyError, TimeoutError):
        return None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(pauses, prefills), max_size=8),
    st.lists(st.tuples(pauses, decodes), max_size=8),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_nothing_is_left_running(prefill_script, decode_script, x, y, requests):
    """Several requests at once, over engines that fail, hang, restart and refuse."""

    async def run():
        scripts = Scripts(list(prefill_script), list(decode_script))
        engines = Scripted(scripts.on_prefill, scripts.on_decode)
        ledger = Ledger()
        relay = relay_of(engines, x, y, retries=RETRIES, watchers=(ledger,))
        bodies = await asyncio.gather(*(serve(relay, f"r{number}", 0.02) for number in range(requests)))
        scripts.prefill.clear()
        scripts.decode.clear()
        last = await serve(relay, "last", 5)

        async with relay.releaser:
            pass
        assert not engines.open
        assert len(asyncio.all_tasks()) == 1
        assert not ledger.open
        assert ledger.count == len([leg for leg in engines.legs if b"2147483647" not in leg.body])
        assert all(body in (None, EVENT + DONE) for body in bodies)
        assert last == EVENT + DONE
        legs = [(request_id(leg), leg.instance.role) for leg in engines.legs if leg.instance.role is Role.PREFILL]
        assert len(legs) == len(set(legs)), "an id was used for two prefills"
        for name in {request.split("-")[0] for request, _ in legs}:
            assert len([one for one, _ in legs if one.split("-")[0] == name]) <= 1 + RETRIES

    asyncio.run(run())
