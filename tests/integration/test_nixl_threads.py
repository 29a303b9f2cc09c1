"""Which threads call NIXL: each is bound to the device of the KV cache first, and NIXL has none of its own there.

A thread without the device's context ends the process in CUDA's driver (ai-dynamo/nixl#2102). There is no device here:
binding is seen by the calls of torch, and what a device would get is asked for in host memory.
"""

import gc
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest
from nixl import _api as nixl_api

from pdrelay_connector.core.ports import XferOutcome
from pdrelay_connector.errors import TransferError
from pdrelay_connector.io.nixl import NixlTransferAgent, make_agent, register
from pdrelay_connector.settings import Mode
from support.engines import changed, rank_info
from support.sim import until

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]
BYTES = 1 << 20
# All of NIXL's Python agent that leads to a backend.
CALLS = (
    "add_remote_agent", "check_xfer_state", "create_backend", "deregister_memory", "get_agent_metadata",
    "get_new_notifs", "initialize_xfer", "register_memory", "remove_remote_agent", "transfer",
)  # fmt: skip


def foreign_threads():
    """Return the threads of this process that Python has not started."""
    tasks = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    return tasks - {thread.native_id for thread in threading.enumerate()}


def polling():
    return [thread for thread in threading.enumerate() if thread.name == "pdrelay-progress"]


class Memory:
    """Memory of one process, as the host's or as a device's."""

    def __init__(self, value, bind):
        self.bytes = np.full(BYTES, value, dtype=np.uint8)
        self.agent = make_agent(str(uuid.uuid4()), progress_delay_us=1000, bind=bind)
        self.info = changed(rank_info("p"), agent=register(self.agent, "DRAM", 0, [(self.address, BYTES)]))

    @property
    def address(self):
        return self.bytes.ctypes.data


def read(theirs, ours):
    mover = NixlTransferAgent(ours.agent, "DRAM", 0)
    mover.read(mover.attach(theirs.info), np.array([[theirs.address, ours.address, BYTES]], dtype=np.int64))
    ended = []
    until(lambda: ended.extend(mover.poll()) or ended)
    return ended[0].outcome


@pytest.mark.parametrize("transports", ["tcp", "all"])
def test_with_a_device_nixl_has_no_thread_and_ours_is_bound_before_its_first_call(monkeypatch, transports):
    """Reads end all the same: the bound thread of who is read from answers them."""
    monkeypatch.setenv("UCX_TLS", transports)
    bound = []
    called = set()
    monkeypatch.setattr(nixl_api.nixl_agent, "get_new_notifs", noting(nixl_api.nixl_agent.get_new_notifs, called))
    first = Memory(0, None)  # with the process's first agent UCX starts a thread that answers callers
    before = foreign_threads()
    theirs, ours = (Memory(value, lambda: bound.append(threading.get_ident())) for value in (2, 1))
    added = foreign_threads() - before

    assert added == set()
    assert read(theirs, ours) is XferOutcome.DONE
    assert (ours.bytes == 2).all()
    assert sorted(bound) == sorted(thread.ident for thread in polling())
    assert called == set(bound)
    del first, theirs, ours
    gc.collect()
    until(lambda: not polling(), seconds=10)


def test_in_host_memory_nixl_polls_itself():
    """Its thread costs less than one of ours, and needs no device."""
    first = Memory(0, None)
    before = foreign_threads()
    memory = Memory(1, None)

    assert len(foreign_threads() - before) == 1
    assert polling() == []
    del first, memory


def test_memory_of_a_device_needs_an_agent_that_is_bound():
    """Else NIXL's own thread would meet it, hours later."""
    agent = make_agent(str(uuid.uuid4()), progress_delay_us=1000)

    with pytest.raises(TransferError, match="needs an agent that is bound"):
        register(agent, "VRAM", 0, [(0, 1)])


def test_more_threads_of_nixls_own_are_refused_with_a_device():
    with pytest.raises(TransferError, match="num_threads 2"):
        make_agent(str(uuid.uuid4()), progress_delay_us=1000, backends={"UCX": {"num_threads": "2"}}, bind=lambda: None)


def noting(call, threads):
    def noted(*args, **kwargs):
        threads.add(threading.get_ident())
        return call(*args, **kwargs)

    return noted


@pytest.mark.parametrize("mode", [Mode.PULL, Mode.PUSH])
def test_every_thread_of_an_engine_that_calls_nixl_has_been_bound(monkeypatch, mode):
    """But for vLLM's own, which registers the cache and has its device since it began."""
    import torch

    from support.connector_process import ConnectorProcess, same

    bound, called = set(), set()
    monkeypatch.setattr(torch.cpu, "set_device", lambda device: bound.add(threading.get_ident()))
    for name in CALLS:
        monkeypatch.setattr(nixl_api.nixl_agent, name, noting(getattr(nixl_api.nixl_agent, name), called))
    p, d = (ConnectorProcess(name, mode, 0) for name in "pd")
    try:
        p.fill(1)
        if mode is Mode.PULL:
            p.lend("a")
            assert not d.load("a", p, p.engine)
        else:
            p.push("a", d)

        assert same(p, d)
        assert called - bound == {threading.main_thread().ident}
        assert called & bound, "no thread of ours has called NIXL"
    finally:
        for process in (p, d):
            process.stop()
