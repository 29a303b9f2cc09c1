"""One NIXL agent that a worker uses for two things: it writes into other engines and reads from them."""

import os
import uuid

import numpy as np
import pytest

from pdrelay_connector.core.ports import XferOutcome
from pdrelay_connector.errors import TransferError
from pdrelay_connector.io.nixl import NixlTransferAgent, RemoteAgents, make_agent, register
from support.engines import changed, rank_info
from support.sim import until

pytestmark = pytest.mark.nixl
BYTES = 4096


class Memory:
    """Memory of one process, and what peers are told of it."""

    def __init__(self, value):
        self.bytes = np.full(BYTES, value, dtype=np.uint8)
        self.agent = make_agent(str(uuid.uuid4()), progress_delay_us=1000)
        self.info = changed(rank_info("p"), agent=register(self.agent, "DRAM", 0, [(self.address, BYTES)]))

    @property
    def address(self):
        return self.bytes.ctypes.data


@pytest.fixture
def theirs():
    return Memory(2)


@pytest.fixture
def movers():
    """The writer and the reader of one worker, and its memory."""
    ours = Memory(1)
    shared = RemoteAgents(ours.agent)
    return *(NixlTransferAgent(ours.agent, "DRAM", 0, shared) for _ in range(2)), ours


def ended(mover):
    found = []
    until(lambda: found.extend(mover.poll()) or found)
    (one,) = found
    return one


def test_a_rank_is_within_reach_as_long_as_it_is_read_from_or_written_into(movers, theirs):
    """NIXL knows an agent once: whoever has done with it first must not take it from the other."""
    writer, reader, ours = movers
    handle = writer.attach(theirs.info)
    assert reader.attach(theirs.info) == handle
    whole = np.array([[theirs.address, ours.address, BYTES]], dtype=np.int64)
    writer.detach(handle)

    reader.read(handle, whole)
    assert ended(reader).outcome is XferOutcome.DONE
    assert (ours.bytes == 2).all()
    reader.detach(handle)
    ours.bytes[:] = 3
    assert writer.attach(theirs.info) == handle
    writer.write(handle, whole)
    assert ended(writer).outcome is XferOutcome.DONE
    assert (theirs.bytes == 3).all()


@pytest.mark.parametrize("again", ["by the same", "by the other"])
def test_a_rank_whose_memory_has_changed_is_not_attached_twice(movers, theirs, again):
    """Whoever shows the metadata of another engine cannot have us write to addresses of its choice."""
    writer, reader, _ = movers
    writer.attach(theirs.info)
    other = changed(theirs.info, rank=1, ranks=2)

    with pytest.raises(TransferError, match="attached already"):
        (writer if again == "by the same" else reader).attach(other)
    with pytest.raises(TransferError, match="attached already"):
        writer.attach(theirs.info)


@pytest.mark.parametrize("given", [None, "off"])
def test_ucx_reads_gpus_of_this_machine_by_cuda_ipc_unless_the_operator_says_otherwise(monkeypatch, given):
    """Without NVLink it would READ over TCP, and says nothing (tests/integration/test_gpu.py measures both)."""
    variable = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    monkeypatch.setenv(variable, given or "")
    if given is None:
        monkeypatch.delenv(variable)
    make_agent(str(uuid.uuid4()), progress_delay_us=1000)

    assert os.environ[variable] == (given or "on")
    assert "UCX_RCACHE_MAX_UNRELEASED" in os.environ
