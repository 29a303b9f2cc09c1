"""Real NIXL whose connections break, or swallow what is sent, while both engines and their side channel live.

UCX speaks TCP here, so that a test reaches its connections: they are sockets of this process. None is broken while a
transfer is under way: then UCX may abort the process of the engine that is read from (docs/connector.md, known limits).
"""

import ctypes
import os
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from nixl import _api as nixl_api

from pdrelay_connector.settings import Mode
from support.connector_process import WHOLE, ConnectorProcess, same
from support.sim import until

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]
SHORT = 5.0  # s for a transfer: a busy machine may keep an engine that is well from its core for seconds


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    started = []

    def start(mode, **options):
        started.extend(ConnectorProcess(name, mode, 0, **options) for name in ("p", "d"))
        return started

    yield start
    for process in started:
        process.stop()


def connections(*processes):
    """Return the descriptors of UCX's connections: those that lead to no side channel."""
    ports = {process.config.address.port for process in processes}
    found = []
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.is_socket()]:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            ends = sock.getsockname(), sock.getpeername()
            if sock.family == socket.AF_INET and ports.isdisjoint(port for _, port in ends):
                found.append(descriptor)
    return found


def shut(descriptors):
    """End connections under UCX's hands, as a NIC or a switch does."""
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            sock.shutdown(socket.SHUT_RDWR)


SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # <asm-generic/socket.h>; Python has no names for them
NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of the packet


@contextmanager
def swallowed(descriptors):
    """What UCX sends over these goes nowhere, and nothing arrives: the kernel drops it at their other ends."""
    drop_all = struct.pack("HP", 1, ctypes.addressof(NOTHING))
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(fileno=os.dup(descriptor))) for descriptor in descriptors]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, drop_all)
        yield
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def test_reads_go_on_over_another_connection(start):
    """Also of what was lent before. NIXL alone would fail every later read from this P."""
    p, d = start(Mode.PULL)
    p.fill(1)
    for name in ("first", "lent before"):
        p.lend(name)
    assert not d.load("first", p, p.engine)
    broken = connections(p, d)
    assert broken
    shut(broken)
    time.sleep(0.3)
    p.fill(2)

    assert not d.load("lent before", p, p.engine)
    assert same(p, d)
    assert d.count("connections_replaced") == 1
    assert d.count("backends_rebuilt") == 0


def test_writes_go_on_over_another_connection(start):
    p, d = start(Mode.PUSH)
    p.fill(1)
    p.push("first", d)
    shut(connections(p, d))
    time.sleep(0.3)
    p.fill(2)
    p.push("second", d)

    assert same(p, d)
    assert p.count("connections_replaced") == 1


def test_reads_that_do_not_end_get_another_backend_and_what_was_lent_before_is_read(start):
    """P answers all the time. The blocks of the read that hung stay quarantined."""
    p, d = start(Mode.PULL, timeout=SHORT)
    hung, others = WHOLE[:31], WHOLE[31:]
    p.fill(1)
    for name in ("first", "hangs", "lent before"):
        p.lend(name)
    assert not d.load("first", p, p.engine)
    with swallowed(connections(p, d)):
        d.order("hangs", p, p.engine, hung)
        assert d.wait("hangs", p)
        assert d.worker.build_connector_worker_meta().quarantined == ["hangs"]
        p.fill(2)
        d.order("lent before", p, p.engine, others)
        assert not d.wait("lent before", p)

    assert d.count("backends_rebuilt") == 1
    for name, cache in d.caches.items():
        assert cache[others].equal(p.caches[name][others])


def test_an_engine_whose_backend_was_replaced_sleeps_and_wakes(start):
    """The read that hung ends with its connection. The memory is registered twice, and NIXL lets go of it twice."""
    p, d = start(Mode.PULL, timeout=SHORT)
    p.fill(1)
    for name in ("first", "hangs", "next"):
        p.lend(name)
    assert not d.load("first", p, p.engine)
    hung = connections(p, d)
    with swallowed(hung):
        d.order("hangs", p, p.engine, WHOLE[:31])
        assert d.wait("hangs", p)
        assert not d.load("next", p, p.engine)
    assert d.count("backends_rebuilt") == 1
    shut(hung)

    def are_released():
        d.worker.get_transfer_results()
        return (news := d.worker.build_connector_worker_meta()) and news.released

    until(are_released)
    d.sleep()
    d.wake_up()
    p.lend("after")

    assert not d.load("after", p, p.engine)
    assert same(p, d)


def test_a_call_that_does_not_return_fails_its_loads_and_holds_their_blocks_until_it_does(start, monkeypatch):
    """Nobody can take a thread back from NIXL, and nobody knows what it still writes."""
    p, d = start(Mode.PULL, timeout=SHORT)
    p.fill(1)
    for name in ("hangs", "next"):
        p.lend(name)
    returns = threading.Event()
    check = nixl_api.nixl_agent.check_xfer_state
    monkeypatch.setattr(nixl_api.nixl_agent, "check_xfer_state", lambda *args: returns.wait(60) and check(*args))
    d.order("hangs", p, p.engine)
    assert d.wait("hangs", p)
    assert d.worker.build_connector_worker_meta().quarantined == ["hangs"]
    assert d.worker.build_connector_worker_meta() is None
    returns.set()
    news = []

    def is_told():
        assert not d.worker.get_transfer_results().finished_recving
        news.append(d.worker.build_connector_worker_meta())
        return news[-1] is not None

    until(is_told)
    assert news[-1].released == ["hangs"]
    assert not d.load("next", p, p.engine)
    assert same(p, d)
    assert d.count("transfer_thread_stuck") == 1
