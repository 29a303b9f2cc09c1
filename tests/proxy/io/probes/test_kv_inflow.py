"""The alarm for decode engines that compute what others have computed."""

import asyncio
import logging

from support.sim import until_async
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.measures import Measures
from xpyd_proxy.core.model import RequestId, Role
from xpyd_proxy.io.probes.checks import Sick
from xpyd_proxy.io.probes.kv_inflow import InflowWatch
from xpyd_proxy.io.sight import Sight


class World:
    """One prefill and two decode engines, of which only the second gets its KV cache."""

    def __init__(self):
        registry = self.registry = Registry()
        self.p = registry.add(Role.PREFILL, Address("http", "h", 1))
        self.dry = registry.add(Role.DECODE, Address("http", "h", 2))
        self.wet = registry.add(Role.DECODE, Address("http", "h", 3))
        self.sight = Sight(Measures(frozenset()), lambda: 1.0)
        self.tokens = {self.dry.id: 0, self.wet.id: 0}
        self.sick = False
        self.watch = InflowWatch(registry, self.metrics, self.sight, every_s=0.001)

    async def metrics(self, instance):
        if self.sick:
            raise Sick("cannot be reached")
        text = 'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} %d\n'
        return (text % self.tokens[instance.id]).encode()

    def serve(self, name):
        for decode in (self.dry, self.wet):
            request = RequestId(f"{name}-{decode.id}")
            for instance in (self.p, decode):
                self.sight.began(instance, request)
                self.sight.answered(instance, request, 0.1)
                self.sight.ended(instance, request, None)
        self.tokens[self.wet.id] += 20


async def test_an_engine_that_gets_nothing_is_found_and_the_others_are_not(caplog):
    """In pull mode, where no answer tells."""
    world = World()
    for turn in range(5):
        world.serve(f"r{turn}")
        await world.watch.look()

    assert world.sight.measures.without_kv == {("decode-0",): 2}  # the others are not certain yet
    assert [(one.where, one.reason) for one in world.sight.pulse.mishaps] == [
        ("decode-0", "no KV cache arrived for 1 legs")
    ] * 2
    assert "decode-0 got no KV cache for its last 1 legs" in caplog.text


async def test_an_engine_that_cannot_be_asked_is_not_accused():
    """That it cannot be reached is told by others."""
    world = World()
    world.sick = True
    for turn in range(5):
        world.serve(f"r{turn}")
        await world.watch.look()

    assert not world.sight.measures.without_kv


async def test_what_was_counted_of_engines_that_left_is_forgotten():
    """Also where nobody reads the metrics: engines come and go, and ids are never used again."""
    world = World()
    world.serve("r")
    world.registry.remove(world.wet.id, now=0)
    await world.watch.look()

    assert {key[0] for key in world.sight.measures.legs} == {"prefill-0", "decode-0"}
    assert world.sight.pulse.legs.keys() == {"prefill-0", "decode-0"}


async def test_it_looks_for_as_long_as_the_router_serves(caplog):
    """Also after something unforeseen, and not for longer."""
    caplog.set_level(logging.ERROR)
    world, asked = World(), []

    async def odd(instance):
        asked.append(instance)
        raise KeyError

    world.watch._metrics = odd
    async with world.watch.running():
        await until_async(lambda: len(asked) > 3)
    seen = len(asked)
    await asyncio.sleep(0.01)

    assert len(asked) == seen
    assert "could not be compared" in caplog.text
