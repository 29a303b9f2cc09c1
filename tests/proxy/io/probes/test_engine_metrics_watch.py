"""The alarm for decode engines that compute what others have computed."""

import asyncio
import logging

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.io.probes.checks import ProbeFailed
from pdrelay_proxy.io.probes.engine_metrics_watch import EngineMetricsWatch
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from support.sim import until_async
from support.simulated_loop import in_simulated_time


class World:
    """One prefill and two decode engines, of which only the second gets its KV cache."""

    def __init__(self):
        registry = self.registry = Registry()
        self.p = registry.add(Role.PREFILL, Address("http", "h", 1))
        self.dry = registry.add(Role.DECODE, Address("http", "h", 2))
        self.wet = registry.add(Role.DECODE, Address("http", "h", 3))
        self.telemetry = Telemetry(Counters(frozenset()), lambda: 1.0)
        self.tokens = {self.dry.id: 0, self.wet.id: 0}
        self.sick = False
        self.refused = ()
        self.engine_id = b"p"
        self.watch = EngineMetricsWatch(registry, self.metrics, self.telemetry, every_s=0.001)

    async def metrics(self, instance):
        if self.sick:
            raise ProbeFailed("cannot be reached")
        if instance.role is Role.PREFILL:
            return b'vllm:pdrelay_connector_info{engine_id="%b"} 1.0\n' % self.engine_id
        text = "".join(f'vllm:pdrelay_incompatible_peer{{peer="{peer}"}} 1.0\n' for peer in self.refused)
        text += 'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} %d\n'
        return (text % self.tokens[instance.id]).encode()

    def serve(self):
        for decode in (self.dry, self.wet):
            for instance in (self.p, decode):
                self.telemetry.legs_over(instance, [0.1], [0.2], 1.0)
            self.telemetry.transfer_expected(decode.id)
        self.tokens[self.wet.id] += 20


async def test_an_engine_that_gets_nothing_is_found_and_the_others_are_not(caplog):
    """In pull mode, where no answer tells."""
    world = World()
    for _ in range(5):
        world.serve()
        await world.watch.read_engines()

    assert world.telemetry.counters.transfers_missing == {("decode-0",): 2}  # the others are not certain yet
    assert [(one.where, one.reason) for one in world.telemetry.recent.failures] == [
        ("decode-0", "no KV cache arrived for 1 legs")
    ] * 2
    assert "decode-0 got no KV cache for its last 1 legs" in caplog.text


async def test_engines_that_refuse_each_other_are_kept_apart_until_one_is_another():
    """Each request would cost the prefill engine its work, and the decode engine a local prefill."""
    world = World()
    world.registry.learn(world.p.id, EngineCapabilities(engine_id="p"))

    async def fits():
        await world.watch.read_engines()
        return bool(world.registry.fitting(world.p, (world.dry,)))

    assert await fits()
    world.refused = ("p",)
    assert not await fits()
    world.engine_id = b"q"  # it was restarted, with other options
    assert await fits()
    world.refused = ("p", "q")
    assert not await fits()
    world.refused = ()  # the decode engine was
    assert await fits()


async def test_a_decode_engine_that_shows_another_start_is_another_process():
    """It was restarted so fast that no probe missed it."""
    world = World()
    registry = world.registry
    before = EngineCapabilities(started="1.7e+09", connector="pdrelay", fingerprint="a", protocol="4")
    for decode in (world.dry, world.wet):
        registry.learn(decode.id, before)
        registry.member(decode.id).asked_at = 1.0
    metrics = world.metrics

    async def restarted(instance):
        shown = b'process_start_time_seconds %b\nvllm:pdrelay_connector_info{fingerprint="%b",protocol="4"} 1.0\n'
        return await metrics(instance) + shown % ((b"1.8e+09", b"b") if instance is world.dry else (b"1.7e+09", b"a"))

    world.watch._metrics = restarted
    await world.watch.read_engines()
    dry, wet = (registry.member(decode.id) for decode in (world.dry, world.wet))

    assert (dry.facts.fingerprint, dry.may_be_new) == ("b", True)
    assert (wet.facts.fingerprint, wet.may_be_new) == ("a", False)


async def test_an_engine_that_cannot_be_asked_is_not_accused():
    """That it cannot be reached is told by others."""
    world = World()
    world.sick = True
    for _ in range(5):
        world.serve()
        await world.watch.read_engines()

    assert not world.telemetry.counters.transfers_missing


async def test_it_looks_for_as_long_as_the_router_serves(caplog):
    """Also after something unforeseen, and not for longer."""
    caplog.set_level(logging.ERROR)
    world = World()
    asked = []

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


class Shown:
    """Implements MetricsListener: keeps which engines have shown something."""

    def __init__(self):
        self.decodes = set()
        self.rounds = 0

    def decode_shown(self, decode, exposition, now, /):
        self.decodes.add(decode.id)

    def prefills_to_read(self, now, /):
        return ()

    def prefill_shown(self, prefill, exposition, /):
        raise NotImplementedError

    def round_over(self):
        self.rounds += 1
        return ()


def test_a_round_at_a_large_fleet_is_over_in_time_and_does_not_burst():
    """What it shows is old after a minute, for ``--move-above``; a zone may not answer at all."""
    registry = Registry()
    asked = dict[str, float]()
    engines = [registry.add(Role.DECODE, Address("http", "h", port)) for port in range(1, 501)]
    silent = {one.id for one in engines[100:150]}

    async def metrics(instance):
        asked[instance.id] = asyncio.get_running_loop().time()
        await asyncio.sleep(5.0 if instance.id in silent else 0.05)
        if instance.id in silent:
            raise ProbeFailed("does not answer /metrics within 5 s")
        return b'\nvllm:num_requests_running{engine="0"} 3.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'

    shown = Shown()
    telemetry = Telemetry(Counters(frozenset()), lambda: 1.0)
    watch = EngineMetricsWatch(registry, metrics, telemetry, [shown], clock=lambda: 7.0)
    took_s, _ = in_simulated_time(watch.read_engines())

    in_a_second = max(sum(at <= other < at + 1.0 for other in asked.values()) for at in asked.values())
    assert (len(asked), shown.decodes, shown.rounds) == (500, {one.id for one in engines} - silent, 1)
    assert registry.member(engines[0].id).load.kv_usage(now=8.0) == 0.25
    assert registry.member(engines[120].id).load.kv_usage(now=8.0) is None
    assert took_s < 11.0
    assert in_a_second < 150
