"""KV on a device: NIXL reads and writes it there, and copies to and from host memory lose nothing."""

import threading
import time
import uuid
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    import torch
    from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

    from pdrelay_connector.io.nixl import NixlTransferAgent, make_agent, register
    from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches, place_of, spans_of
    from pdrelay_connector.shell.devices import binding
    from pdrelay_connector.shell.engine_config import EngineConfig
    from pdrelay_connector.shell.host_staging import StagingBuffer, ThreadCopier, stream_beside

from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.layout.shape_checks import check_shapes
from pdrelay_connector.core.layout.transfer_plan import TokenRange, pull_route, push_route
from pdrelay_connector.core.messages import RankInfo
from pdrelay_connector.core.ports import XferOutcome

HAS_CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nixl,
    pytest.mark.timeout(240),  # importing vLLM takes half a minute on a busy machine
    pytest.mark.skipif(not HAS_CUDA, reason="no CUDA"),
]
LAYERS, HEADS, CONTENT, TOKENS = ("l.0", "l.1", "l.2"), 4, 64, 128  # tokens: of a prompt
SLOTS = 5


class Engine:
    """One rank: memory of its own, known to a NIXL agent of its own."""

    def __init__(self, device, layout="LBHNC", block_size=16):
        self.block_size = block_size
        self.blocks = 2 * TOKENS // block_size
        groups = dict.fromkeys(LAYERS, 0)
        self.engine_config = EngineConfig(
            EngineId("e"), Address("127.0.0.1", 1), (CacheGroup(block_size),), groups, self.blocks, HEADS, 1,
            is_producer=True, is_consumer=True,
        )  # fmt: skip
        sizes = {"L": len(LAYERS), "B": self.blocks, "H": HEADS, "N": block_size, "C": CONTENT}
        memory = torch.randint(-(2**15), 2**15, [sizes[axis] for axis in layout], dtype=torch.int16).to(device)
        views = memory.view(torch.bfloat16).permute([layout.index(axis) for axis in "LBHNC"])
        self.caches = dict(zip(LAYERS, views.unbind(0), strict=True))

    def join(self, tensors, blocks):
        """Let NIXL know these tensors: the caches, or the host memory that they go through."""
        memory, device = place_of(tensors)
        bind = None if memory == "DRAM" else binding(next(iter(tensors.values())).device)
        agent = make_agent(str(uuid.uuid4()), progress_delay_us=1000, bind=bind)
        metadata = register(agent, memory, device, spans_of(tensors))
        regions = describe_caches(tensors, self.engine_config, blocks, KernelLayout.ENTRIES)
        self.info = RankInfo(0, 1, metadata, memory, device, regions)
        self.mover = NixlTransferAgent(agent, memory, device)
        return self

    def kept(self, blocks):
        """Return the bits of these blocks, token after token, as vLLM's view of the cache says."""
        found = [cache[blocks].transpose(1, 2).flatten(0, 1).cpu() for cache in self.caches.values()]
        return torch.stack(found).contiguous().view(torch.int16)

    def free(self, blocks):
        return [block for block in range(self.blocks) if block not in blocks]


def wait(what, poll):
    ended = []
    until = time.monotonic() + 30
    while not ended:
        assert time.monotonic() < until, f"{what} did not end"
        ended = poll()
        time.sleep(0.001)
    return ended[0]


def carry_out(p, d, token_range, *, pull):
    """Move a stretch, as seen by whoever starts it, and wait until it is there."""
    one, other, route = (d, p, pull_route) if pull else (p, d, push_route)
    check_shapes(one.info, other.info)
    handle = one.mover.attach(other.info)
    spans = route(one.info, other.info).spans([token_range])
    torch.cuda.synchronize()  # what the caches are filled with is there
    (one.mover.read if pull else one.mover.write)(handle, spans)
    ended = wait("the transfer", one.mover.poll)
    one.mover.detach(handle)
    assert ended.outcome is XferOutcome.DONE, ended.reason
    assert ended.bytes == spans[:, 2].sum()


@pytest.mark.parametrize("pull", [True, False], ids=["read", "write"])
@pytest.mark.parametrize("shape", [("LBHNC", 16), ("BLHNC", 32), ("LBNHC", 16)], ids=str)
@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_bytes_arrive_bit_exact_from_and_to_a_device(source, target, shape, pull):
    """Between twins, into blocks of another size and into another layout; and nothing beside them is touched."""
    p, d = Engine(source), Engine(target, *shape)
    p.join(p.caches, p.blocks)
    d.join(d.caches, d.blocks)
    blocks = torch.randperm(p.blocks - 1)[: TOKENS // p.block_size].add(1).tolist()
    into = torch.randperm(d.blocks - 1)[: TOKENS // d.block_size].add(1).tolist()
    beside = d.kept(d.free(into))
    carry_out(p, d, TokenRange(0, 0, TOKENS, *((blocks, into) if pull else (into, blocks))), pull=pull)

    assert torch.equal(d.kept(into), p.kept(blocks))
    assert torch.equal(d.kept(d.free(into)), beside)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "LBNHC"])
def test_bytes_are_the_same_after_host_memory_on_both_sides(layout):
    """Copied with vLLM's own operation beside what the device computes: VRAM, DRAM, DRAM, VRAM."""
    p, d = Engine("cuda", layout), Engine("cuda")
    buffers = [StagingBuffer(e.caches, e.engine_config.layers, blocks=e.blocks, slots=SLOTS) for e in (p, d)]
    for engine, buffer in zip((p, d), buffers, strict=True):
        engine.join(buffer.tensors, SLOTS + 1)
    blocks = [3, 9, 4, 12]
    slots = [2, 5, 1, 3]
    slots_there = [4, 1, 2, 5]
    into = [7, 1, 14, 2]
    beside = d.kept(d.free(into))
    copy(p, buffers[0], lambda copier: copier.out([blocks], [slots]))
    carry_out(p, d, TokenRange(0, 0, len(slots) * p.block_size, slots, slots_there), pull=True)
    copy(d, buffers[1], lambda copier: copier.into([slots_there], [into]))

    assert torch.equal(d.kept(into), p.kept(blocks))
    assert torch.equal(d.kept(d.free(into)), beside)


def copy(engine, buffer, ask):
    """Have a copier do one thing."""
    device = next(iter(engine.caches.values())).device
    woken = threading.Event()
    copier = ThreadCopier(buffer, copy_kv_blocks, stream_beside(device), woken.set)
    copier.start()
    try:
        ask(copier)
        assert woken.wait(30)
        (ended,) = copier.poll()
    finally:
        copier.stop()
    assert ended.reason == ""
