"""Which decode engines have no KV room, as their metrics show."""

import asyncio

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.moving_streams.core.kv_relief import KvRelief
from pdrelay_proxy.features.moving_streams.kv_watch import KvWatch
from pdrelay_proxy.io.probes.checks import ProbeFailed
from pdrelay_proxy.io.probes.engine_metrics_watch import EngineMetricsWatch
from pdrelay_proxy.io.request_path.telemetry import Telemetry

SHOWN = b'\nvllm:num_requests_running{engine="0"} 3.0\nvllm:kv_cache_usage_perc{engine="0"} %b\n'


def test_an_engine_is_full_for_as_long_as_each_round_shows_it():
    """Those that do not answer, that are drained, or whose ranks share their metrics take no part."""
    registry = Registry()
    relief = KvRelief(0.95)
    names = [registry.add(Role.DECODE, Address("http", "h", port)).id for port in (1, 2, 3, 4)]
    rank = registry.add(Role.DECODE, Address("http", "h", 5), rank=0).id
    registry.departures.drain(names[2], now=0.0)
    usage = dict.fromkeys((*names, rank), b"0.96") | {names[1]: b"0.2"}

    async def metrics(instance):
        if instance.id == names[3]:
            raise ProbeFailed("does not answer")
        return SHOWN % usage[instance.id]

    telemetry = Telemetry(Counters(frozenset()), lambda: 1.0)
    watch = EngineMetricsWatch(registry, metrics, telemetry, [KvWatch(registry, relief)], clock=lambda: 7.0)
    asyncio.run(watch.read_engines())
    first = relief.shares
    usage[names[0]] = b"0.5"
    asyncio.run(watch.read_engines())

    assert first == {names[0]: pytest.approx(0.16 / 0.96)}
    assert relief.shares == {}
