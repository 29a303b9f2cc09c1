"""Names of engines while DNS is away: their last good addresses are used for a minute, and one line says so."""

import asyncio
import socket

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.http.address_allowlist import AllowList
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.errors import NetworkFault
from pdrelay_proxy.io.wire.connection_guard import Guard
from pdrelay_proxy.io.wire.engine_names import EngineNames
from pdrelay_proxy.io.wire.pool import Pool
from support.simulated_loop import advance, in_simulated_time, settle


class Dns:
    """Answers as the test says; None: not at all."""

    def __init__(self):
        self.answer = ["10.0.0.7"]
        self.asked = []
        self.silence = asyncio.Event()

    async def __call__(self, host, port):
        self.asked.append((host, port))
        if self.answer is None:
            await self.silence.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


DENIED = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
AWAY = pytest.mark.parametrize(
    "away",
    [socket.gaierror(-3, "Temporary failure"), DENIED, [], None],
    ids=["error", "no such name", "empty", "silence"],
)


@AWAY
async def test_a_name_that_does_not_resolve_has_its_last_good_addresses(away, caplog):
    """Whether DNS fails or says nothing; each name is asked for again, and its new address is taken."""
    dns = Dns()
    caplog.set_level("INFO")
    names = EngineNames(dns, patience_s=0.01)
    assert [await names.resolve("p0", 80), await names.resolve("d0", 80)] == [["10.0.0.7"]] * 2
    dns.answer = away
    for _ in range(5):
        assert await names.resolve("p0", 80) == ["10.0.0.7"]
        assert await names.resolve("d0", 80) == ["10.0.0.7"]
    dns.answer = ["10.0.0.8"]
    dns.silence.set()
    for name in ("p0", "d0"):  # the first one asks, and need not wait
        await names.resolve(name, 80)
        await asyncio.sleep(0.001)
        assert await names.resolve(name, 80) == ["10.0.0.8"]

    assert caplog.messages[-1] == "the names of engines resolve again"
    assert len([line for line in caplog.messages if "last good addresses" in line]) == 1


async def test_a_name_that_never_resolved_fails(caplog):
    """There is nothing to use in its place."""
    dns = Dns()
    dns.answer = socket.gaierror(-2, "Name or service not known")
    with pytest.raises(socket.gaierror):
        await EngineNames(dns).resolve("typo", 80)

    assert caplog.messages == []


def test_names_whose_dns_hangs_leave_room_for_those_that_resolve():
    """Who may add engines may name thousands; the system's resolver has a thread for each lookup, five at least."""

    async def scenario():
        dns = Dns()
        names = EngineNames(dns)
        await names.resolve("d0", 80)
        dns.answer = None
        hanging = [asyncio.ensure_future(names.resolve(f"h{number}", 80)) for number in range(9)]
        await settle()
        under_way = len(dns.asked) - 1
        dns.answer = ["10.0.0.8"]
        good = await names.resolve("d0", 80)
        dns.silence.set()
        await asyncio.gather(*hanging)
        return under_way, good

    assert in_simulated_time(scenario())[1] == (4, ["10.0.0.8"])


async def test_connections_that_are_opened_at_once_ask_once():
    """A DNS that hangs has one question for each name, however many requests there are."""
    dns = Dns()
    names = EngineNames(dns, patience_s=0.01)
    await names.resolve("p0", 80)
    dns.answer = None
    await asyncio.gather(*[names.resolve("p0", 80) for _ in range(50)])

    assert len(dns.asked) == 2


async def test_the_names_of_given_engines_are_remembered_too():
    """The guard lets them lead anywhere, but not nowhere."""
    dns = Dns()
    guard = Guard(AllowList.parse(()), lambda _: True, EngineNames(dns, patience_s=0.01).resolve)
    engine = Address("http", "p0", 80)
    assert await guard.ips_of(engine) == ["10.0.0.7"]
    dns.answer = OSError("away")

    assert await guard.ips_of(engine) == ["10.0.0.7"]
    assert await guard.ips_of(Address("http", "10.0.0.9", 80)) == ()


@AWAY
def test_the_last_good_addresses_are_used_for_a_minute(away, caplog):
    """Later they may be those of another pod, to which no prompt may go; one that answers again is used again."""

    async def scenario():
        dns = Dns()
        names = EngineNames(dns)
        await names.resolve("p0", 80)
        dns.answer = away
        await advance(50)
        assert await names.resolve("p0", 80) == ["10.0.0.7"]
        await advance(11)
        for _ in range(3):
            with pytest.raises(socket.gaierror):
                await names.resolve("p0", 80)
        dns.answer = ["10.0.0.8"]
        dns.silence.set()
        await advance(1)
        return await names.resolve("p0", 80)

    assert in_simulated_time(scenario())[1] == ["10.0.0.8"]
    assert len([line for line in caplog.messages if "has not resolved for 60 s" in line]) == 1


def test_a_name_that_went_with_its_engine_hides_no_later_outage(caplog):
    """Nobody asks for it any more, so that it does not resolve again: each outage after that was without a word."""

    async def scenario():
        dns = Dns()
        names = EngineNames(dns)
        for name in ("gone", "p0"):
            await names.resolve(name, 80)
        dns.answer = DENIED
        await advance(61)
        with pytest.raises(socket.gaierror):
            await names.resolve("gone", 80)
        dns.answer = ["10.0.0.7"]
        for _ in range(10):
            await advance(30)
            await names.resolve("p0", 80)
        caplog.clear()
        dns.answer = DENIED
        await advance(50)
        for _ in range(3):
            await names.resolve("p0", 80)
        await advance(11)
        with pytest.raises(socket.gaierror):
            await names.resolve("p0", 80)

    in_simulated_time(scenario())

    assert [line.partition(" (")[0] for line in caplog.messages] == [
        "names of engines do not resolve",
        "p0 has not resolved for 60 s: it is not connected to, as its address may be another's by now",
    ]


def test_each_good_answer_begins_the_minute_anew():
    """Health checks ask each few seconds, so a name is good for a minute after DNS was last well."""

    async def scenario():
        dns = Dns()
        names = EngineNames(dns)
        for _ in range(5):
            await names.resolve("p0", 80)
            await advance(50)
        dns.answer = DENIED
        return await names.resolve("p0", 80)

    assert in_simulated_time(scenario())[1] == ["10.0.0.7"]


@AWAY
def test_a_name_without_good_addresses_is_a_fault_of_the_network(away):
    """Nothing is connected to, and the engine is not blamed: also when DNS says nothing."""
    dialled = []

    async def dial(_, host, port):
        dialled.append((host, port))
        raise OSError("nothing is there")

    async def scenario():
        dns = Dns()
        guard = Guard(AllowList.parse(()), lambda _: True, EngineNames(dns).resolve)
        pool = Pool(keepalive_s=1, connect_timeout_s=5, guard=guard, dial=dial)
        engine = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "p0", 80))
        await guard.ips_of(engine.address)
        dns.answer = away
        await advance(61)
        with pytest.raises(NetworkFault):
            await pool.open(engine)

    in_simulated_time(scenario())
    assert dialled == []
