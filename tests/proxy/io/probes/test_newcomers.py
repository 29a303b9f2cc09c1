"""An engine that was added just now is asked what it is, for as long as an operator may wait."""

import asyncio

import httpx

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.pair_history import PairHistory
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.io.probes.checks import HttpChecks
from pdrelay_proxy.io.probes.newcomers import Newcomers
from support.sim import InMemory


async def test_one_that_does_not_come_to_its_end_holds_up_no_answer():
    """It answers its model and hangs then: it is added, its probes go on, and nothing half known is kept."""
    never = asyncio.Event()

    async def engine(request):
        if request.url.path == "/metrics":
            await never.wait()
        return httpx.Response(200, json={"data": [{"id": "m"}], "version": "0.32.0"})

    registry = Registry()
    address = Address("http", "new", 80)
    name = registry.add(Role.DECODE, address).id
    checks = HttpChecks(timeout_s=60.0, transport=InMemory({"new": engine}))

    assert await Newcomers(registry, checks, PairHistory(), patience_s=0.01).warning(Role.DECODE, address) is None
    assert registry.member(name).facts.version is None


async def test_one_that_is_gone_again_is_no_error():
    """Another operator has removed it meanwhile."""
    newcomers = Newcomers(Registry(), HttpChecks(timeout_s=1.0, transport=InMemory({})), PairHistory(), patience_s=1.0)

    assert await newcomers.warning(Role.DECODE, Address("http", "new", 80)) is None
