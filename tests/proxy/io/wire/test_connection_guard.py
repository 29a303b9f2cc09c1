"""Connections to engines that were added go where was looked, and nowhere else."""

import asyncio

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.http.address_allowlist import AllowList
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.errors import EngineError, NotAllowed
from pdrelay_proxy.io.probes.checks import HttpChecks, ProbeFailed
from pdrelay_proxy.io.wire import WireEngines
from pdrelay_proxy.io.wire.connection_guard import Guard
from pdrelay_proxy.io.wire.pool import Pool
from pdrelay_proxy.settings import Settings
from support.sim import serving, sims
from support.simulated_loop import in_simulated_time

pytestmark = pytest.mark.edges


class Names:
    """A name service that answers otherwise each time."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self, host, port):
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def guard(names, *entries, given=()):
    return Guard(AllowList.parse(entries), lambda address: address.host in given, names)


def at(host, port=80, scheme="http"):
    return Address(scheme, host, int(port))


async def test_an_address_is_looked_at_without_a_name_service():
    """It leads nowhere else."""
    looked = guard(Names([]))

    assert await looked.ips_of(at("10.0.0.1")) == ["10.0.0.1"]
    with pytest.raises(NotAllowed, match=r"169\.254\.169\.254 is not in allowed_instances"):
        await looked.ips_of(at("169.254.169.254"))


async def test_only_what_may_be_reached_of_where_a_name_leads_is_connected_to():
    """An attacker's name may have a good address, too."""
    looked = guard(Names(["8.8.8.8", "10.0.0.7"]))

    assert await looked.ips_of(at("d0.example")) == ["10.0.0.7"]
    with pytest.raises(NotAllowed, match=r"d0\.example leads to 169\.254\.169\.254, which is not in allowed_instances"):
        await guard(Names(["169.254.169.254"])).ips_of(at("d0.example"))


async def test_what_the_settings_name_may_lead_anywhere():
    """Who writes the settings may have engines where they like. An address needs no look."""
    names = Names(["8.8.8.8"])
    looked = guard(names, given={"d0.example", "9.9.9.9"})

    assert await looked.ips_of(at("d0.example")) == ["8.8.8.8"]
    assert await looked.ips_of(at("9.9.9.9")) == ()
    assert names.asked == 1


def both(looked):
    """The clients that speak to engines: that of the legs, and that of the probes."""
    return WireEngines(Settings(health_check_timeout_s=20), guard=looked), HttpChecks(timeout_s=20, guard=looked)


async def test_a_name_that_leads_elsewhere_a_moment_later_changes_nothing():
    """DNS rebinding: each connection goes to the address that was looked at, by whichever client."""
    with serving(sims()["d0"]) as engine:
        port = engine.rpartition(":")[2]
        instance = Instance(InstanceId("decode-0"), Role.DECODE, at("engine.invalid", port))
        looked = guard(Names(*[["127.0.0.1"]] * 2, ["169.254.169.254"]))
        legs, checks = both(looked)
        async with legs:
            assert (await legs.models(instance, ())).status == 200
            assert (await checks.probe(instance)).models
            other = Instance(InstanceId("decode-1"), Role.DECODE, at("rebound.invalid", port))
            with pytest.raises(EngineError, match="decode-1 is not where engines may be added"):
                await legs.models(other, ())
            with pytest.raises(ProbeFailed, match=r"is not where engines may be added \(allowed_instances\)"):
                await checks.probe(other)


async def test_the_host_that_an_engine_is_told_is_the_name():
    """It may serve several, and its certificate has the name."""
    seen = []

    async def app(scope, receive, send):
        seen.append(dict(scope["headers"])[b"host"].decode())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"data": []}'})

    with serving(app, lifespan="off") as engine:
        port = engine.rpartition(":")[2]
        instance = Instance(InstanceId("decode-0"), Role.DECODE, at("engine.invalid", port))
        legs, checks = both(guard(Names(["127.0.0.1"])))
        async with legs:
            await legs.models(instance, ())
            await checks.metrics(instance)

    assert seen == [f"engine.invalid:{port}"] * 2


@pytest.mark.parametrize("silent", [1, 8])
def test_a_silent_address_leaves_time_for_the_others_of_its_name(silent):
    """DNS may list hosts that are gone: a connection there is not refused, nothing comes back at all."""
    ips = [f"10.0.0.{number}" for number in range(silent + 1)]
    dialled = []

    async def dial(protocol, host, port):
        dialled.append(host)
        if host != ips[-1]:
            await asyncio.Event().wait()
        protocol()

    pool = Pool(keepalive_s=1, connect_timeout_s=5, guard=guard(Names(ips)), dial=dial)
    in_simulated_time(pool.open(Instance(InstanceId("prefill-0"), Role.PREFILL, at("p0.example"))))

    assert dialled == ips


async def test_a_name_that_leads_nowhere_cannot_be_reached():
    """That is no bug, and no reason to connect."""

    async def nowhere(host, port):
        raise OSError

    instance = Instance(InstanceId("decode-0"), Role.DECODE, at("gone.invalid"))
    legs, checks = both(guard(nowhere))
    async with legs:
        with pytest.raises(EngineError, match="decode-0 cannot be reached"):
            await legs.models(instance, ())
        with pytest.raises(ProbeFailed, match="cannot be reached"):
            await checks.probe(instance)
