"""Bulletins on their way."""

import contextlib
import socket
import time

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.model import InstanceId, RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.workers.worker_health import WorkerHealth
from pdrelay_proxy.io.request_path.id_log import InstanceIdLog
from pdrelay_proxy.io.request_path.shared_registry import SharedRegistry
from pdrelay_proxy.io.workers.context import WorkerContext
from pdrelay_proxy.io.workers.health_gossip import HealthGossip
from pdrelay_proxy.settings import Settings
from support.sim import until_async

pytestmark = pytest.mark.edges


D0 = InstanceId("decode-0")


class Worker:
    """One of three, with one engine."""

    def __init__(self, folder, number):
        self.ledger = InstanceIdLog(folder / "ledger")
        self.registry = SharedRegistry(Settings(circuit_breaker_failures=1), self.ledger)
        self.registry.add(Role.DECODE, Address("http", "h", 1))
        self.peers = WorkerHealth(self.registry, patience_s=3.0)
        place = WorkerContext(number, 3, str(folder), port=0, line=0, starts=1)
        self.exchange = HealthGossip(place, self.registry, self.peers, time.monotonic)

    @property
    def load(self):
        return self.registry.member(D0).load

    @property
    def state(self):
        return self.registry.member(D0).life.state


async def test_a_worker_that_comes_late_hears_all_at_once_and_one_that_goes_is_forgotten(tmp_path):
    """It would send requests to an engine that the others know to be broken."""
    zero, one = Worker(tmp_path, 0), Worker(tmp_path, 1)
    zero.load.enter(RequestId("0"))
    zero.registry.member(D0).life.failed(RequestId("0"), Failure.UNREACHABLE, now=time.monotonic())
    async with zero.exchange.running():
        async with one.exchange.running():
            one.load.enter(RequestId("1"))
            await until_async(lambda: one.state is HealthState.EJECTED and zero.load.in_flight == 2)
        await until_async(lambda: zero.load.in_flight == 1)

    assert list(tmp_path.glob("*.told")) == []


async def test_nonsense_and_a_peer_that_does_not_read_stop_nobody(tmp_path, caplog):
    """The others still hear."""
    zero, one = Worker(tmp_path, 0), Worker(tmp_path, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "2.told"))
        async with zero.exchange.running(), one.exchange.running():
            deaf.sendto(b"\xc1 what?", str(tmp_path / "0.told"))
            deaf.setblocking(False)
            _fill(deaf, tmp_path / "2.told")
            one.load.enter(RequestId("1"))
            await until_async(lambda: zero.load.in_flight == 1)
            await until_async(lambda: caplog.text.count("worker 2 could not be told") >= 2)

    assert "what a worker said is no bulletin" in caplog.text
    assert caplog.text.count("worker 2 could not be told") == 2  # once by each of the two


def _fill(sock, path):
    """Send until the socket takes no more (net.unix.max_dgram_qlen), not only until the buffer of a sender is full."""
    sent = 1
    while sent:
        sent = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
            other.setblocking(False)
            while True:
                other.sendto(b"x" * 1000, str(path))
                sent += 1
